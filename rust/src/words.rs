//! Word counts: a hash table from pre-tokens to u64.
//!
//! Most pre-tokens are at most 15 bytes long. Such a word *is* its key: 15 bytes and the length in a u128, so that
//! comparing and hashing are a few instructions and no string is stored anywhere. Of longer words the table holds the hash
//! and the place in an arena.

use crate::scan::MOST;

/// Bytes of a word that fits into a key.
pub const PACKED: usize = 15;

/// The word `text[start..end]` of at most 15 bytes as a key; never 0.
#[inline]
pub fn pack(text: &[u8], start: usize, end: usize) -> u128 {
    let length = end - start;
    debug_assert!(0 < length && length <= PACKED);
    let raw = match text.get(start..start + 16) {
        Some(window) => u128::from_le_bytes(window.try_into().unwrap_or_default()),
        None => {
            let mut window = [0; 16];
            window[..length].copy_from_slice(&text[start..end]);
            u128::from_le_bytes(window)
        }
    };
    raw & MASKS[length] | (length as u128) << 120
}

/// The lowest `length` bytes.
const MASKS: [u128; 16] = {
    let mut masks = [0; 16];
    let mut length = 1;
    while length < 16 {
        masks[length] = masks[length - 1] << 8 | 0xFF;
        length += 1;
    }
    masks
};

/// The bytes of a key, and how many of them count.
#[inline]
pub fn unpack(key: u128) -> ([u8; 16], usize) {
    (key.to_le_bytes(), (key >> 120) as usize)
}

/// A 64-bit hash: one widening multiplication, folded.
#[inline]
pub fn hash(key: u128) -> u64 {
    let (low, high) = (key as u64, (key >> 64) as u64);
    let product = (low ^ 0x9E37_79B9_7F4A_7C15) as u128 * (high ^ 0xD1B5_4A32_D192_ED03) as u128;
    (product as u64) ^ (product >> 64) as u64
}

/// The same of any number of bytes, sixteen at a time.
pub fn hash_bytes(bytes: &[u8]) -> u64 {
    chunks(bytes).fold(0, |state, [a, b]| hash((state ^ a) as u128 | (b as u128) << 64))
}

/// The bytes, sixteen at a time; zeros fill the last chunk.
pub fn chunks(bytes: &[u8]) -> impl Iterator<Item = [u64; 2]> + '_ {
    bytes.chunks(16).map(|part| {
        let mut chunk = [0; 16];
        chunk[..part.len()].copy_from_slice(part);
        let number = u128::from_le_bytes(chunk);
        [number as u64, (number >> 64) as u64]
    })
}

/// Asks for the cache line of an entry that is needed soon.
#[inline]
pub fn prefetch<T>(table: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(entry) = table.get(index) {
        use core::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a hint with no effect on memory; the address is that of a live reference.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(entry).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (table, index);
}

/// Asks the system for large pages under a table that is looked up at random and has not been written yet: with small ones
/// most look-ups miss the TLB. Linux only; elsewhere, and where the system declines, nothing happens.
pub fn want_large_pages<T>(table: &[T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let bytes = table.as_ptr_range();
        let start = (bytes.start as usize).next_multiple_of(PAGE);
        let end = bytes.end as usize / PAGE * PAGE;
        if end > start {
            // SAFETY: advice changes how memory is mapped, not what it holds; the range lies within the live slice.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = table;
}

/// The key's two halves and the count; of a long word its place in the arena, its mark and the count. Not a struct, as only
/// arrays of numbers are allocated without being written.
type Slot = [u64; 3];

/// Highest byte of a mark, where a key has its length. The rest of a mark is hash.
const LONG: u64 = 0xFF << 56;

fn key_of(slot: &Slot) -> u128 {
    (slot[1] as u128) << 64 | slot[0] as u128
}

fn mark_of(word: &[u8]) -> u64 {
    hash_bytes(word) | LONG
}

/// Where the search for a word begins, before it is cut to the size of the table.
#[inline]
fn home(key: u128) -> usize {
    let high = (key >> 64) as u64;
    match high >= LONG {
        true => high as usize,
        false => hash(key) as usize,
    }
}

/// Counts of words. Open addressing, linear probing, at most 5/8 full.
pub struct WordTable {
    slots: Vec<Slot>,
    used: usize,
    /// The long words, each behind its length in eight bytes.
    arena: Vec<u8>,
}

impl Default for WordTable {
    fn default() -> Self {
        WordTable { slots: vec![[0; 3]; 1 << 12], used: 0, arena: Vec::new() }
    }
}

impl WordTable {
    /// With room for the words of a text of `bytes` bytes, by experience, but within `most_bytes`.
    pub fn for_text(bytes: usize, most_bytes: usize) -> Self {
        let most = (most_bytes / size_of::<Slot>()).clamp(1 << 12, 1 << 18);
        let slots = vec![[0; 3]; 1 << (bytes / 32).clamp(1 << 12, most).ilog2()];
        want_large_pages(&slots);
        WordTable { slots, ..WordTable::default() }
    }

    /// Number of distinct words.
    pub fn len(&self) -> usize {
        self.used
    }

    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Adds `count` to the word `text[start..end]`.
    #[inline]
    pub fn add(&mut self, text: &[u8], start: usize, end: usize, count: u64) {
        match end - start <= PACKED {
            true => self.add_key(pack(text, start, end), count),
            false => self.add_long(&text[start..end], mark_of(&text[start..end]), count),
        }
    }

    /// Adds 1 to every word of a batch (see `scan::for_each_batch`). Its slots are fetched together, so that the waits for
    /// memory overlap: the table is larger than the caches.
    pub fn add_batch(&mut self, text: &[u8], bounds: &[usize]) {
        let mut keys = [0; MOST];
        for (key, piece) in keys.iter_mut().zip(bounds.windows(2)) {
            *key = match piece[1] - piece[0] <= PACKED {
                true => pack(text, piece[0], piece[1]),
                false => (mark_of(&text[piece[0]..piece[1]]) as u128) << 64,
            };
            prefetch(&self.slots, home(*key) & (self.slots.len() - 1));
        }
        for (&key, piece) in keys.iter().zip(bounds.windows(2)) {
            match (key >> 64) as u64 {
                mark @ LONG.. => self.add_long(&text[piece[0]..piece[1]], mark, 1),
                _ => self.add_key(key, 1),
            }
        }
    }

    #[inline]
    fn add_key(&mut self, key: u128, count: u64) {
        let (low, high) = (key as u64, (key >> 64) as u64);
        let mask = self.slots.len() - 1;
        let mut at = hash(key) as usize & mask;
        loop {
            let slot = &mut self.slots[at & mask];
            if slot[0] == low && slot[1] == high {
                slot[2] += count;
                return;
            }
            if slot[1] == 0 {
                *slot = [low, high, count];
                return self.count_new();
            }
            at += 1;
        }
    }

    fn add_long(&mut self, word: &[u8], mark: u64, count: u64) {
        let mask = self.slots.len() - 1;
        let mut at = home((mark as u128) << 64) & mask;
        loop {
            let slot = self.slots[at & mask];
            if slot[1] == mark && long_word(&self.arena, slot[0]) == word {
                self.slots[at & mask][2] += count;
                return;
            }
            if slot[1] == 0 {
                self.slots[at & mask] = [self.arena.len() as u64, mark, count];
                self.arena.extend((word.len() as u64).to_le_bytes());
                self.arena.extend(word);
                return self.count_new();
            }
            at += 1;
        }
    }

    #[inline]
    fn count_new(&mut self) {
        self.used += 1;
        if self.used * 8 > self.slots.len() * 5 {
            self.grow();
        }
    }

    #[cold]
    fn grow(&mut self) {
        let old = std::mem::take(&mut self.slots);
        self.slots = vec![[0; 3]; old.len() * 2];
        want_large_pages(&self.slots);
        let mask = self.slots.len() - 1;
        for slot in old.into_iter().filter(|slot| slot[1] != 0) {
            let mut at = home(key_of(&slot)) & mask;
            while self.slots[at][1] != 0 {
                at = (at + 1) & mask;
            }
            self.slots[at] = slot;
        }
    }

    /// Memory that the table takes, in bytes, long words counted twice: laid out for merging they grow the most.
    pub fn weight(&self) -> usize {
        self.slots.len() * size_of::<Slot>() + 2 * self.arena.len()
    }

    /// Forgets the rarest words until at most half of them are left. Returns how many occurrences that drops.
    pub fn prune(&mut self) -> u64 {
        let (mut most, mut dropped, goal) = (1, 0, self.len() / 2);
        while self.len() > goal {
            let old = std::mem::take(self);
            old.for_each(|word, count| match count > most {
                true => self.add(word, 0, word.len(), count),
                false => dropped += count,
            });
            most *= 2;
        }
        dropped
    }

    /// Adds all counts of another table.
    pub fn absorb(&mut self, other: WordTable) {
        for (at, slot) in other.slots.iter().enumerate() {
            if let Some(ahead) = other.slots.get(at + 16).filter(|ahead| ahead[1] >= LONG) {
                prefetch(&other.arena, ahead[0] as usize);
            }
            match slot[1] {
                0 => {}
                mark @ LONG.. => self.add_long(long_word(&other.arena, slot[0]), mark, slot[2]),
                _ => self.add_key(key_of(slot), slot[2]),
            }
        }
    }

    /// Calls `each(word, count)` for every word, in no particular order.
    pub fn for_each(&self, mut each: impl FnMut(&[u8], u64)) {
        for slot in self.slots.iter().filter(|slot| slot[1] != 0) {
            let (bytes, length) = unpack(key_of(slot));
            let word = if slot[1] >= LONG { long_word(&self.arena, slot[0]) } else { &bytes[..length] };
            each(word, slot[2]);
        }
    }
}

fn long_word(arena: &[u8], place: u64) -> &[u8] {
    let (length, rest) = arena[place as usize..].split_at(8);
    &rest[..u64::from_le_bytes(length.try_into().unwrap_or_default()) as usize]
}

#[cfg(test)]
#[path = "tests/words.rs"]
mod tests;
