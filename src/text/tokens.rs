//! The bytes of every token, by id.

/// One buffer of bytes and a range of it for each id; ids without a token have no range.
#[derive(Default)]
pub struct TokenTable {
    bytes: Vec<u8>,
    /// Start and length, at an id's place; a start of `u32::MAX` means no token.
    spans: Vec<(u32, u32)>,
}

const NO_TOKEN: (u32, u32) = (u32::MAX, 0);

impl TokenTable {
    /// A table for ids below `ids`, with room for `bytes` bytes.
    pub fn with_capacity(ids: usize, bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), spans: Vec::with_capacity(ids) }
    }

    /// Gives `id` its bytes. False, and nothing done, when it has some already. Panics past 4 GiB of tokens; callers
    /// read files far below that.
    pub fn insert(&mut self, id: u32, token: &[u8]) -> bool {
        let at = id as usize;
        if at >= self.spans.len() {
            self.spans.resize(at + 1, NO_TOKEN);
        }
        if self.spans[at] != NO_TOKEN {
            return false;
        }
        let start = u32::try_from(self.bytes.len()).expect("token files are capped far below 4 GiB");
        self.bytes.extend_from_slice(token);
        self.spans[at] = (start, token.len() as u32);
        true
    }

    /// The bytes of `id`, if it has a token.
    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let (start, len) = *self.spans.get(id as usize)?;
        (start != u32::MAX).then(|| &self.bytes[start as usize..][..len as usize])
    }

    /// One more than the largest id.
    pub fn len(&self) -> usize {
        self.spans.len()
    }
}
