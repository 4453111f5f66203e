//! What one thread remembers while encoding: pieces and their ids. Bounded, so that no text makes it grow without end.
//!
//! A table of entries, two a cache line. An entry is a key and either the ids, up to 16 bytes of them, or their place in
//! `arena`. A piece of up to 15 bytes is its own key (`words::pack`). The key of a longer one is its hash and its length, and
//! its text stands in `arena` before its ids, to be compared.

use crate::ids::{Chunk, CHUNK};
use crate::merge::Work;
use crate::words::{chunks, hash, hash_bytes, prefetch, want_large_pages};

/// Entries at first and at most (16 MB).
const FIRST_ENTRIES: usize = 1 << 14;
const MOST_ENTRIES: usize = 1 << 19;
/// Chunks in `arena` after which everything is forgotten (8 MB; twice that while the vector doubles).
const MOST_CHUNKS: usize = 1 << 19;
/// Longest piece, in bytes, that is remembered.
const LONGEST: usize = 512;
/// No cache takes more memory than this; many at once take less each (`Cache::limit`).
pub const MOST_BYTES: usize = MOST_ENTRIES * size_of::<Entry>() + 2 * MOST_CHUNKS * CHUNK + (1 << 12);

/// Two numbers are the key; its highest four bits are free for half the number of bytes of the ids in the other two
/// numbers. If that is 0, they are place in `arena` and number of bytes. Not a struct, as only arrays of numbers are
/// allocated without being written.
pub type Entry = [u64; 4];
pub const SIZE: u32 = 60;
/// An entry lies in one of so many sets of two: its own if there is room.
const SETS: usize = 4;

pub struct Cache {
    entries: Vec<Entry>,
    used: usize,
    /// Which place is taken next where all are taken, which only happens in a table of the largest size.
    turn: usize,
    arena: Vec<Chunk>,
    /// Bounds of the two, see `limit`.
    most_entries: usize,
    most_chunks: usize,
    pub work: Work,
}

impl Default for Cache {
    fn default() -> Self {
        let entries = vec![[0; 4]; FIRST_ENTRIES];
        let (most_entries, most_chunks) = (MOST_ENTRIES, MOST_CHUNKS);
        Cache { entries, used: 0, turn: 0, arena: Vec::new(), most_entries, most_chunks, work: Work::default() }
    }
}

/// The key of a piece that is too long to be its own.
pub fn long_key(piece: &[u8]) -> u128 {
    (piece.len() as u128) << 64 | hash_bytes(piece) as u128
}

impl Cache {
    /// Memory that the cache takes, in bytes.
    pub fn bytes(&self) -> usize {
        size_of::<Cache>() + self.entries.len() * size_of::<Entry>() + self.arena.capacity() * CHUNK
    }

    /// From now on the cache takes no more than a `parts`-th of `MOST_BYTES` (rounded down to a power of two); if it has
    /// more, it forgets everything.
    pub fn limit(&mut self, parts: usize) {
        let parts = parts.next_power_of_two();
        self.most_entries = (MOST_ENTRIES / parts).max(FIRST_ENTRIES);
        self.most_chunks = MOST_CHUNKS / parts;
        if self.entries.len() > self.most_entries || self.arena.len() > self.most_chunks {
            (self.entries, self.arena, self.used) = (vec![[0; 4]; FIRST_ENTRIES], Vec::new(), 0);
        }
    }

    #[inline]
    fn home(&self, key: u128) -> usize {
        hash(key) as usize & (self.entries.len() - 2)
    }

    /// Asks for the entries of a key that is looked up soon; returns where they begin. Valid until the next `grow`.
    #[inline(always)]
    pub fn prefetch(&self, key: u128) -> usize {
        let home = self.home(key);
        prefetch(&self.entries, home);
        home
    }

    /// The entry of a key.
    #[inline(always)]
    pub fn find(&mut self, key: u128, home: usize) -> Option<Entry> {
        let (low, high) = (key as u64, (key >> 64) as u64);
        let first = &self.entries[home];
        if (first[0] ^ low) | (first[1] ^ high) << (64 - SIZE) == 0 {
            return Some(*first);
        }
        self.find_further(low, high, home)
    }

    /// The entry, if it is not the first one.
    #[inline(never)]
    fn find_further(&mut self, low: u64, high: u64, home: usize) -> Option<Entry> {
        for place in (1..2 * SETS).map(|place| home ^ place) {
            let entry = self.entries[place];
            if (entry[0] ^ low) | (entry[1] ^ high) << (64 - SIZE) == 0 {
                self.turn = self.turn.wrapping_add(1);
                if self.turn % 8 == 0 {
                    self.entries.swap(home, place);
                }
                return Some(entry);
            }
            if entry[1] == 0 {
                break;
            }
        }
        None
    }

    /// The ids of an entry that does not hold them itself, and how many bytes they are. `text`: of a piece with a long key.
    /// None if the entry is that of another text.
    pub fn far_ids(&self, entry: Entry, text: Option<&[u8]>) -> Option<(&[Chunk], usize)> {
        let mut found = &self.arena[entry[2] as usize..];
        for chunk in chunks(text.unwrap_or_default()) {
            if found[0] != chunk {
                return None;
            }
            found = &found[1..];
        }
        Some((found, entry[3] as usize))
    }

    /// Notes the ids of a piece, as bytes. `long`: it has a long key.
    pub fn remember(&mut self, piece: &[u8], key: u128, long: bool, ids: &[u8]) {
        if piece.len() > LONGEST {
            return;
        }
        let wanted = piece.len().div_ceil(CHUNK) + ids.len().div_ceil(CHUNK);
        if self.arena.len() + wanted > self.most_chunks {
            (self.entries, self.arena, self.used) = (vec![[0; 4]; self.entries.len()], Vec::new(), 0);
            want_large_pages(&self.entries);
        }
        let (low, high) = (key as u64, (key >> 64) as u64);
        let entry = match chunks(ids).next() {
            Some([first, second]) if ids.len() <= CHUNK && !long => {
                [low, high | (ids.len() as u64 / 2) << SIZE, first, second]
            }
            _ => {
                let start = self.arena.len() as u64;
                self.arena.extend(chunks(if long { piece } else { &[] }));
                self.arena.extend(chunks(ids));
                [low, high, start, ids.len() as u64]
            }
        };
        self.place(entry);
    }

    /// Enlarges the table when it is half full.
    pub fn grow(&mut self) {
        if self.used * 2 > self.entries.len() && self.entries.len() < self.most_entries {
            let larger = vec![[0; 4]; (self.entries.len() * 4).min(self.most_entries)];
            want_large_pages(&larger);
            let old = std::mem::replace(&mut self.entries, larger);
            self.used = 0;
            old.into_iter().filter(|entry| entry[1] != 0).for_each(|entry| self.place(entry));
        }
    }

    fn place(&mut self, entry: Entry) {
        let high = entry[1] << (64 - SIZE) >> (64 - SIZE);
        let home = self.home((high as u128) << 64 | entry[0] as u128);
        let free = (0..2 * SETS).map(|place| home ^ place).find(|&place| self.entries[place][1] == 0);
        self.used += free.is_some() as usize;
        self.turn = (self.turn + 1) % (2 * SETS);
        self.entries[free.unwrap_or(home ^ self.turn)] = entry;
    }
}
