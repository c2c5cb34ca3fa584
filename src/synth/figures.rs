//! What a trace looks like, in the figures by which real routing was measured.

use std::collections::VecDeque;

/// Tokens that are remembered for comparison.
const WINDOW: usize = 12;

/// Counts over a trace, token by token.
#[derive(Debug, Clone)]
pub struct Figures {
    layers: usize,
    experts: usize,
    top_k: usize,
    tokens: u64,
    /// `[layers, experts]`: tokens that used it.
    used: Vec<u32>,
    /// The last tokens, newest first, each `[layers, top_k]`.
    recent: VecDeque<Vec<u16>>,
    /// By distance: experts in common, and pairs of tokens.
    shared: [(u64, u64); WINDOW + 1],
    /// By number of tokens: different experts of so many in a row, and how often that was counted.
    union: [(u64, u64); WINDOW + 1],
}

impl Figures {
    /// For a model of `layers` layers of `experts` experts.
    pub fn new(layers: usize, experts: usize, top_k: usize) -> Self {
        Self {
            layers,
            experts,
            top_k,
            tokens: 0,
            used: vec![0; layers * experts],
            recent: VecDeque::new(),
            shared: [(0, 0); WINDOW + 1],
            union: [(0, 0); WINDOW + 1],
        }
    }

    /// Takes in the next token's experts, `[layers, top_k]`, ascending within a layer.
    pub fn add(&mut self, token: &[u16]) {
        assert_eq!(token.len(), self.layers * self.top_k, "a token of another shape");
        for (used, ids) in self.used.chunks_exact_mut(self.experts).zip(token.chunks_exact(self.top_k)) {
            ids.iter().for_each(|&id| used[usize::from(id)] += 1);
        }
        self.recent.push_front(token.to_vec());
        self.recent.truncate(WINDOW);
        self.tokens += 1;
        // Age of the newest earlier use of each expert of the token tells both sharing and unions.
        for back in 1..self.recent.len() {
            let (now, then) = (&self.recent[0], &self.recent[back]);
            let pairs = now.chunks_exact(self.top_k).zip(then.chunks_exact(self.top_k));
            self.shared[back].0 += pairs.map(|(a, b)| in_common(a, b)).sum::<u64>();
            self.shared[back].1 += 1;
        }
        let mut seen = vec![false; self.experts];
        for layer in 0..self.layers {
            seen.fill(false);
            let mut different = 0;
            for (count, token) in (1..).zip(&self.recent) {
                for &id in &token[layer * self.top_k..][..self.top_k] {
                    different += u64::from(!std::mem::replace(&mut seen[usize::from(id)], true));
                }
                self.union[count].0 += different;
            }
        }
        (1..=self.recent.len()).for_each(|count| self.union[count].1 += 1);
    }

    fn reads_a_token(&self) -> f64 {
        (self.layers * self.top_k) as f64
    }

    /// Share of its experts that a token has in common with the one `back` before it (1 to 11).
    pub fn shared(&self, back: usize) -> f64 {
        let (experts, pairs) = self.shared[back];
        experts as f64 / (pairs.max(1) as f64 * self.reads_a_token())
    }

    /// Different experts that `count` tokens in a row use (1 to 12), of those they use.
    pub fn union(&self, count: usize) -> f64 {
        let (experts, times) = self.union[count];
        experts as f64 / (times.max(1) as f64 * count as f64 * self.reads_a_token())
    }

    /// The most used `part` of each layer's experts: `[layers]` lists.
    pub fn most_used_ids(&self, part: f64) -> Vec<Vec<u16>> {
        let first = (part * self.experts as f64).round() as usize;
        let layer = |used: &[u32]| {
            let mut ids: Vec<u16> = (0..self.experts as u16).collect();
            ids.sort_by_key(|&id| (std::cmp::Reverse(used[usize::from(id)]), id));
            ids.truncate(first);
            ids
        };
        self.used.chunks_exact(self.experts).map(layer).collect()
    }

    /// Share of all reads that `ids`, a list a layer, take.
    pub fn share_of(&self, ids: &[Vec<u16>]) -> f64 {
        let layers = self.used.chunks_exact(self.experts).zip(ids);
        let reads: u64 =
            layers.map(|(used, ids)| ids.iter().map(|&id| u64::from(used[usize::from(id)])).sum::<u64>()).sum();
        reads as f64 / (self.tokens.max(1) as f64 * self.reads_a_token())
    }

    /// Share of all reads that the most used `part` of each layer's experts take, in this very sample.
    pub fn most_used(&self, part: f64) -> f64 {
        self.share_of(&self.most_used_ids(part))
    }
}

/// Numbers that are in both of two ascending lists.
fn in_common(a: &[u16], b: &[u16]) -> u64 {
    let (mut i, mut j, mut count) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        match a[i].cmp(&b[j]) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                count += 1;
                i += 1;
                j += 1;
            }
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_trace_counted_by_hand() {
        let mut figures = Figures::new(1, 8, 2);
        for token in [[0, 1], [1, 2], [1, 3], [0, 1]] {
            figures.add(&token);
        }
        assert_eq!(figures.shared(1), 0.5);
        // 0,1 against 1,3: one; 1,2 against 0,1: one.
        assert_eq!(figures.shared(2), 0.5);
        assert_eq!(figures.shared(3), 1.0);
        assert_eq!(figures.union(2), 3.0 / 4.0);
        assert_eq!(figures.most_used_ids(0.125), [[1]]);
        assert_eq!(figures.most_used(0.125), 4.0 / 8.0);
        assert_eq!(figures.share_of(&[vec![0, 3]]), 3.0 / 8.0);
    }
}
