//! Byte-pair encoding, use: from text to ids and back.
//!
//! A text is split at special tokens, each segment into pre-tokens, each pre-token into bytes; then the adjacent pair with
//! the lowest rank is merged, the leftmost first, until no pair has a rank. Text repeats itself, so a bounded cache
//! remembers the ids of short pieces. Pieces up to `SMALL` bytes are merged by scanning for the lowest rank (quadratic, but
//! within a few cache lines); longer ones with a heap, O(n log n); very long ones rank by rank, O(n). Nothing recurses.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::cache::{Cache, Known, Work, INLINE};
use crate::pairs::{RankTable, NO_RANK};
use crate::pattern::{Cutter, Failure};
use crate::scan::MOST;
use crate::words::{pack, PACKED};

/// Longest piece, in bytes, that is merged by plain scanning.
const SMALL: usize = 48;
/// Longest piece, in bytes, that is merged with the heap (if the merges are ordered).
const LONG: usize = 4096;
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

/// A vocabulary with its merges, ready for use.
pub struct Model {
    /// All tokens' bytes, one after the other; token i is `bytes[starts[i]..starts[i + 1]]`.
    bytes: Vec<u8>,
    starts: Vec<usize>,
    /// Ids below the size of the vocabulary that stand for no token.
    holes: Vec<bool>,
    byte_ids: [u32; 256],
    /// Pair of ids → rank; and of pairs of bytes once more, by `first << 8 | second`.
    ranks: RankTable,
    byte_ranks: Vec<u32>,
    /// Rank → id of the merged token.
    merged: Vec<u32>,
    /// Whether every merge comes after the merges that make its parts, as training leaves them.
    ordered: bool,
    whole_pieces: HashMap<Box<[u8]>, u32>,
}

/// How a text becomes segments and pieces, and the ids of its special tokens.
pub struct Splitter {
    pub cutter: Cutter,
    pub special_ids: Vec<u32>,
}

/// A number that holds ids: u16 (for vocabularies of at most 65,536 tokens) or u32.
pub trait Width: Copy + Default {
    fn of(id: u32) -> Self;
}

impl Width for u16 {
    #[inline]
    fn of(id: u32) -> u16 {
        id as u16
    }
}

impl Width for u32 {
    #[inline]
    fn of(id: u32) -> u32 {
        id
    }
}

/// A growing list of ids, into which four are written at once whether four are there or not.
#[derive(Default)]
pub struct Ids<T> {
    space: Vec<T>,
    length: usize,
}

impl<T: Width> Ids<T> {
    /// Room for the ids of a text of `bytes` bytes, by experience.
    pub fn for_text(bytes: usize) -> Self {
        Ids { space: vec![T::default(); bytes / 4 + 16], length: 0 }
    }

    pub fn into_vec(mut self) -> Vec<T> {
        self.space.truncate(self.length);
        self.space
    }

    /// Makes room for `more` ids and the three that `put` may write beyond them.
    #[inline]
    fn reserve(&mut self, more: usize) {
        if self.space.len() < self.length + more + INLINE {
            self.space.resize((self.length + more + INLINE).max(self.space.len() * 3 / 2), T::default());
        }
    }

    /// Appends the first `count` of `ids`. There must be room.
    #[inline]
    fn put(&mut self, ids: [u32; INLINE], count: usize) {
        self.space[self.length..self.length + INLINE].copy_from_slice(&ids.map(T::of));
        self.length += count;
    }

    fn extend(&mut self, ids: &[u32]) {
        self.reserve(ids.len());
        for &id in ids {
            self.put([id; INLINE], 1);
        }
    }
}

impl Model {
    /// `tokens[id]` are the bytes of an id (None: no such id), `merges` are (left id, right id, rank), `merged[rank]` is
    /// the id made. With `whole`, a piece that is a token is not merged. The error is a text for the user.
    pub fn new(
        tokens: &[Option<Vec<u8>>],
        merges: &[(u32, u32, u32)],
        merged: Vec<u32>,
        special_ids: &[u32],
        whole: bool,
    ) -> Result<Self, String> {
        let mut byte_ids = [u32::MAX; 256];
        let ordinary = |id: usize| !special_ids.contains(&(id as u32));
        let mut whole_pieces = HashMap::new();
        for (id, token) in tokens.iter().enumerate().rev() {
            match token.as_deref() {
                Some(&[byte]) if ordinary(id) => byte_ids[byte as usize] = id as u32,
                Some(bytes) if whole && ordinary(id) => _ = whole_pieces.insert(bytes.into(), id as u32),
                _ => {}
            }
        }
        if let Some(byte) = byte_ids.iter().position(|&id| id == u32::MAX) {
            return Err(format!("the vocabulary has no token for the byte 0x{byte:02x}"));
        }
        let Some(mut ranks) = RankTable::with_capacity(tokens.len(), merges.len()) else {
            return Err(format!("{} tokens with {} merges are too many", tokens.len(), merges.len()));
        };
        let mut starts = vec![0];
        let mut bytes = Vec::new();
        for token in tokens {
            bytes.extend_from_slice(token.as_deref().unwrap_or_default());
            starts.push(bytes.len());
        }
        for &(left, right, rank) in merges {
            ranks.insert(left, right, rank);
        }
        let byte_ranks = (0..1 << 16).map(|pair: usize| ranks.get(byte_ids[pair >> 8], byte_ids[pair & 255])).collect();
        let ordered = is_ordered(tokens.len(), merges, &merged);
        let holes = tokens.iter().map(Option::is_none).collect();
        Ok(Model { bytes, starts, holes, byte_ids, ranks, byte_ranks, merged, ordered, whole_pieces })
    }

    /// One more than the highest id.
    pub fn size(&self) -> usize {
        self.holes.len()
    }

    #[inline]
    fn token(&self, id: u32) -> &[u8] {
        &self.bytes[self.starts[id as usize]..self.starts[id as usize + 1]]
    }

    #[inline]
    fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks.get(left, right)
    }

    /// Appends the ids of a text to `out`.
    pub fn encode<T: Width>(
        &self,
        text: &[u8],
        by: &Splitter,
        cache: &mut Cache,
        out: &mut Ids<T>,
    ) -> Result<(), Failure> {
        let mut state = (cache, out, Ok(()));
        by.cutter.specials.split(
            text,
            &mut state,
            |(cache, out, result), segment| {
                let done = self.encode_ordinary(segment, by, cache, out);
                if done.is_err() {
                    *result = done;
                }
            },
            |(_, out, _), index| out.extend(&[by.special_ids[index]]),
        );
        state.2
    }

    /// The same with special tokens as ordinary text.
    pub fn encode_ordinary<T: Width>(
        &self,
        text: &[u8],
        by: &Splitter,
        cache: &mut Cache,
        out: &mut Ids<T>,
    ) -> Result<(), Failure> {
        by.cutter.pattern.for_each_batch(text, |bounds| self.encode_batch(text, bounds, cache, out))
    }

    /// The pieces of a batch. Their cache entries are fetched together, so that the waits for memory overlap.
    fn encode_batch<T: Width>(&self, text: &[u8], bounds: &[usize], cache: &mut Cache, out: &mut Ids<T>) {
        cache.grow();
        let (mut keys, mut homes) = ([0; MOST], [0; MOST]);
        for ((key, home), piece) in keys.iter_mut().zip(&mut homes).zip(bounds.windows(2)) {
            if piece[1] - piece[0] <= PACKED {
                *key = pack(text, piece[0], piece[1]);
                *home = cache.prefetch(*key);
            }
        }
        out.reserve(bounds[bounds.len() - 1] - bounds[0]);
        for ((&key, &home), piece) in keys.iter().zip(&homes).zip(bounds.windows(2)) {
            let piece = &text[piece[0]..piece[1]];
            match if key == 0 { cache.get_wide(piece) } else { cache.get(key, home) } {
                Known::Few(ids, count) => out.put(ids, count),
                Known::Many(ids) => ids.iter().for_each(|&id| out.put([id; INLINE], 1)),
                Known::Nothing => {
                    self.encode_piece(piece, &mut cache.work);
                    cache.work.ids.iter().for_each(|&id| out.put([id; INLINE], 1));
                    cache.remember(piece, key);
                }
            }
        }
    }

    /// Leaves the ids of one piece in `work.ids`.
    fn encode_piece(&self, piece: &[u8], work: &mut Work) {
        work.ids.clear();
        if let Some(&id) = self.whole_pieces.get(piece) {
            work.ids.push(id);
        } else if piece.len() <= SMALL {
            self.encode_small(piece, &mut work.ids);
        } else if piece.len() <= LONG || !self.ordered {
            self.encode_long(piece, work);
        } else {
            self.encode_very_long(piece, work);
        }
    }

    /// Candidates are `rank << 6 | place`, so that the smallest is the leftmost pair of the lowest rank.
    fn encode_small(&self, piece: &[u8], out: &mut Vec<u32>) {
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
    fn encode_long(&self, piece: &[u8], work: &mut Work) {
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
        self.collect(&work.slots, &mut work.ids);
    }

    /// The same slots, but no heap: with ordered merges a merge only creates pairs of higher ranks, so the ranks can be
    /// served one after the other, each with the list of its places. O(n), apart from sorting the lists of pairs that
    /// can overlap themselves ("aaa"), where the order counts.
    fn encode_very_long(&self, piece: &[u8], work: &mut Work) {
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
        self.collect(&slots, &mut work.ids);
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
    fn collect(&self, slots: &[u32], ids: &mut Vec<u32>) {
        let mut at = 0;
        while at < slots.len() {
            ids.push(slots[at]);
            at += self.span(slots[at]);
        }
    }

    /// Length of a token in bytes, which is the number of slots it takes.
    #[inline]
    fn span(&self, id: u32) -> usize {
        self.starts[id as usize + 1] - self.starts[id as usize]
    }

    /// The bytes of ids. The error is the first id that the vocabulary does not have.
    pub fn decode<T: Copy + Into<u32>>(&self, ids: &[T]) -> Result<Vec<u8>, u32> {
        let mut length = 0;
        for &id in ids {
            let id = id.into();
            if id as usize >= self.size() || self.holes[id as usize] {
                return Err(id);
            }
            length += self.span(id);
        }
        // Most tokens are short: copying 16 bytes whatever their length needs no call, if there is room for them.
        let mut out = vec![0; length + 16];
        let mut at = 0;
        for &id in ids {
            let id = id.into();
            let (start, span) = (self.starts[id as usize], self.span(id));
            match (self.bytes.get(start..start + 16), out.get_mut(at..at + 16)) {
                (Some(from), Some(to)) if span <= 16 => to.copy_from_slice(from),
                _ => out[at..at + span].copy_from_slice(self.token(id)),
            }
            at += span;
        }
        out.truncate(length);
        Ok(out)
    }
}

/// Marks the last slot of a token that takes several.
const LAST: u32 = 1 << 31;
/// A slot inside a token.
const INNER: u32 = u32::MAX;

fn is_ordered(size: usize, merges: &[(u32, u32, u32)], merged: &[u32]) -> bool {
    let mut made = vec![None; size];
    for &(_, _, rank) in merges {
        let last = &mut made[merged[rank as usize] as usize];
        *last = Some(rank).max(*last);
    }
    merges.iter().all(|&(left, right, rank)| made[left as usize] < Some(rank) && made[right as usize] < Some(rank))
}

/// A text that arrives in parts. The ids do not depend on where it is cut: what could still change waits.
#[derive(Default)]
pub struct Stream {
    pending: Vec<u8>,
    /// Not worth looking for a cut before this many bytes are there (doubled after a vain search: linear in total).
    patience: usize,
}

impl Stream {
    /// Takes a part and appends the ids that are certain by now.
    pub fn feed<T: Width>(
        &mut self,
        model: &Model,
        by: &Splitter,
        part: &[u8],
        cache: &mut Cache,
        out: &mut Ids<T>,
    ) -> Result<(), Failure> {
        self.pending.extend_from_slice(part);
        if self.pending.len() < self.patience {
            return Ok(());
        }
        let Some(at) = by.cutter.last_cut(&self.pending) else {
            self.patience = self.pending.len() * 2;
            return Ok(());
        };
        let result = model.encode(&self.pending[..at], by, cache, out);
        self.pending.drain(..at);
        self.patience = 0;
        result
    }

    /// The rest of the ids.
    pub fn finish<T: Width>(
        &mut self,
        model: &Model,
        by: &Splitter,
        cache: &mut Cache,
        out: &mut Ids<T>,
    ) -> Result<(), Failure> {
        model.encode(&std::mem::take(self).pending, by, cache, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model over a, b and c with a few merges, some of which overlap themselves.
    fn model() -> (Model, Splitter) {
        let mut tokens: Vec<Option<Vec<u8>>> = (0..=255u8).map(|byte| Some(vec![byte])).collect();
        let mut merges = Vec::new();
        for (left, right) in
            [("a", "a"), ("a", "b"), ("aa", "aa"), ("b", "c"), ("aa", "ab"), (" ", "a"), ("aaaa", "a"), ("bc", "bc")]
        {
            let find = |name: &str| tokens.iter().position(|t| t.as_deref() == Some(name.as_bytes())).unwrap() as u32;
            merges.push((find(left), find(right), merges.len() as u32));
            tokens.push(Some([left.as_bytes(), right.as_bytes()].concat()));
        }
        let merged = (256..tokens.len() as u32).collect();
        let specials = [b"<e>".to_vec(), b"<e><e>".to_vec()];
        let special_ids = vec![tokens.len() as u32, tokens.len() as u32 + 1];
        tokens.extend(specials.iter().map(|special| Some(special.clone())));
        let model = Model::new(&tokens, &merges, merged, &special_ids, false).unwrap();
        (model, Splitter { cutter: Cutter::new("gpt2", &specials).unwrap(), special_ids })
    }

    /// The definition: merge the leftmost pair of the lowest rank until there is none.
    fn plain(model: &Model, piece: &[u8]) -> Vec<u32> {
        let mut ids: Vec<u32> = piece.iter().map(|&byte| model.byte_ids[byte as usize]).collect();
        loop {
            let ranked = ids.windows(2).enumerate().map(|(at, pair)| (model.rank(pair[0], pair[1]), at));
            match ranked.min() {
                Some((rank, at)) if rank != NO_RANK => {
                    ids[at] = model.merged[rank as usize];
                    ids.remove(at + 1);
                }
                _ => return ids,
            }
        }
    }

    fn random_text(state: &mut u64, length: usize) -> Vec<u8> {
        let mut text = Vec::new();
        while text.len() < length {
            *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let parts: [&[u8]; 9] = [b"a", b"a", b"aa", b"b", b"c", b"bc", b" ", b"<e>", "中".as_bytes()];
            text.extend(parts[(*state >> 33) as usize % parts.len()]);
        }
        text
    }

    #[test]
    fn pieces_equal_the_definition_at_any_length() {
        let ((model, _), mut state) = (model(), 3);
        for round in 0..600 {
            let piece = random_text(&mut state, 1 + round % 150);
            let mut work = Work::default();
            model.encode_piece(&piece, &mut work);
            assert_eq!(work.ids, plain(&model, &piece));
            work.ids.clear();
            if piece.len() > 1 {
                model.encode_long(&piece, &mut work);
                assert_eq!(work.ids, plain(&model, &piece));
                work.ids.clear();
                model.encode_very_long(&piece, &mut work);
                assert_eq!(work.ids, plain(&model, &piece));
            }
        }
    }

    #[test]
    fn knows_whether_merges_are_ordered() {
        assert!(model().0.ordered);
        assert!(is_ordered(5, &[(0, 1, 0), (2, 0, 1)], &[2, 3]));
        assert!(!is_ordered(5, &[(2, 0, 0), (0, 1, 1)], &[3, 2]));
        assert!(!is_ordered(5, &[(0, 1, 0), (2, 0, 1), (1, 1, 2)], &[2, 3, 2]));
    }

    #[test]
    fn streams_give_the_same_ids_wherever_they_are_cut() {
        let ((model, by), mut state, mut cache) = (model(), 5, Cache::default());
        for _ in 0..60 {
            let text = random_text(&mut state, 40);
            let mut whole = Ids::<u32>::default();
            model.encode(&text, &by, &mut cache, &mut whole).unwrap();
            let whole = whole.into_vec();
            assert_eq!(model.decode(&whole).unwrap(), text);
            for size in 1..text.len() {
                let (mut stream, mut ids) = (Stream::default(), Ids::<u32>::default());
                for part in text.chunks(size) {
                    stream.feed(&model, &by, part, &mut cache, &mut ids).unwrap();
                }
                stream.finish(&model, &by, &mut cache, &mut ids).unwrap();
                assert_eq!(ids.into_vec(), whole, "{:?} in parts of {size}", String::from_utf8_lossy(&text));
            }
        }
    }

    #[test]
    fn unknown_ids_and_missing_bytes_are_errors() {
        assert_eq!(model().0.decode(&[97u32, 9999]), Err(9999));
        assert!(Model::new(&[Some(b"a".to_vec())], &[], vec![], &[], false).is_err_and(|error| error.contains("0x00")));
    }
}
