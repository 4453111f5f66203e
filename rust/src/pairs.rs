//! A hash table from pairs of symbols to a u32, for the two inner loops (merge loop, encoder).

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_it_was_given() {
        let mut table = PairTable::with_capacity(0);
        for i in 0..5000u32 {
            assert_eq!(table.get_or_insert(i % 70, i / 70, i), i);
        }
        for i in 0..5000u32 {
            assert_eq!(table.get_or_insert(i % 70, i / 70, 0), i);
            assert_eq!(table.get(i % 70, i / 70), Some(i));
        }
        assert_eq!(table.get(70, 1), None);
    }
}
