//! A hash table from pairs of symbols to a u32, for the two inner loops (merge loop, encoder).

use crate::words::{prefetch, want_large_pages};

const EMPTY: u64 = u64::MAX;

/// Two symbols in one key.
#[inline]
pub fn pair_key(left: u32, right: u32) -> u64 {
    (left as u64) << 32 | right as u64
}

/// Open addressing, linear probing, at most half full; entries are never removed one by one.
pub struct PairTable {
    entries: Vec<(u64, u32)>,
    used: usize,
}

impl PairTable {
    pub fn with_capacity(pairs: usize) -> Self {
        PairTable { entries: vec![(EMPTY, 0); (pairs * 2).next_power_of_two().max(16)], used: 0 }
    }

    /// Multiplicative hashing (Knuth): the product's upper half depends on every bit of the key.
    #[inline]
    fn home(&self, key: u64) -> usize {
        let product = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (product ^ product >> 32) as usize & (self.entries.len() - 1)
    }

    /// Asks for the entry of a pair that is looked up soon.
    #[inline]
    pub fn prefetch(&self, left: u32, right: u32) {
        prefetch(&self.entries, self.home(pair_key(left, right)));
    }

    #[inline]
    pub fn get(&self, left: u32, right: u32) -> Option<u32> {
        let key = pair_key(left, right);
        let mask = self.entries.len() - 1;
        let mut at = self.home(key);
        loop {
            let (found, value) = self.entries[at & mask];
            if found == key {
                return Some(value);
            }
            if found == EMPTY {
                return None;
            }
            at += 1;
        }
    }

    /// The value of the pair, after setting it to `value` if the pair was not there.
    #[inline]
    pub fn get_or_insert(&mut self, left: u32, right: u32, value: u32) -> u32 {
        let key = pair_key(left, right);
        let mask = self.entries.len() - 1;
        let mut at = self.home(key);
        loop {
            let entry = &mut self.entries[at & mask];
            if entry.0 == key {
                return entry.1;
            }
            if entry.0 == EMPTY {
                *entry = (key, value);
                self.used += 1;
                if self.used * 2 > self.entries.len() {
                    self.grow();
                }
                return value;
            }
            at += 1;
        }
    }

    #[cold]
    fn grow(&mut self) {
        let mut larger = PairTable::with_capacity(self.entries.len());
        for &(key, value) in self.entries.iter().filter(|entry| entry.0 != EMPTY) {
            larger.get_or_insert((key >> 32) as u32, key as u32, value);
        }
        *self = larger;
    }
}

/// No rank: the pair does not merge.
pub const NO_RANK: u32 = u32::MAX;
/// Bits of an id and of a rank in a `RankTable`.
const ID_BITS: u32 = 21;
const RANK_BITS: u32 = 22;
/// Ids that a vocabulary may have.
pub const MOST_IDS: usize = (1 << ID_BITS) - 1;

/// Pair of ids → rank + 1 (0: no cell), for the encoder: everything about a pair in eight bytes, as most look-ups miss the nearest caches.
///
/// Most pairs asked for do not merge. A bit a hash value, eight times as many as pairs, says so from a nearer cache.
pub struct RankTable {
    cells: Vec<u64>,
    known: Vec<u64>,
}

impl RankTable {
    /// None if ids or ranks are too large for the cells.
    pub fn with_capacity(ids: usize, pairs: usize) -> Option<Self> {
        let fits = ids <= MOST_IDS && pairs + 1 < 1 << RANK_BITS;
        let size = (pairs * 2).next_power_of_two().max(16);
        fits.then(|| {
            let cells = vec![0; size];
            want_large_pages(&cells);
            RankTable { cells, known: vec![0; size / 16] }
        })
    }

    /// Where a pair's cell is looked for, its word of `known` and its bit there.
    #[inline]
    fn home(&self, pair: u64) -> (usize, usize, u64) {
        let product = pair.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let word = (product >> 46) as usize & (self.known.len() - 1);
        ((product >> 40) as usize & (self.cells.len() - 1), word, 1 << (product >> 34 & 63))
    }

    /// The first rank of a pair stays.
    pub fn insert(&mut self, left: u32, right: u32, rank: u32) {
        let pair = (left as u64) << ID_BITS | right as u64;
        let (mut at, word, bit) = self.home(pair);
        self.known[word] |= bit;
        while self.cells[at] != 0 {
            if self.cells[at] >> RANK_BITS == pair {
                return;
            }
            at = (at + 1) & (self.cells.len() - 1);
        }
        self.cells[at] = pair << RANK_BITS | (rank as u64 + 1);
    }

    #[inline]
    pub fn get(&self, left: u32, right: u32) -> u32 {
        let pair = (left as u64) << ID_BITS | right as u64;
        let (mut at, word, bit) = self.home(pair);
        if self.known[word] & bit == 0 {
            return NO_RANK;
        }
        loop {
            let cell = self.cells[at & (self.cells.len() - 1)];
            if cell == 0 {
                return NO_RANK;
            }
            if cell >> RANK_BITS == pair {
                return (cell as u32 & ((1 << RANK_BITS) - 1)) - 1;
            }
            at += 1;
        }
    }
}

#[cfg(test)]
#[path = "tests/pairs.rs"]
mod tests;
