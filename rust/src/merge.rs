//! The merges of one pre-token: repeat the leftmost pair of the lowest rank, until no pair has a rank.
//!
//! Pieces up to `SMALL` bytes are merged by scanning for the lowest rank (quadratic, but within a few cache lines); longer
//! ones with a heap, O(n log n); very long ones rank by rank, O(n). Nothing recurses.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::encode::Model;
use crate::ids::Ids;
use crate::pairs::NO_RANK;

/// Longest piece, in bytes, that is merged by plain scanning.
const SMALL: usize = 48;
/// Longest piece, in bytes, that is merged with the heap (if the merges are ordered).
const LONG: usize = 4096;
/// Space for merging one long piece.
#[derive(Default)]
pub struct Work {
    slots: Vec<u32>,
    heap: BinaryHeap<Reverse<u64>>,
}

const NEXT: [u8; SMALL + 1] = chain(1);
const PREVIOUS: [u8; SMALL + 2] = chain(-1);

/// The neighbour of each place.
const fn chain<const N: usize>(step: i8) -> [u8; N] {
    let mut chain = [0; N];
    let mut place = 0;
    while place < N {
        chain[place] = (place as u8).wrapping_add_signed(step);
        place += 1;
    }
    chain
}

#[inline]
fn candidate(rank: u32, place: usize) -> u32 {
    match rank {
        NO_RANK => u32::MAX,
        _ => rank << 6 | place as u32,
    }
}

/// Marks the last slot of a token that takes several.
const LAST: u32 = 1 << 31;
/// A slot inside a token.
const INNER: u32 = u32::MAX;

impl Model {
    /// Appends the ids of one piece.
    pub(crate) fn encode_piece(&self, piece: &[u8], work: &mut Work, out: &mut Ids) {
        if let Some(&id) = self.whole_pieces.get(piece) {
            out.push(id);
        } else if piece.len() <= SMALL {
            self.encode_small(piece, out);
        } else if piece.len() <= LONG || !self.ordered {
            self.encode_long(piece, work, out);
        } else {
            self.encode_very_long(piece, out);
        }
    }

    /// Candidates are `rank << 6 | place`, so that the smallest is the leftmost pair of the lowest rank.
    fn encode_small(&self, piece: &[u8], out: &mut Ids) {
        let length = piece.len();
        let mut ids = [0u32; SMALL + 1];
        let mut found = [u32::MAX; SMALL + 1];
        // Neighbours by place; `length` closes the chain.
        let mut next: [u8; SMALL + 1] = NEXT;
        let mut previous: [u8; SMALL + 2] = PREVIOUS;
        for (id, &byte) in ids.iter_mut().zip(piece) {
            *id = self.byte_ids[byte as usize];
        }
        for (place, pair) in piece.windows(2).enumerate() {
            found[place] = candidate(self.byte_ranks[(pair[0] as usize) << 8 | pair[1] as usize], place);
        }
        loop {
            let best = found[..length].iter().fold(u32::MAX, |best, &other| best.min(other));
            if best == u32::MAX {
                break;
            }
            let place = best as usize & 63;
            let gone = next[place] as usize;
            let after = next[gone] as usize;
            ids[place] = self.merged[best as usize >> 6];
            found[gone] = u32::MAX;
            (next[place], previous[after]) = (after as u8, place as u8);
            found[place] = match after < length {
                true => candidate(self.rank(ids[place], ids[after]), place),
                false => u32::MAX,
            };
            if place > 0 {
                let before = previous[place] as usize;
                found[before] = candidate(self.rank(ids[before], ids[place]), before);
            }
        }
        let mut place = 0;
        while place < length {
            out.push(ids[place]);
            place = next[place] as usize;
        }
    }

    /// One slot a byte; a token's id stands in its first slot, and marked with `LAST` in its last one, so that both
    /// neighbours are found without links. A heap entry is (rank, first slot) in one number; it is stale when the
    /// pair at that place has another rank by now.
    pub(crate) fn encode_long(&self, piece: &[u8], work: &mut Work, out: &mut Ids) {
        let slots = &mut work.slots;
        slots.clear();
        slots.extend(piece.iter().map(|&byte| self.byte_ids[byte as usize]));
        let mut entries = std::mem::take(&mut work.heap).into_vec();
        entries.clear();
        for at in 0..slots.len() - 1 {
            let rank = self.rank(slots[at], slots[at + 1]);
            if rank != NO_RANK {
                entries.push(Reverse((rank as u64) << 32 | at as u64));
            }
        }
        let mut heap = BinaryHeap::from(entries);
        while let Some(Reverse(entry)) = heap.pop() {
            let (rank, at) = ((entry >> 32) as u32, entry as u32 as usize);
            let left = slots[at];
            if left & LAST != 0 {
                continue; // inside a token, or its last slot
            }
            let middle = at + self.span(left);
            if middle >= slots.len() || self.rank(left, slots[middle]) != rank {
                continue;
            }
            self.merge_at(slots, at, middle, rank, |rank, at| heap.push(Reverse((rank as u64) << 32 | at as u64)));
        }
        work.heap = heap;
        self.collect(&work.slots, out);
    }

    /// The same slots, but no heap: with ordered merges a merge only creates pairs of higher ranks, so the ranks can be
    /// served one after the other, each with the list of its places. O(n), apart from sorting the lists of pairs that
    /// can overlap themselves ("aaa"), where the order counts.
    pub(crate) fn encode_very_long(&self, piece: &[u8], out: &mut Ids) {
        let mut slots: Vec<u32> = piece.iter().map(|&byte| self.byte_ids[byte as usize]).collect();
        let mut places: Vec<Vec<u32>> = vec![Vec::new(); self.merged.len()];
        for at in 0..slots.len() - 1 {
            let rank = self.rank(slots[at], slots[at + 1]);
            if rank != NO_RANK {
                places[rank as usize].push(at as u32);
            }
        }
        for rank in 0..self.merged.len() {
            let mut list = std::mem::take(&mut places[rank]);
            if !list.is_sorted() {
                list.sort_unstable();
            }
            for at in list {
                let at = at as usize;
                let left = slots[at];
                if left & LAST != 0 {
                    continue;
                }
                let middle = at + self.span(left);
                if middle >= slots.len() || self.rank(left, slots[middle]) != rank as u32 {
                    continue;
                }
                self.merge_at(&mut slots, at, middle, rank as u32, |rank, at| places[rank as usize].push(at as u32));
            }
        }
        self.collect(&slots, out);
    }

    /// Merges the tokens at `at` and `middle`; tells of the new pairs with a rank.
    #[inline]
    fn merge_at(&self, slots: &mut [u32], at: usize, middle: usize, rank: u32, mut found: impl FnMut(u32, usize)) {
        let end = middle + self.span(slots[middle]);
        let new = self.merged[rank as usize];
        slots[middle - 1] = INNER;
        slots[middle] = INNER;
        slots[at] = new;
        slots[end - 1] = new | LAST;
        if at > 0 {
            let before = slots[at - 1] & !LAST;
            let rank = self.rank(before, new);
            if rank != NO_RANK {
                found(rank, at - self.span(before));
            }
        }
        if end < slots.len() {
            let rank = self.rank(new, slots[end]);
            if rank != NO_RANK {
                found(rank, at);
            }
        }
    }

    /// Reads the ids off the slots.
    fn collect(&self, slots: &[u32], out: &mut Ids) {
        let mut at = 0;
        while at < slots.len() {
            out.push(slots[at]);
            at += self.span(slots[at]);
        }
    }
}
