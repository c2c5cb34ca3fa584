//! How often each expert was used, kept from run to run, so that a new run starts with the experts that pay most.
//!
//! Counts belong to one model, told by a fingerprint. A file that is missing, damaged or of another model is worth a notice,
//! never an error. A layer's counts add up to `LAYER_USES_MAX` at most: beyond, they shrink in proportion, so that the past
//! fades as new uses come in, and a short run does not outweigh a long one.

use std::path::Path;

use super::sealed::{self, Magic};
use crate::error::Result;

const MAGIC: Magic = *b"DFUSES_\x01";
/// Uses that a layer remembers: about 65,000 tokens of 16 experts.
const LAYER_USES_MAX: u64 = 1 << 20;
/// Fingerprint, layers, experts.
const HEADER_BYTES: usize = 16;

/// Uses of the experts of one model: what earlier runs left, and what this run adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    fingerprint: u64,
    layers: usize,
    experts: usize,
    /// `[layers, experts]`, from earlier runs.
    learned: Vec<u32>,
    /// `[layers, experts]`, not saved yet.
    new: Vec<u32>,
}

impl Histogram {
    /// Nothing learned yet, for a model of `layers` layers of `experts` experts.
    pub fn new(fingerprint: u64, layers: usize, experts: usize) -> Self {
        let counts = vec![0; layers * experts];
        Self { fingerprint, layers, experts, learned: counts.clone(), new: counts }
    }

    /// What earlier runs learned and left at `path`; and a notice if there is a file that is of no use.
    pub fn load(path: &Path, fingerprint: u64, layers: usize, experts: usize) -> (Self, Option<String>) {
        let mut histogram = Self::new(fingerprint, layers, experts);
        let payload = sealed::read(path, MAGIC, histogram.payload_bytes());
        let learned = payload.and_then(|payload| payload.map(|payload| histogram.parse(&payload)).transpose());
        match learned {
            Ok(learned) => {
                histogram.learned = learned.unwrap_or(histogram.learned);
                (histogram, None)
            }
            Err(why) => (histogram, Some(format!("expert use counts: {} {why}; starting without", path.display()))),
        }
    }

    /// Adds what this run has learned since the last save to the file at `path`, replacing it in one step. What other runs
    /// have saved meanwhile is kept, unless they save at the same moment. A damaged file is replaced.
    ///
    /// # Errors
    /// Kind `Io` when it cannot be written; nothing is lost then, neither there nor here.
    pub fn save(&mut self, path: &Path) -> Result<()> {
        let (mut there, _) = Self::load(path, self.fingerprint, self.layers, self.experts);
        there.add(&self.new);
        let mut payload = Vec::with_capacity(self.payload_bytes());
        payload.extend_from_slice(&self.fingerprint.to_le_bytes());
        payload.extend_from_slice(&(self.layers as u32).to_le_bytes());
        payload.extend_from_slice(&(self.experts as u32).to_le_bytes());
        payload.extend(there.learned.iter().flat_map(|count| count.to_le_bytes()));
        sealed::write(path, MAGIC, &payload)?;
        self.learned = there.learned;
        self.new.fill(0);
        Ok(())
    }

    /// Counts a request for `experts` of `layer`. One for more than a quarter of the layer is a scan, which says nothing
    /// about preference, and is not counted; nor are experts that the model does not have.
    pub fn record(&mut self, layer: u16, experts: &[u16]) {
        let layer = usize::from(layer);
        if layer >= self.layers || experts.len() > self.experts.div_ceil(4) {
            return;
        }
        let counts = &mut self.new[layer * self.experts..][..self.experts];
        for expert in experts {
            if let Some(count) = counts.get_mut(usize::from(*expert)) {
                *count = count.saturating_add(1);
            }
        }
    }

    /// Whether nothing is known, of earlier runs or this one.
    pub fn is_empty(&self) -> bool {
        self.learned.iter().chain(&self.new).all(|count| *count == 0)
    }

    /// Whether this run has added anything since the last save.
    pub fn has_news(&self) -> bool {
        self.new.iter().any(|count| *count > 0)
    }

    /// Uses that are remembered of the layer with the most.
    pub fn layer_uses(&self) -> u64 {
        self.learned.chunks(self.experts.max(1)).map(total).max().unwrap_or(0)
    }

    /// Layers, and experts of a layer.
    pub fn shape(&self) -> (usize, usize) {
        (self.layers, self.experts)
    }

    /// Share of its layer's uses that each expert takes, `[layers, experts]`, from 0 to 1; zeros where nothing is known.
    pub fn shares(&self) -> Vec<f32> {
        let mut all = self.clone();
        all.add(&self.new);
        let mut shares = Vec::with_capacity(all.learned.len());
        for counts in all.learned.chunks(self.experts.max(1)) {
            let sum = total(counts).max(1) as f32;
            shares.extend(counts.iter().map(|count| *count as f32 / sum));
        }
        shares
    }

    /// Used experts (`layer · experts + expert`), those first of which memory answers the most reads: hottest first over all
    /// layers, ties to the lower number.
    pub fn hottest(&self) -> Vec<u32> {
        let shares = self.shares();
        let mut order: Vec<u32> = (0..shares.len() as u32).filter(|expert| shares[*expert as usize] > 0.0).collect();
        order.sort_by(|a, b| shares[*b as usize].total_cmp(&shares[*a as usize]).then(a.cmp(b)));
        order
    }

    fn payload_bytes(&self) -> usize {
        HEADER_BYTES + 4 * self.learned.len()
    }

    /// Counts in `payload`, or why they are of no use.
    fn parse(&self, payload: &[u8]) -> Result<Vec<u32>, String> {
        let word = |at: usize| {
            payload.get(at..at + 4).map_or(0, |four| u32::from_le_bytes(four.try_into().unwrap_or_default()))
        };
        let fingerprint = u64::from(word(0)) | u64::from(word(4)) << 32;
        let shape = (word(8) as usize, word(12) as usize);
        if fingerprint != self.fingerprint || shape != self.shape() {
            return Err("belongs to another model".to_owned());
        }
        if payload.len() != self.payload_bytes() {
            return Err(format!("is damaged: {} bytes of counts, expected {}", payload.len(), self.payload_bytes()));
        }
        let mut counts: Vec<u32> = (0..self.learned.len()).map(|at| word(HEADER_BYTES + 4 * at)).collect();
        counts.chunks_mut(self.experts.max(1)).for_each(age);
        Ok(counts)
    }

    /// Adds `counts` to what is learned, and lets it age.
    fn add(&mut self, counts: &[u32]) {
        self.learned.iter_mut().zip(counts).for_each(|(learned, count)| *learned = learned.saturating_add(*count));
        self.learned.chunks_mut(self.experts.max(1)).for_each(age);
    }
}

fn total(counts: &[u32]) -> u64 {
    counts.iter().copied().map(u64::from).sum()
}

/// Shrinks the counts of a layer to what it may remember.
fn age(counts: &mut [u32]) {
    let total = total(counts);
    if total > LAYER_USES_MAX {
        // Below 2^32 · 2^20: no overflow; rounded down, so that the sum stays within the limit.
        counts.iter_mut().for_each(|count| *count = (u64::from(*count) * LAYER_USES_MAX / total) as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_and_path() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("uses");
        (folder, path)
    }

    fn recorded(times: usize) -> Histogram {
        let mut histogram = Histogram::new(7, 2, 8);
        for _ in 0..times {
            histogram.record(0, &[1, 3]);
            histogram.record(1, &[3]);
        }
        histogram
    }

    #[test]
    fn what_is_saved_is_loaded_and_the_next_run_adds_to_it() {
        let (_folder, path) = folder_and_path();
        assert_eq!(Histogram::load(&path, 7, 2, 8), (Histogram::new(7, 2, 8), None), "no file, no notice");
        for run in 1..4 {
            recorded(5).save(&path).unwrap();
            let (loaded, notice) = Histogram::load(&path, 7, 2, 8);
            assert_eq!(notice, None);
            assert_eq!(loaded.learned[1], 5 * run);
            assert_eq!(loaded.hottest(), [11, 1, 3]);
        }
    }

    #[test]
    fn saving_twice_counts_once_and_keeps_what_others_saved() {
        let (_folder, path) = folder_and_path();
        let mut one = recorded(5);
        one.save(&path).unwrap();
        recorded(2).save(&path).unwrap();
        one.save(&path).unwrap();
        assert_eq!(one.learned[1], 7);
        assert_eq!(Histogram::load(&path, 7, 2, 8).0, one);
    }

    #[test]
    fn a_file_that_is_of_no_use_is_a_notice() {
        let (_folder, path) = folder_and_path();
        recorded(5).save(&path).unwrap();
        for (fingerprint, layers, experts) in [(8, 2, 8), (7, 8, 2), (7, 3, 8), (7, 2, 7), (7, 0, 0)] {
            let (histogram, notice) = Histogram::load(&path, fingerprint, layers, experts);
            assert!(histogram.is_empty() && notice.is_some(), "{fingerprint} {layers} {experts}");
        }
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            for bytes in [&changed[..], &whole[..at]] {
                std::fs::write(&path, bytes).unwrap();
                let (histogram, notice) = Histogram::load(&path, 7, 2, 8);
                assert!(histogram.is_empty(), "byte {at}");
                assert!(notice.unwrap().contains(&path.display().to_string()));
            }
        }
    }

    #[test]
    fn a_damaged_file_is_replaced_and_a_foreign_one_is_not() {
        let (_folder, path) = folder_and_path();
        recorded(5).save(&path).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(30);
        std::fs::write(&path, bytes).unwrap();
        recorded(3).save(&path).unwrap();
        assert_eq!(Histogram::load(&path, 7, 2, 8).0.learned[1], 3);
        std::fs::write(&path, "my diary").unwrap();
        let mut histogram = recorded(3);
        assert!(histogram.save(&path).is_err());
        assert_eq!(histogram, recorded(3), "nothing is lost");
        assert_eq!(std::fs::read(&path).unwrap(), b"my diary");
    }

    #[test]
    fn counts_age_and_never_overflow() {
        let (_folder, path) = folder_and_path();
        let mut histogram = Histogram::new(7, 1, 8);
        histogram.new = vec![u32::MAX, u32::MAX, 0, 0, 0, 0, 0, 0];
        histogram.record(0, &[0, 1]);
        histogram.save(&path).unwrap();
        assert!(total(&histogram.learned) <= LAYER_USES_MAX && histogram.learned[0] == (LAYER_USES_MAX / 2) as u32);
        // As many uses of another expert as are remembered: the old ones are worth half.
        histogram.new[2] = LAYER_USES_MAX as u32;
        histogram.save(&path).unwrap();
        assert_eq!(histogram.learned[..3], [1 << 18, 1 << 18, 1 << 19]);
        assert!(histogram.shares().iter().all(|share| (0.0..=1.0).contains(share)));
        // A sealed file with counts that no run leaves.
        let payload: Vec<u8> = [7, 0, 1, 8].into_iter().chain([u32::MAX; 8]).flat_map(u32::to_le_bytes).collect();
        sealed::write(&path, MAGIC, &payload).unwrap();
        let (histogram, notice) = Histogram::load(&path, 7, 1, 8);
        assert!(notice.is_none() && total(&histogram.learned) <= LAYER_USES_MAX);
    }

    #[test]
    fn scans_and_unknown_experts_are_not_counted() {
        let mut histogram = Histogram::new(7, 2, 8);
        histogram.record(0, &[0, 1, 2, 3, 4, 5, 6, 7]);
        histogram.record(2, &[1]);
        histogram.record(1, &[8, u16::MAX]);
        assert!(histogram.is_empty() && histogram.hottest().is_empty());
        assert!(histogram.shares().iter().all(|share| *share == 0.0));
        let nothing = Histogram::new(7, 0, 0);
        assert!(nothing.is_empty() && nothing.shares().is_empty());
    }

    #[test]
    fn the_hottest_come_first_over_all_layers() {
        let mut histogram = Histogram::new(7, 2, 8);
        (0..3).for_each(|_| histogram.record(1, &[4]));
        histogram.record(1, &[2]);
        histogram.record(0, &[5]);
        histogram.record(0, &[6]);
        assert_eq!(histogram.hottest(), [8 + 4, 5, 6, 8 + 2]);
    }
}
