//! The queue of candidate merges: the most frequent pair first, ties to the greater pair of byte strings.

use std::cmp::Ordering;

/// The byte strings of the symbols, with the first eight bytes of each as a number for quick comparison.
#[derive(Default)]
pub struct Symbols {
    bytes: Vec<Box<[u8]>>,
    heads: Vec<u64>,
}

impl Symbols {
    /// Adds a symbol whose place among ties its number decides: the lowest first, as if its bytes were the greatest.
    pub fn push_numbered(&mut self, bytes: Box<[u8]>, number: u64) {
        self.heads.push(u64::MAX - number);
        self.bytes.push(bytes);
    }

    /// Adds a symbol whose place among ties its bytes decide: the greatest first.
    pub fn push(&mut self, bytes: Box<[u8]>) {
        let mut head = [0; 8];
        let length = bytes.len().min(8);
        head[..length].copy_from_slice(&bytes[..length]);
        self.heads.push(u64::from_be_bytes(head));
        self.bytes.push(bytes);
    }

    pub fn bytes(&self, symbol: u32) -> &[u8] {
        &self.bytes[symbol as usize]
    }

    /// Number of symbols.
    pub fn count(&self) -> usize {
        self.bytes.len()
    }

    fn compare(&self, a: u32, b: u32) -> Ordering {
        if a == b {
            return Ordering::Equal;
        }
        self.heads[a as usize].cmp(&self.heads[b as usize]).then_with(|| self.bytes(a).cmp(self.bytes(b)))
    }
}

/// A candidate: the count when it was pushed (the true count may have fallen since) and the pair.
#[derive(Clone, Copy)]
pub struct Candidate {
    pub count: i64,
    pub left: u32,
    pub right: u32,
    pub pair: u32,
}

impl Candidate {
    fn before(&self, other: &Candidate, symbols: &Symbols) -> bool {
        if self.count != other.count {
            return self.count > other.count;
        }
        symbols.compare(self.left, other.left).then_with(|| symbols.compare(self.right, other.right)).is_gt()
    }
}

/// A binary heap whose order needs the symbols (the standard library's takes no context).
#[derive(Default)]
pub struct Queue {
    heap: Vec<Candidate>,
}

impl Queue {
    pub fn clear(&mut self) {
        self.heap.clear();
    }

    pub fn push(&mut self, candidate: Candidate, symbols: &Symbols) {
        let mut at = self.heap.len();
        self.heap.push(candidate);
        while at > 0 {
            let parent = (at - 1) / 2;
            if !candidate.before(&self.heap[parent], symbols) {
                break;
            }
            self.heap[at] = self.heap[parent];
            at = parent;
        }
        self.heap[at] = candidate;
    }

    pub fn pop(&mut self, symbols: &Symbols) -> Option<Candidate> {
        let last = self.heap.pop()?;
        let Some(&top) = self.heap.first() else { return Some(last) };
        self.sink(0, last, symbols);
        Some(top)
    }

    /// Puts `candidate` into the hole at `at`, letting better ones rise.
    fn sink(&mut self, mut at: usize, candidate: Candidate, symbols: &Symbols) {
        loop {
            let mut child = 2 * at + 1;
            if child >= self.heap.len() {
                break;
            }
            if child + 1 < self.heap.len() && self.heap[child + 1].before(&self.heap[child], symbols) {
                child += 1;
            }
            if !self.heap[child].before(&candidate, symbols) {
                break;
            }
            self.heap[at] = self.heap[child];
            at = child;
        }
        self.heap[at] = candidate;
    }
}

#[cfg(test)]
#[path = "tests/queue.rs"]
mod tests;
