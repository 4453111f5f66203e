//! Byte-pair encoding, training: the merge loop.
//!
//! Repeat: take the most frequent pair of adjacent symbols, replace it by a new symbol everywhere. Done plainly this is a
//! pass over all words a merge; here a merge touches only the places where the pair stands.
//!
//! **Words** lie in one array of slots, a slot a symbol at first, each word followed by at least one `NONE`. A merged
//! symbol keeps its slots: its number stands in the first and in the last of them. So both neighbours of a symbol are
//! found in O(1) in words of any length, without links, and an occurrence is simply the first slot of its left symbol.
//!
//! **Occurrence lists** may hold places that are gone; each is checked when its turn comes. A pair that holds the new
//! symbol can only arise during the merge which makes it, so its list is complete from the start, in ascending order
//! (which gives "aaa" its left-to-right reading).
//!
//! **One way to each byte string.** Two occurrences of a byte string that begin and end at symbol boundaries consist of the
//! same symbols: true of single bytes, and a merge keeps it true, as it applies inside both alike (a run "ppp…" that began
//! left of a boundary which survives has an even number of p there). So no merge ever makes bytes that exist
//! already, and numbers stand for byte strings one to one.
//!
//! **Rounds.** Most pairs are far too rare ever to be merged. A round keeps lists, counts and queue entries only for pairs
//! that occur at least `floor` times; rarer ones are not even remembered. When the queue runs dry the next round
//! lowers the floor, packs the words (every symbol one slot again, words of one symbol dropped) and counts afresh.
//! The result does not depend on the floor.
//!
//! **Queue.** Counts fall while an entry waits. A popped entry whose count is stale goes back with the true one.
//!
//! Cost: O(text symbols) a round and O(occurrences) over all merges, plus the queue's logarithm.

use crate::pairs::PairTable;
use crate::queue::{Candidate, Queue, Symbols};
use crate::words::{prefetch, WordTable};

/// No symbol: the slots after a word.
const NONE: u32 = u32::MAX;
/// A slot inside a symbol.
const INNER: u32 = u32::MAX - 1;
/// Words start at multiples of this, so that the count of a word is found from any of its slots.
const GRANULE: usize = 4;
/// What is so many steps ahead is fetched into the cache: words and pairs are more than it holds.
const AHEAD: usize = 8;
/// Slots are numbered by u32.
const MAX_SLOTS: usize = u32::MAX as usize - 2;

/// A pair that is frequent enough to be remembered.
struct Pair {
    count: i64,
    left: u32,
    right: u32,
    /// Its occurrence list within `Trainer::places`.
    start: usize,
    length: usize,
}

/// What one merge changes beside one kind of neighbour.
#[derive(Clone, Copy, Default)]
struct Change {
    removed: i64,
    added: i64,
    places: u32,
    /// Where the next place goes while lists are written; `usize::MAX`: the pair is too rare for a list.
    cursor: usize,
}

/// The changes on one side of the merged pair, by neighbour.
#[derive(Default)]
struct Side {
    changes: Vec<Change>,
    touched: Vec<u32>,
    /// (neighbour, place of the new pair)
    found: Vec<(u32, u32)>,
}

impl Side {
    #[inline]
    fn at(&mut self, neighbour: u32) -> &mut Change {
        let change = &mut self.changes[neighbour as usize];
        if change.places == 0 {
            self.touched.push(neighbour);
        }
        change
    }
}

/// Merges in order, as pairs of byte strings.
pub type Merges = Vec<(Vec<u8>, Vec<u8>)>;

/// Why training stopped.
#[derive(Debug, PartialEq)]
pub enum TrainError {
    Cancelled,
    /// More than 2^32 symbols in distinct words.
    TooLarge,
}

/// Which of equally frequent pairs is merged first.
#[derive(Clone, Copy, PartialEq)]
pub enum Ties {
    /// The greatest pair of byte strings.
    Greatest,
    /// The pair of the lowest numbers, where bytes are numbered like their printable characters and new symbols follow:
    /// the rule of Hugging Face's trainer.
    HuggingFace,
}

pub struct Trainer {
    ties: Ties,
    slots: Vec<u32>,
    /// Count of the word that owns a granule; u32::MAX: look into `large`.
    weights: Vec<u32>,
    /// (granule, count) of words with huge counts, ascending.
    large: Vec<(u32, u64)>,
    symbols: Symbols,
    /// Slots that a symbol takes in this round.
    spans: Vec<u32>,
    pairs: Vec<Pair>,
    table: PairTable,
    places: Vec<u32>,
    queue: Queue,
    floor: i64,
    left: Side,
    right: Side,
}

impl Trainer {
    pub fn new(words: &WordTable, ties: Ties) -> Result<Self, TrainError> {
        let size_of = |word: &[u8]| if word.len() < 2 { 0 } else { (word.len() + 1).next_multiple_of(GRANULE) };
        let mut total = GRANULE;
        words.for_each(|word, _| total += size_of(word));
        if total > MAX_SLOTS {
            return Err(TrainError::TooLarge);
        }
        let mut trainer = Trainer {
            ties,
            slots: vec![NONE; total],
            weights: vec![0; total / GRANULE],
            large: Vec::new(),
            symbols: Symbols::default(),
            spans: vec![1; 256],
            pairs: Vec::new(),
            table: PairTable::with_capacity(0),
            places: Vec::new(),
            queue: Queue::default(),
            floor: 1,
            left: Side::default(),
            right: Side::default(),
        };
        for byte in 0..=255u8 {
            match ties {
                Ties::Greatest => trainer.symbols.push([byte].into()),
                Ties::HuggingFace => trainer.symbols.push_numbered([byte].into(), character_of(byte) as u64),
            }
        }
        let mut at = GRANULE;
        words.for_each(|word, count| {
            let size = size_of(word);
            if size > 0 {
                for (slot, &byte) in trainer.slots[at..].iter_mut().zip(word) {
                    *slot = byte as u32;
                }
                trainer.set_weight(at, size, count);
                at += size;
            }
        });
        Ok(trainer)
    }

    /// Finds up to `wanted` merges, as pairs of byte strings. `tick(done)` returning false cancels.
    pub fn run(&mut self, wanted: usize, tick: &mut dyn FnMut(usize) -> bool) -> Result<Merges, TrainError> {
        let mut merges = Vec::new();
        self.begin_round(wanted);
        while merges.len() < wanted {
            if !tick(merges.len()) {
                return Err(TrainError::Cancelled);
            }
            match self.pop() {
                Some(pair) => {
                    let (left, right) = (self.pairs[pair].left, self.pairs[pair].right);
                    merges.push((self.symbols.bytes(left).to_vec(), self.symbols.bytes(right).to_vec()));
                    self.merge(pair);
                }
                None if self.floor == 1 => break,
                None => self.begin_round(wanted - merges.len()),
            }
        }
        Ok(merges)
    }

    /// The pair to merge next, if one occurs at least `floor` times.
    fn pop(&mut self) -> Option<usize> {
        while let Some(candidate) = self.queue.pop(&self.symbols) {
            let count = self.pairs[candidate.pair as usize].count;
            if count == candidate.count {
                return Some(candidate.pair as usize);
            }
            if count >= self.floor {
                self.queue.push(Candidate { count, ..candidate }, &self.symbols);
            }
        }
        None
    }

    /// Replaces the pair by its symbol everywhere and brings counts, lists and queue up to date.
    fn merge(&mut self, pair: usize) {
        let Pair { left: a, right: b, start, length, .. } = self.pairs[pair];
        let new = self.symbols.count() as u32;
        let bytes: Box<[u8]> = [self.symbols.bytes(a), self.symbols.bytes(b)].concat().into();
        match self.ties {
            Ties::Greatest => self.symbols.push(bytes),
            Ties::HuggingFace => self.symbols.push_numbered(bytes, (1 << 32) + new as u64),
        }
        self.spans.push(self.spans[a as usize] + self.spans[b as usize]);
        self.pairs[pair].count = 0;
        for side in [&mut self.left, &mut self.right] {
            side.changes.resize(self.symbols.count(), Change::default());
        }
        let (span_a, span_b) = (self.spans[a as usize] as usize, self.spans[b as usize] as usize);
        for index in start..start + length {
            if let Some(&ahead) = self.places.get(index + AHEAD) {
                prefetch(&self.slots, ahead as usize);
                prefetch(&self.weights, ahead as usize / GRANULE);
            }
            let at = self.places[index] as usize;
            let middle = at + span_a;
            if self.slots[at] != a || self.slots[middle] != b {
                continue;
            }
            let end = middle + span_b;
            let count = self.weight(at);
            let (before, after) = (self.slots[at - 1], self.slots[end]);
            self.slots[middle - 1] = INNER;
            self.slots[middle] = INNER;
            self.slots[at] = new;
            self.slots[end - 1] = new;
            if before != NONE {
                let change = self.left.at(before);
                change.added += count;
                change.places += 1;
                if before == new {
                    // "abab": the first half was merged just now and has counted `a` as its right neighbour.
                    self.right.at(a).added -= count;
                } else {
                    change.removed += count;
                }
                self.left.found.push((before, (at - self.spans[before as usize] as usize) as u32));
            }
            if after != NONE {
                let change = self.right.at(after);
                change.added += count;
                change.removed += count;
                change.places += 1;
                self.right.found.push((after, at as u32));
            }
        }
        self.apply(a, b, new);
    }

    /// Books the changes of a merge: old pairs lose, pairs with the new symbol enter if they are frequent enough.
    fn apply(&mut self, a: u32, b: u32, new: u32) {
        for is_left in [true, false] {
            let side = if is_left { &mut self.left } else { &mut self.right };
            for &neighbour in &side.touched {
                let change = &mut side.changes[neighbour as usize];
                let (old, fresh) =
                    if is_left { ((neighbour, a), (neighbour, new)) } else { ((b, neighbour), (new, neighbour)) };
                if old != (a, b) {
                    if let Some(pair) = self.table.get(old.0, old.1) {
                        self.pairs[pair as usize].count -= change.removed;
                    }
                }
                change.cursor = usize::MAX;
                if change.added >= self.floor {
                    let pair = self.pairs.len() as u32;
                    self.table.get_or_insert(fresh.0, fresh.1, pair);
                    change.cursor = self.places.len();
                    let length = change.places as usize;
                    let (left, right, count) = (fresh.0, fresh.1, change.added);
                    self.pairs.push(Pair { count, left, right, start: change.cursor, length });
                    self.places.resize(self.places.len() + length, 0);
                    self.queue.push(Candidate { count, left, right, pair }, &self.symbols);
                }
            }
            for (neighbour, place) in side.found.drain(..) {
                let change = &mut side.changes[neighbour as usize];
                if change.cursor != usize::MAX {
                    self.places[change.cursor] = place;
                    change.cursor += 1;
                }
            }
            for neighbour in side.touched.drain(..) {
                side.changes[neighbour as usize] = Change::default();
            }
        }
    }

    /// Packs the words, counts all pairs, lowers the floor and lists the occurrences of the pairs above it.
    fn begin_round(&mut self, remaining: usize) {
        self.pack();
        self.places = Vec::new();
        self.queue.clear();
        let mut pairs: Vec<Pair> = Vec::new();
        let mut table = PairTable::with_capacity((self.slots.len() / 32).clamp(1 << 12, 1 << 16));
        // By place of a right symbol, the number of its pair.
        let mut numbers = vec![NONE; self.slots.len()];
        for (at, number) in numbers.iter_mut().enumerate().skip(GRANULE) {
            if let Some(&[left, right]) = self.slots.get(at + AHEAD - 1..=at + AHEAD) {
                table.prefetch(left, right);
            }
            let (left, right) = (self.slots[at - 1], self.slots[at]);
            if left == NONE || right == NONE {
                continue;
            }
            let fresh = pairs.len() as u32;
            let pair = table.get_or_insert(left, right, fresh);
            if pair == fresh {
                pairs.push(Pair { count: 0, left, right, start: 0, length: 0 });
            }
            pairs[pair as usize].count += self.weight(at);
            pairs[pair as usize].length += 1;
            *number = pair;
        }
        drop(table);
        self.floor = choose_floor(&pairs, remaining);
        self.list_places(pairs, &numbers);
    }

    /// Keeps the pairs above the floor: queue entries and occurrence lists.
    fn list_places(&mut self, pairs: Vec<Pair>, numbers: &[u32]) {
        let mut kept = vec![NONE; pairs.len()];
        let mut total = 0;
        self.table = PairTable::with_capacity(1 << 12);
        self.pairs = Vec::new();
        for (pair, kept) in pairs.into_iter().zip(&mut kept).filter(|(pair, _)| pair.count >= self.floor) {
            *kept = self.pairs.len() as u32;
            let Pair { count, left, right, length, .. } = pair;
            self.table.get_or_insert(left, right, *kept);
            self.queue.push(Candidate { count, left, right, pair: *kept }, &self.symbols);
            self.pairs.push(Pair { start: total, length: 0, ..pair });
            total += length;
        }
        self.places = vec![0; total];
        for (at, &number) in numbers.iter().enumerate().filter(|&(_, &number)| number != NONE) {
            if let Some(pair) = self.pairs.get_mut(kept[number as usize] as usize) {
                self.places[pair.start + pair.length] = at as u32 - 1;
                pair.length += 1;
            }
        }
    }

    /// Gives every symbol one slot again and drops words that have become one symbol.
    fn pack(&mut self) {
        let (mut from, mut to) = (GRANULE, GRANULE);
        let old_large = std::mem::take(&mut self.large);
        while from < self.slots.len() {
            let word = from;
            let count = match self.weights[word / GRANULE] {
                u32::MAX => old_large[old_large.partition_point(|entry| entry.0 < (word / GRANULE) as u32)].1,
                weight => weight as u64,
            };
            let begin = to;
            while self.slots[from] != NONE {
                let symbol = self.slots[from];
                self.slots[to] = symbol;
                to += 1;
                from += self.spans[symbol as usize] as usize;
            }
            from = (from + 1).next_multiple_of(GRANULE);
            if to - begin < 2 {
                to = begin;
                continue;
            }
            let end = (to + 1).next_multiple_of(GRANULE);
            self.slots[to..end].fill(NONE);
            self.set_weight(begin, end - begin, count);
            to = end;
        }
        self.slots.truncate(to);
        self.slots.shrink_to_fit();
        self.weights.truncate(to / GRANULE);
        self.weights.shrink_to_fit();
        self.spans.fill(1);
    }

    fn set_weight(&mut self, at: usize, size: usize, count: u64) {
        let granules = at / GRANULE..(at + size) / GRANULE;
        if count >= u32::MAX as u64 {
            self.large.extend(granules.clone().map(|granule| (granule as u32, count)));
        }
        self.weights[granules].fill(count.min(u32::MAX as u64) as u32);
    }

    /// Count of the word that owns a slot.
    #[inline]
    fn weight(&self, at: usize) -> i64 {
        match self.weights[at / GRANULE] {
            u32::MAX => self.large[self.large.partition_point(|entry| entry.0 < (at / GRANULE) as u32)].1 as i64,
            weight => weight as i64,
        }
    }
}

/// The printable character of a byte in GPT-2's files (see byte_level.py).
fn character_of(byte: u8) -> u32 {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    match printable(byte) {
        true => byte as u32,
        false => 0x100 + (0..byte).filter(|&other| !printable(other)).count() as u32,
    }
}

/// How far below the most frequent pair a round reaches. Small: many rounds; large: long lists of rare pairs.
const REACH: i64 = 64;
/// Pairs a round remembers for each merge that is still wanted.
const PAIRS_PER_MERGE: usize = 4;

fn choose_floor(pairs: &[Pair], remaining: usize) -> i64 {
    let mut counts: Vec<i64> = pairs.iter().map(|pair| pair.count).collect();
    let keep = remaining.saturating_mul(PAIRS_PER_MERGE).max(1024);
    let by_reach = counts.iter().max().map_or(1, |most| most / REACH);
    let by_number = if counts.len() > keep {
        let place = counts.len() - keep;
        let least = *counts.select_nth_unstable(place).1;
        // Pairs that occur once are legion, and most of the memory if they are remembered before they are needed.
        match counts.iter().filter(|&&count| count > 1).count() {
            frequent if frequent >= remaining => least.max(2),
            _ => least,
        }
    } else {
        1
    };
    by_reach.max(by_number).max(1)
}

#[cfg(test)]
#[path = "tests/train.rs"]
pub(crate) mod tests;
