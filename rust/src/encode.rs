//! Byte-pair encoding, use: from text to ids and back.
//!
//! A text is split at special tokens, each segment into pre-tokens, each pre-token into bytes; then the adjacent pair with
//! the lowest rank is merged, the leftmost first, until no pair has a rank (`merge`). Text repeats itself, so a bounded
//! cache remembers the ids of short pieces.

use std::collections::HashMap;

use crate::cache::{long_key, Cache, SIZE};
use crate::ids::Ids;
use crate::pairs::RankTable;
use crate::pattern::{Cutter, Failure};
use crate::scan::MOST;
use crate::words::{pack, PACKED};

/// A vocabulary with its merges, ready for use.
pub struct Model {
    /// All tokens' bytes, one after the other; token i is `bytes[starts[i]..starts[i + 1]]`.
    bytes: Vec<u8>,
    starts: Vec<usize>,
    /// Ids below the size of the vocabulary that stand for no token.
    holes: Vec<bool>,
    pub(crate) byte_ids: [u32; 256],
    /// Pair of ids → rank; and of pairs of bytes once more, by `first << 8 | second`.
    ranks: RankTable,
    pub(crate) byte_ranks: Vec<u32>,
    /// Rank → id of the merged token.
    pub(crate) merged: Vec<u32>,
    /// Whether every merge comes after the merges that make its parts, as training leaves them.
    pub(crate) ordered: bool,
    pub(crate) whole_pieces: HashMap<Box<[u8]>, u32>,
}

/// How a text becomes segments and pieces, and the ids of its special tokens.
pub struct Splitter {
    pub cutter: Cutter,
    pub special_ids: Vec<u32>,
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

    /// Length in bytes of the longest token that merges make.
    pub fn longest(&self) -> usize {
        self.merged.iter().map(|&id| self.span(id)).max().unwrap_or(1)
    }

    /// Whether ids need more than 2 bytes.
    pub fn wide(&self) -> bool {
        self.size() > 1 << 16
    }

    #[inline]
    fn token(&self, id: u32) -> &[u8] {
        &self.bytes[self.starts[id as usize]..self.starts[id as usize + 1]]
    }

    #[inline]
    pub(crate) fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks.get(left, right)
    }

    /// Appends the ids of a text to `out`.
    pub fn encode(&self, text: &[u8], by: &Splitter, cache: &mut Cache, out: &mut Ids) -> Result<(), Failure> {
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
            |(_, out, _), index| out.push(by.special_ids[index]),
        );
        state.2
    }

    /// The same with special tokens as ordinary text.
    pub fn encode_ordinary(&self, text: &[u8], by: &Splitter, cache: &mut Cache, out: &mut Ids) -> Result<(), Failure> {
        by.cutter.pattern.for_each_batch(text, |bounds| {
            self.encode_batch(text, bounds, cache, out);
            true
        })
    }

    /// The pieces of a batch. Their cache entries are fetched together, so that the waits for memory overlap.
    fn encode_batch(&self, text: &[u8], bounds: &[usize], cache: &mut Cache, out: &mut Ids) {
        cache.grow();
        let (mut keys, mut homes) = ([0; MOST], [0; MOST]);
        for ((key, home), piece) in keys.iter_mut().zip(&mut homes).zip(bounds.windows(2)) {
            *key = match piece[1] - piece[0] <= PACKED {
                true => pack(text, piece[0], piece[1]),
                false => long_key(&text[piece[0]..piece[1]]),
            };
            *home = cache.prefetch(*key);
        }
        out.reserve(bounds[bounds.len() - 1] - bounds[0]);
        for ((&key, &home), piece) in keys.iter().zip(&homes).zip(bounds.windows(2)) {
            let (piece, long) = (&text[piece[0]..piece[1]], piece[1] - piece[0] > PACKED);
            let Some(entry) = cache.find(key, home) else {
                self.encode_new(piece, key, long, cache, out);
                continue;
            };
            match entry[1] >> SIZE {
                0 => match cache.far_ids(entry, long.then_some(piece)) {
                    Some((ids, size)) => out.put_many(ids, size),
                    None => self.encode_new(piece, key, long, cache, out),
                },
                half => out.put([entry[2], entry[3]], 2 * half as usize),
            }
        }
    }

    /// A piece that the cache does not know.
    #[cold]
    fn encode_new(&self, piece: &[u8], key: u128, long: bool, cache: &mut Cache, out: &mut Ids) {
        let before = out.as_bytes().len();
        self.encode_piece(piece, &mut cache.work, out);
        cache.remember(piece, key, long, &out.as_bytes()[before..]);
    }

    /// Length of a token in bytes, which is the number of slots it takes.
    #[inline]
    pub(crate) fn span(&self, id: u32) -> usize {
        self.starts[id as usize + 1] - self.starts[id as usize]
    }

    /// The bytes of ids. The error is the first id that the vocabulary does not have.
    pub fn decode<T: Copy + Into<u32>>(&self, ids: &[T]) -> Result<Vec<u8>, u32> {
        let mut out = Vec::with_capacity(ids.len() * 4);
        for block in ids.chunks(1 << 10) {
            let mut length = 0;
            for id in block.iter().map(|&id| id.into()) {
                if id as usize >= self.size() || self.holes[id as usize] {
                    return Err(id);
                }
                length += self.span(id);
            }
            // Most tokens are short: copying 16 bytes whatever their length needs no call, if there is room for them.
            let mut at = out.len();
            out.resize(at + length + 16, 0);
            for id in block.iter().map(|&id| id.into()) {
                let (start, span) = (self.starts[id as usize], self.span(id));
                match (self.bytes.get(start..start + 16), out.get_mut(at..at + 16)) {
                    (Some(from), Some(to)) if span <= 16 => to.copy_from_slice(from),
                    _ => out[at..at + span].copy_from_slice(self.token(id)),
                }
                at += span;
            }
            out.truncate(at);
        }
        Ok(out)
    }
}

pub(crate) fn is_ordered(size: usize, merges: &[(u32, u32, u32)], merged: &[u32]) -> bool {
    let mut made = vec![None; size];
    for &(_, _, rank) in merges {
        let last = &mut made[merged[rank as usize] as usize];
        *last = Some(rank).max(*last);
    }
    merges.iter().all(|&(left, right, rank)| made[left as usize] < Some(rank) && made[right as usize] < Some(rank))
}

#[cfg(test)]
#[path = "tests/encode.rs"]
pub(crate) mod tests;
