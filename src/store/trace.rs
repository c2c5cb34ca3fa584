//! Which experts were asked for, request by request: recorded from real runs or made up, and replayed to compare what a
//! cache would have done. In a file: little-endian, checked when read, the same in memory and on disk.

use std::path::Path;

use super::sealed::{self, Magic};
use crate::error::{Error, Result};

const MAGIC: Magic = *b"DFTRACE\x01";
/// 2 GiB: a million tokens of the released model would be 3 GB, which nobody replays.
const PAYLOAD_BYTES_MAX: usize = 1 << 31;
const HEADER_BYTES: usize = 8;

/// Requests in the order they were made; each is of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    layers: usize,
    experts: usize,
    /// For each request: layer, number of experts, the experts, ascending.
    words: Vec<u16>,
}

impl Trace {
    /// No requests yet, of a model with `layers` layers of `experts` experts.
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { layers, experts, words: Vec::new() }
    }

    /// Layers of the model; every request is of a lower one.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Experts of a layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Appends a request for `experts` (ascending, distinct, at least one) of `layer`.
    ///
    /// # Errors
    /// Kind `Other` for a layer or an expert that the model does not have, or another order.
    pub fn push(&mut self, layer: u16, experts: &[u16]) -> Result<()> {
        if usize::from(layer) >= self.layers {
            return Err(Error::other(format!("trace: layer {layer}, expected less than {}", self.layers)));
        }
        let Some(last) = experts.last() else {
            return Err(Error::other(format!("trace: a request for no expert of layer {layer}")));
        };
        if usize::from(*last) >= self.experts {
            return Err(Error::other(format!("trace: expert {last}, expected less than {}", self.experts)));
        }
        if !experts.is_sorted_by(|a, b| a < b) {
            return Err(Error::other(format!("trace: experts of layer {layer} are not in ascending order")));
        }
        // Ascending below 65,536: the count is 65,536 at most, and only that is too much for a word.
        let count = u16::try_from(experts.len()).map_err(|_| {
            Error::other(format!("trace: {} experts in one request, expected 65535 at most", experts.len()))
        })?;
        self.words.extend_from_slice(&[layer, count]);
        self.words.extend_from_slice(experts);
        Ok(())
    }

    /// The requests: layer and experts.
    pub fn requests(&self) -> impl Iterator<Item = (u16, &[u16])> {
        let mut rest = &self.words[..];
        std::iter::from_fn(move || {
            let (&[layer, count], after) = rest.split_first_chunk::<2>()?;
            let (experts, after) = after.split_at_checked(usize::from(count))?;
            rest = after;
            Some((layer, experts))
        })
    }

    /// Reads the trace at `path`.
    ///
    /// # Errors
    /// Kind `Io` when there is none, or when it is damaged, of another version or no trace at all.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |what: String| {
            Error::io(format!("trace {} {what}", path.display())).hint("give a file that a run recorded its routing in")
        };
        let payload = sealed::read(path, MAGIC, PAYLOAD_BYTES_MAX).map_err(fail)?;
        let payload = payload.ok_or_else(|| fail("does not exist".to_owned()))?;
        Self::from_payload(&payload).map_err(|error| fail(format!("is damaged: {}", error.message())))
    }

    /// Replaces the trace at `path` in one step.
    ///
    /// # Errors
    /// Kind `Io` when it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut payload = Vec::with_capacity(HEADER_BYTES + 2 * self.words.len());
        for size in [self.layers, self.experts] {
            let size = u32::try_from(size).map_err(|_| Error::other(format!("trace: {size} layers or experts")))?;
            payload.extend_from_slice(&size.to_le_bytes());
        }
        payload.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        if payload.len() > PAYLOAD_BYTES_MAX {
            let message = format!("trace of {} bytes, expected {PAYLOAD_BYTES_MAX} at most", payload.len());
            return Err(Error::io(message).hint("record fewer tokens"));
        }
        sealed::write(path, MAGIC, &payload)
    }

    fn from_payload(payload: &[u8]) -> Result<Self> {
        let short = || Error::other(format!("{} bytes are no whole number of requests", payload.len()));
        let (header, words) = payload.split_at_checked(HEADER_BYTES).ok_or_else(short)?;
        let size =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize;
        let mut trace = Self::new(size(0), size(4));
        let (words, []) = words.as_chunks::<2>() else { return Err(short()) };
        let words: Vec<u16> = words.iter().map(|word| u16::from_le_bytes(*word)).collect();
        let mut rest = &words[..];
        while let Some((&[layer, count], after)) = rest.split_first_chunk::<2>() {
            let (experts, after) = after.split_at_checked(usize::from(count)).ok_or_else(short)?;
            trace.push(layer, experts)?;
            rest = after;
        }
        if rest.is_empty() { Ok(trace) } else { Err(short()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Trace {
        let mut trace = Trace::new(3, 10);
        for (layer, experts) in [(0, &[1, 9][..]), (2, &[0]), (0, &[3, 4, 5])] {
            trace.push(layer, experts).unwrap();
        }
        trace
    }

    #[test]
    fn a_trace_comes_back_as_it_went() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        for trace in [small(), Trace::new(0, 0), Trace::new(92, 896)] {
            trace.write(&path).unwrap();
            assert_eq!(Trace::read(&path).unwrap(), trace);
        }
        let requests: Vec<_> = small().requests().map(|(layer, experts)| (layer, experts.to_vec())).collect();
        assert_eq!(requests, [(0, vec![1, 9]), (2, vec![0]), (0, vec![3, 4, 5])]);
    }

    #[test]
    fn requests_that_the_model_cannot_make_are_refused() {
        let mut trace = small();
        for (layer, experts) in [(3, &[1][..]), (0, &[]), (0, &[10]), (0, &[2, 1]), (0, &[1, 1])] {
            assert!(trace.push(layer, experts).is_err(), "{layer} {experts:?}");
        }
        assert_eq!(trace, small());
    }

    #[test]
    fn sealed_nonsense_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        assert!(Trace::read(&path).unwrap_err().message().contains("does not exist"));
        let header = [3, 0, 0, 0, 10, 0, 0, 0];
        // Odd; cut after the layer; fewer experts than said; a layer, an expert out of range; none.
        for rest in [&[0][..], &[0, 0], &[0, 0, 2, 0, 1, 0], &[3, 0, 1, 0, 1, 0], &[0, 0, 1, 0, 10, 0], &[0, 0, 0, 0]] {
            sealed::write(&path, MAGIC, &[&header, rest].concat()).unwrap();
            assert!(Trace::read(&path).unwrap_err().message().contains("is damaged"), "{rest:?}");
        }
        sealed::write(&path, MAGIC, &header[..5]).unwrap();
        assert!(Trace::read(&path).is_err());
    }
}
