//! Byte pair encoding by rank: of all adjacent pairs whose concatenation is a token, the lowest rank merges first,
//! the leftmost on ties.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::Hasher;

use rustc_hash::FxHasher;

use super::tokens::TokenTable;

/// Pieces up to this many bytes are merged by scanning for the minimum; longer ones through a heap, which keeps the
/// time near linear.
const PLAIN_BYTES_MAX: usize = 96;

const NONE: u32 = u32::MAX;

/// Ranks by token bytes: open addressing over the ids of a [`TokenTable`], so that no entry owns memory.
pub struct RankIndex {
    /// Rank, or `NONE`; a power of two long and at most half full.
    slots: Vec<u32>,
    token_bytes_max: usize,
}

impl RankIndex {
    /// Indexes the first `ranks` ids of `tokens`. On a token that two ranks share: the two, lower first.
    pub fn new(tokens: &TokenTable, ranks: u32) -> Result<Self, (u32, u32)> {
        let len = (ranks as usize * 2).next_power_of_two();
        let mut index = Self { slots: vec![NONE; len], token_bytes_max: 0 };
        for rank in 0..ranks {
            let Some(token) = tokens.get(rank) else { continue };
            let slot = index.slot(tokens, token);
            if index.slots[slot] != NONE {
                return Err((index.slots[slot], rank));
            }
            index.slots[slot] = rank;
            index.token_bytes_max = index.token_bytes_max.max(token.len());
        }
        Ok(index)
    }

    /// The rank of `token`.
    pub fn rank(&self, tokens: &TokenTable, token: &[u8]) -> Option<u32> {
        if token.len() > self.token_bytes_max {
            return None;
        }
        Some(self.slots[self.slot(tokens, token)]).filter(|rank| *rank != NONE)
    }

    /// Where `token` is, or the free slot where it would be.
    fn slot(&self, tokens: &TokenTable, token: &[u8]) -> usize {
        let mut hasher = FxHasher::default();
        hasher.write(token);
        let mask = self.slots.len() - 1;
        let mut slot = hasher.finish() as usize & mask;
        while self.slots[slot] != NONE && tokens.get(self.slots[slot]) != Some(token) {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// Appends the ids of `piece`. Every single byte must be a token.
    pub fn encode(&self, tokens: &TokenTable, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if let Some(rank) = self.rank(tokens, piece) {
            ids.push(rank);
        } else if piece.len() <= PLAIN_BYTES_MAX {
            self.encode_plain(tokens, piece, scratch, ids);
        } else {
            self.encode_by_heap(tokens, piece, scratch, ids);
        }
    }

    fn encode_plain(&self, tokens: &TokenTable, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let pair = |start: usize, end: usize| self.rank(tokens, &piece[start..end]).unwrap_or(NONE);
        // Starts of the parts with the rank of each with its right neighbour; the piece's end as a last start.
        let parts = &mut scratch.parts;
        parts.clear();
        parts.extend(
            (0..=piece.len())
                .map(|start| (start, if start + 2 <= piece.len() { pair(start, start + 2) } else { NONE })),
        );
        while let Some((at, &(_, rank))) = parts.iter().enumerate().min_by_key(|(at, (_, rank))| (*rank, *at)) {
            if rank == NONE {
                break;
            }
            parts.remove(at + 1);
            let rank_from = |parts: &[(usize, u32)], at: usize| match parts.get(at + 2) {
                Some(&(end, _)) => pair(parts[at].0, end),
                None => NONE,
            };
            parts[at].1 = rank_from(parts, at);
            if at > 0 {
                parts[at - 1].1 = rank_from(parts, at - 1);
            }
        }
        ids.extend(parts.windows(2).map(|part| self.known_rank(tokens, &piece[part[0].0..part[1].0])));
    }

    fn encode_by_heap(&self, tokens: &TokenTable, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let pair = |start: u32, end: u32| self.rank(tokens, &piece[start as usize..end as usize]).unwrap_or(NONE);
        let len = piece.len() as u32;
        let Scratch { heap, next, previous, pair_ranks, .. } = scratch;
        // Parts are named by their start. A part's end is `next`; a merged-away start has no pair rank, ever again.
        next.clear();
        next.extend(1..=len);
        previous.clear();
        previous.extend((0..len).map(|start| start.wrapping_sub(1)));
        pair_ranks.clear();
        pair_ranks.extend((0..len).map(|start| if start + 2 <= len { pair(start, start + 2) } else { NONE }));
        heap.clear();
        heap.extend(
            (0u32..)
                .zip(pair_ranks.iter())
                .filter(|(_, rank)| **rank != NONE)
                .map(|(start, rank)| Reverse((*rank, start))),
        );
        while let Some(Reverse((rank, start))) = heap.pop() {
            // Stale when the part's pair has changed since: a rank names one byte string.
            if pair_ranks[start as usize] != rank {
                continue;
            }
            let right = next[start as usize];
            let end = next[right as usize];
            pair_ranks[right as usize] = NONE;
            next[start as usize] = end;
            if end < len {
                previous[end as usize] = start;
            }
            let mut renew = |start: u32, next: &[u32]| {
                let right = next[start as usize];
                let rank = if right < len { pair(start, next[right as usize]) } else { NONE };
                pair_ranks[start as usize] = rank;
                if rank != NONE {
                    heap.push(Reverse((rank, start)));
                }
            };
            renew(start, next);
            if start > 0 {
                renew(previous[start as usize], next);
            }
        }
        let mut start = 0;
        while start < len {
            let end = next[start as usize];
            ids.push(self.known_rank(tokens, &piece[start as usize..end as usize]));
            start = end;
        }
    }

    /// The rank of a part: single bytes are tokens, and parts only ever grow into tokens.
    fn known_rank(&self, tokens: &TokenTable, part: &[u8]) -> u32 {
        self.rank(tokens, part).expect("every part is a token")
    }
}

/// Buffers that are kept from piece to piece.
#[derive(Default)]
pub struct Scratch {
    parts: Vec<(usize, u32)>,
    heap: BinaryHeap<Reverse<(u32, u32)>>,
    next: Vec<u32>,
    previous: Vec<u32>,
    pair_ranks: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All single bytes and then `more`.
    fn table(more: &[&[u8]]) -> (TokenTable, RankIndex) {
        let mut tokens = TokenTable::default();
        for byte in 0..=255u8 {
            tokens.insert(byte.into(), &[byte]);
        }
        for (rank, token) in (256..).zip(more) {
            tokens.insert(rank, token);
        }
        let index = RankIndex::new(&tokens, tokens.len() as u32).unwrap();
        (tokens, index)
    }

    #[test]
    fn the_lowest_rank_merges_first_and_the_leftmost_on_ties() {
        let (tokens, index) = table(&[b"bc", b"ab", b"aa", b"abc"]);
        let encode = |piece: &[u8]| {
            let mut ids = Vec::new();
            index.encode(&tokens, piece, &mut Scratch::default(), &mut ids);
            ids
        };
        assert_eq!(encode(b"abcd"), [259, 100]);
        assert_eq!(encode(b"aaa"), [258, 97]);
        assert_eq!(encode(b"abab"), [257, 257]);
        assert!(encode(b"").is_empty());
    }

    #[test]
    fn a_token_with_two_ranks_is_found() {
        let mut tokens = TokenTable::default();
        for (rank, token) in (0..).zip([b"a", b"b", b"a"]) {
            tokens.insert(rank, token);
        }
        assert_eq!(RankIndex::new(&tokens, 3).err(), Some((0, 2)));
    }

    #[test]
    fn heap_and_plain_merging_agree_on_random_pieces() {
        let mut state = 9u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for round in 0..40 {
            let mut words: Vec<Vec<u8>> = Vec::new();
            while words.len() < 60 {
                let word: Vec<u8> = (0..2 + random(5)).map(|_| b"abc"[random(3)]).collect();
                if !words.contains(&word) {
                    words.push(word);
                }
            }
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            let (tokens, index) = table(&words);
            let mut scratch = Scratch::default();
            for _ in 0..100 {
                let piece: Vec<u8> = (0..random(200)).map(|_| b"abcd"[random(4)]).collect();
                let (mut plain, mut heap) = (Vec::new(), Vec::new());
                index.encode_plain(&tokens, &piece, &mut scratch, &mut plain);
                index.encode_by_heap(&tokens, &piece, &mut scratch, &mut heap);
                assert_eq!(plain, heap, "round {round}, {:?}", String::from_utf8_lossy(&piece));
            }
        }
    }
}
