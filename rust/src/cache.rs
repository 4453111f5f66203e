//! What one thread remembers while encoding: pieces and their ids. Bounded, so that no text makes it grow without end.

use std::collections::BinaryHeap;

use crate::words::{hash, prefetch, want_large_pages};

/// Ids that an entry for a short piece holds.
pub const INLINE: usize = 4;
/// Ids are below this: their two highest bits hold a number in the table of short pieces.
pub const MOST_IDS: usize = 1 << 30;
/// Entries for short pieces, at first and at most (16 MB).
const FIRST_ENTRIES: usize = 1 << 14;
const MOST_ENTRIES: usize = 1 << 19;

/// A short piece and its ids: the key's two halves, then two ids in each number, with the number of ids less one in the
/// two highest bits of the first. Of more than four ids, start and number in `more`, and `MORE`. Not a struct, as only
/// arrays of numbers are allocated without being written.
type Entry = [u64; 4];
const MORE: u64 = u64::MAX;
/// Ids in `more` after which all short pieces are forgotten (4 MB).
const MOST_MORE: usize = 1 << 20;

/// What the cache knows of a piece.
pub enum Known<'a> {
    /// The first so many of four ids.
    Few([u32; INLINE], usize),
    Many(&'a [u32]),
    Nothing,
}

/// Short pieces lie in sets of two entries, one cache line. A new piece takes the second place of its set and changes
/// places with the first when it comes again: so the frequent ones stay. The table grows with the text.
pub struct Cache {
    entries: Vec<Entry>,
    used: usize,
    more: Vec<u32>,
    wide: Wide,
    pub work: Work,
}

/// Space for merging one piece.
#[derive(Default)]
pub struct Work {
    pub ids: Vec<u32>,
    pub slots: Vec<u32>,
    pub heap: BinaryHeap<std::cmp::Reverse<u64>>,
}

impl Default for Cache {
    fn default() -> Self {
        Cache {
            entries: vec![[0; 4]; FIRST_ENTRIES],
            used: 0,
            more: Vec::new(),
            wide: Wide::default(),
            work: Work::default(),
        }
    }
}

impl Cache {
    /// First entry of the key's set. Valid until the next call of `grow`.
    #[inline]
    pub fn home(&self, key: u128) -> usize {
        hash(key) as usize & (self.entries.len() - 2)
    }

    /// Asks for the entries of a key that is looked up soon; returns their place.
    #[inline]
    pub fn prefetch(&self, key: u128) -> usize {
        let home = self.home(key);
        prefetch(&self.entries, home);
        home
    }

    /// The ids of a short piece, whose set is at `home`.
    #[inline(always)]
    pub fn get(&mut self, key: u128, home: usize) -> Known<'_> {
        let set = &mut self.entries[home..home + 2];
        let (low, high) = (key as u64, (key >> 64) as u64);
        if set[0][0] != low || set[0][1] != high {
            if set[1][0] != low || set[1][1] != high {
                return Known::Nothing;
            }
            set.swap(0, 1);
        }
        let [_, _, head, tail] = set[0];
        if tail == MORE {
            let start = head as u32 as usize;
            return Known::Many(&self.more[start..start + (head >> 32) as usize]);
        }
        let first = head as u32;
        let ids = [first & (MOST_IDS as u32 - 1), (head >> 32) as u32, tail as u32, (tail >> 32) as u32];
        Known::Few(ids, 1 + (first >> 30) as usize)
    }

    /// The ids of a piece without a key.
    pub fn get_wide(&self, piece: &[u8]) -> Known<'_> {
        self.wide.get(piece).map_or(Known::Nothing, Known::Many)
    }

    /// Notes the ids in `work`. `key` is 0 for pieces without a key.
    pub fn remember(&mut self, piece: &[u8], key: u128) {
        let ids = &self.work.ids;
        if key == 0 {
            return self.wide.insert(piece, ids);
        }
        if self.more.len() > MOST_MORE {
            (self.entries, self.more, self.used) = (vec![[0; 4]; self.entries.len()], Vec::new(), 0);
        }
        let mut padded = [0u64; INLINE];
        padded.iter_mut().zip(ids).for_each(|(cell, &id)| *cell = id as u64);
        let (mut head, mut tail) = (padded[0] | padded[1] << 32, padded[2] | padded[3] << 32);
        if ids.len() <= INLINE {
            head |= (ids.len() as u64 - 1) << 30;
        } else {
            (head, tail) = (self.more.len() as u64 | (ids.len() as u64) << 32, MORE);
            self.more.extend_from_slice(ids);
        }
        self.place([key as u64, (key >> 64) as u64, head, tail]);
        self.used += 1;
    }

    /// Enlarges the table of short pieces when it is half full.
    pub fn grow(&mut self) {
        if self.used * 2 > self.entries.len() && self.entries.len() < MOST_ENTRIES {
            let larger = vec![[0; 4]; self.entries.len() * 4];
            want_large_pages(&larger);
            let old = std::mem::replace(&mut self.entries, larger);
            old.into_iter().filter(|entry| entry[1] != 0).for_each(|entry| self.place(entry));
        }
    }

    fn place(&mut self, entry: Entry) {
        let home = self.home((entry[1] as u128) << 64 | entry[0] as u128);
        let second = (self.entries[home][1] != 0) as usize;
        self.entries[home + second] = entry;
    }
}

/// Longest piece, in bytes, that is remembered.
const WIDE: usize = 96;
/// Pieces, and bytes of pieces, after which everything is forgotten (some 12 MB in all, 24 MB at worst).
const WIDE_PIECES: usize = 1 << 17;
const WIDE_BYTES: usize = 4 << 20;

/// Pieces without a key. Their bytes and ids lie end to end; the table says where.
#[derive(Default)]
struct Wide {
    /// (hash, start in `text`, start in `ids`, length in bytes << 16 | number of ids); the last is 0 in empty places.
    table: Vec<[u32; 4]>,
    used: usize,
    text: Vec<u8>,
    ids: Vec<u32>,
}

impl Wide {
    fn get(&self, piece: &[u8]) -> Option<&[u32]> {
        if self.table.is_empty() || piece.len() > WIDE {
            return None;
        }
        let (mask, wanted) = (self.table.len() - 1, hash_bytes(piece));
        let mut at = wanted as usize & mask;
        loop {
            let [found, text, ids, sizes] = self.table[at];
            if sizes == 0 {
                return None;
            }
            let (text, ids) = (text as usize, ids as usize);
            if found == wanted && self.text[text..text + (sizes >> 16) as usize] == *piece {
                return Some(&self.ids[ids..ids + (sizes & 0xFFFF) as usize]);
            }
            at = (at + 1) & mask;
        }
    }

    fn insert(&mut self, piece: &[u8], ids: &[u32]) {
        if piece.len() > WIDE {
            return;
        }
        if self.used >= WIDE_PIECES || self.text.len() > WIDE_BYTES {
            *self = Wide::default();
        }
        if self.used * 2 >= self.table.len() {
            let larger = vec![[0; 4]; (self.table.len() * 2).max(1 << 10)];
            let old = std::mem::replace(&mut self.table, larger);
            old.into_iter().filter(|entry| entry[3] != 0).for_each(|entry| self.place(entry));
        }
        let sizes = (piece.len() as u32) << 16 | ids.len() as u32;
        self.place([hash_bytes(piece), self.text.len() as u32, self.ids.len() as u32, sizes]);
        self.text.extend_from_slice(piece);
        self.ids.extend_from_slice(ids);
        self.used += 1;
    }

    fn place(&mut self, entry: [u32; 4]) {
        let mask = self.table.len() - 1;
        let mut at = entry[0] as usize & mask;
        while self.table[at][3] != 0 {
            at = (at + 1) & mask;
        }
        self.table[at] = entry;
    }
}

/// Eight bytes a step, each folded into the hash of what came before.
fn hash_bytes(piece: &[u8]) -> u32 {
    let mut state = piece.len() as u64;
    for part in piece.chunks(8) {
        let mut bytes = [0; 8];
        bytes[..part.len()].copy_from_slice(part);
        state = hash((state as u128) << 64 | u64::from_le_bytes(bytes) as u128);
    }
    (state >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::pack;

    #[test]
    fn remembers_what_it_is_told_or_nothing() {
        let mut cache = Cache::default();
        for number in 0..400_000u32 {
            let text = format!("{number}{}", "x".repeat(number as usize % 60));
            let piece = text.as_bytes();
            let key = if piece.len() <= 15 { pack(piece, 0, piece.len()) } else { 0 };
            cache.work.ids = (0..1 + number % 7).map(|i| number * 7 + i).collect();
            cache.remember(piece, key);
            cache.grow();
            let found = match if key == 0 { cache.get_wide(piece) } else { cache.get(key, cache.home(key)) } {
                Known::Few(ids, count) => ids[..count].to_vec(),
                Known::Many(ids) => ids.to_vec(),
                Known::Nothing => panic!("{text} was forgotten at once"),
            };
            assert_eq!(found, cache.work.ids, "{text}");
        }
        assert!(cache.entries.len() <= MOST_ENTRIES && cache.wide.table.len() <= 2 * WIDE_PIECES);
        assert!(matches!(cache.get_wide(b"never seen"), Known::Nothing));
    }
}
