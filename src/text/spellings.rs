//! Finds spellings of added tokens in a text, leftmost first and longest first, in linear time.

use rustc_hash::FxHashMap;

/// A set of spellings with their ids, as a trie over bytes.
#[derive(Default)]
pub struct Spellings {
    /// (node, byte) to child; node 0 is the root.
    children: FxHashMap<(u32, u8), u32>,
    /// Id of the spelling that ends at a node.
    ids: Vec<Option<u32>>,
}

impl Spellings {
    /// The trie of `(spelling, id)`; a spelling given twice keeps its last id, an empty one is left out.
    pub fn new<'s>(spellings: impl IntoIterator<Item = (&'s str, u32)>) -> Self {
        let mut trie = Self { children: FxHashMap::default(), ids: vec![None] };
        for (spelling, id) in spellings.into_iter().filter(|(spelling, _)| !spelling.is_empty()) {
            let mut node = 0;
            for byte in spelling.bytes() {
                let next = trie.ids.len() as u32;
                node = *trie.children.entry((node, byte)).or_insert(next);
                if node == next {
                    trie.ids.push(None);
                }
            }
            trie.ids[node as usize] = Some(id);
        }
        trie
    }

    /// The id of exactly `spelling`.
    pub fn id(&self, spelling: &str) -> Option<u32> {
        let node = spelling.bytes().try_fold(0, |node, byte| self.children.get(&(node, byte)).copied())?;
        self.ids.get(node as usize).copied().flatten()
    }

    /// The first spelling in `text` at or after byte `from`: start, end and id.
    pub fn find(&self, text: &str, from: usize) -> Option<(usize, usize, u32)> {
        if self.children.is_empty() {
            return None;
        }
        let bytes = text.as_bytes();
        (from..bytes.len()).find_map(|start| {
            let (mut node, mut found) = (0, None);
            for (at, byte) in bytes.iter().enumerate().skip(start) {
                let Some(&next) = self.children.get(&(node, *byte)) else { break };
                node = next;
                if let Some(id) = self.ids[node as usize] {
                    found = Some((start, at + 1, id));
                }
            }
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leftmost_and_then_the_longest_spelling_is_found() {
        let set = Spellings::new([("<a>", 1), ("<a>b", 2), ("é", 3), ("", 4)]);
        assert_eq!(set.find("x<a>b", 0), Some((1, 5, 2)));
        assert_eq!(set.find("<<a>é", 0), Some((1, 4, 1)));
        assert_eq!(set.find("<<a>é", 4), Some((4, 6, 3)));
        assert_eq!(set.find("<a", 0), None);
        assert_eq!(set.find("", 0), None);
        assert_eq!(Spellings::new([]).find("abc", 0), None);
        assert_eq!(Spellings::default().id("x"), None);
        assert_eq!(set.id("<a>"), Some(1));
        assert_eq!(set.id("<a"), None);
    }
}
