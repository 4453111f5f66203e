//! Pre-tokens: where GPT-2's pattern cuts a text. No regex engine; one pass, no backtracking, no recursion.
//!
//! ```text
//! '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! In words. A piece is (1) an English contraction, if a piece starts at its apostrophe; else (2) an optional U+0020 and
//! a run of characters of one class; else (3) a run of white space, which gives its last character back when
//! something else follows (that character then begins the next piece if it is U+0020, and stands alone if not).
//!
//! So where pieces start depends on the classes of neighbouring characters alone. 64 bytes are classified at once into masks of
//! a bit a byte, and the starts come out of shifts and ANDs; contractions are mended one by one at the apostrophes that
//! begin a piece, characters beyond ASCII decoded one by one. (The idea is simdjson's, Langdale and Lemire 2019.)

use crate::unicode::{class_at, class_before, wide_class_at, LETTER, NUMBER, OTHER, SPACE};

/// End of `'s`, `'d`, `'m`, `'t`, `'ll`, `'ve` or `'re` if one of them starts at the apostrophe `start`.
#[inline]
fn contraction_end(text: &[u8], start: usize) -> Option<usize> {
    match text[start + 1..] {
        [b's' | b'd' | b'm' | b't', ..] => Some(start + 2),
        [b'l', b'l', ..] | [b'v', b'e', ..] | [b'r', b'e', ..] => Some(start + 3),
        _ => None,
    }
}

/// Whether cutting the text before `at` changes no piece, whatever stands on either side.
///
/// Between characters of different classes, the first not white space and not an apostrophe: every alternative ends
/// there and none looks behind (an apostrophe may begin a contraction; white space may belong to what follows).
pub fn is_safe_cut(text: &[u8], at: usize) -> bool {
    if at == 0 || at >= text.len() || text[at - 1] == b'\'' {
        return false;
    }
    let byte = text[at];
    if byte & 0xC0 == 0x80 {
        return false; // inside a character (or ill-formed: not worth a thought)
    }
    let before = class_before(text, at);
    before != SPACE && before != class_at(text, at).0
}

/// Pieces that a batch holds, about.
const BATCH: usize = 192;
/// Most pieces in a batch: one block more may come, at a start a byte.
pub const MOST: usize = BATCH + 64;

/// Calls `each(bounds)` for batches of pieces, until it returns false: `bounds[i]..bounds[i + 1]` is a piece, at most `MOST` a
/// batch.
#[inline]
pub fn for_each_batch(text: &[u8], mut each: impl FnMut(&[usize]) -> bool) {
    let mut bounds = [0; MOST + 1];
    let mut filled = 0;
    let mut scanner = Scanner::default();
    for base in (0..text.len()).step_by(64) {
        let mut starts = scanner.starts(text, base);
        while starts != 0 {
            bounds[filled] = base + starts.trailing_zeros() as usize;
            filled += 1;
            starts &= starts - 1;
        }
        if filled > BATCH {
            if !each(&bounds[..filled]) {
                return;
            }
            bounds[0] = bounds[filled - 1];
            filled = 1;
        }
    }
    if filled > 0 {
        bounds[filled] = text.len();
        each(&bounds[..=filled]);
    }
}

/// Classes of 64 bytes, a bit a byte; all bytes of a character have its class. What is in none of them is OTHER.
#[derive(Clone, Copy, Default)]
struct Classes {
    letter: u64,
    number: u64,
    space: u64,
    /// U+0020 only.
    blank: u64,
    apostrophe: u64,
    /// Bytes that are not ASCII.
    high: u64,
    /// First byte of a white-space character of several bytes that something else follows.
    last_wide_space: u64,
}

/// Finds the starts of pieces, 64 bytes at a time, by arithmetic on the masks of their classes.
#[derive(Default)]
struct Scanner {
    before: Classes,
    /// Where the character that reaches into the next block ends, and its class.
    wide_end: usize,
    wide_class: u8,
    /// Starts in the next block that a contraction adds and takes away.
    add: u64,
    take: u64,
}

impl Scanner {
    /// Starts of pieces within `text[base..base + 64]`, a bit a byte. Blocks must come in order.
    #[inline]
    fn starts(&mut self, text: &[u8], base: usize) -> u64 {
        let here = self.classes(text, base);
        let Classes { letter, number, space, blank, apostrophe, high, last_wide_space } = here;
        let other = !(letter | number | space);
        let before = std::mem::replace(&mut self.before, here);
        let first = base == 0; // nothing stands before the first byte
        let shifted = |now: u64, then: u64| now << 1 | then >> 63;
        let change = letter & !shifted(letter, before.letter)
            | number & !shifted(number, before.number)
            | other & !(shifted(other, !(before.letter | before.number | before.space)) & !(first as u64));
        let space_follows = base + 64 >= text.len() || class_at(text, base + 64).0 == SPACE;
        // The last of a run of white space begins a piece; a wide character's case was settled when it was decoded.
        let last = space & !(space >> 1 | (space_follows as u64) << 63) & !high;
        let mut starts =
            change & !shifted(blank, before.blank) | space & !shifted(space, before.space) | last | last_wide_space;
        starts = (starts | self.add) & !self.take;
        (self.add, self.take) = (0, 0);
        let mut contractions = starts & apostrophe;
        while contractions != 0 {
            let bit = contractions.trailing_zeros() as usize;
            contractions &= contractions - 1;
            if let Some(end) = contraction_end(text, base + bit) {
                let (add, take) = (1u128 << (end - base), 1u128 << (bit + 1));
                starts = (starts | add as u64) & !(take as u64);
                self.add |= (add >> 64) as u64;
                self.take |= (take >> 64) as u64;
            }
        }
        match text.len() - base {
            left @ 0..64 => starts & !(u64::MAX << left),
            _ => starts,
        }
    }

    /// Classes of `text[base..base + 64]`; behind the end of the text there is nothing but U+0020.
    #[inline]
    fn classes(&mut self, text: &[u8], base: usize) -> Classes {
        let classes = match text.get(base..).and_then(|rest| rest.first_chunk::<64>()) {
            Some(block) => ascii_classes(block),
            None => {
                let mut block = [b' '; 64];
                block[..text.len() - base].copy_from_slice(&text[base..]);
                ascii_classes(&block)
            }
        };
        if classes.high == 0 {
            return classes;
        }
        self.add_wide(text, base, classes)
    }

    /// Adds the characters that are not ASCII, one by one.
    fn add_wide(&mut self, text: &[u8], base: usize, mut classes: Classes) -> Classes {
        let mut left = classes.high;
        let mut add = |class: u8, bits: u64| {
            left &= !bits;
            match class {
                LETTER => classes.letter |= bits,
                NUMBER => classes.number |= bits,
                SPACE => classes.space |= bits,
                _ => {}
            }
            left
        };
        let mut todo = match self.wide_end.saturating_sub(base) {
            0 => add(OTHER, 0),
            reach => add(self.wide_class, (1 << reach) - 1), // at most three bytes
        };
        while todo != 0 {
            let bit = todo.trailing_zeros() as usize;
            let (class, size) = wide_class_at(text, base + bit);
            let end = base + bit + size;
            todo = add(class, ((1 << size) - 1) << bit);
            if class == SPACE && end < text.len() && class_at(text, end).0 != SPACE {
                classes.last_wide_space |= 1 << bit;
            }
            (self.wide_end, self.wide_class) = (end, class);
        }
        classes
    }
}

/// The classes of ASCII, by SSE2, which every x86-64 has: 64 bytes in some 80 instructions.
#[cfg(target_arch = "x86_64")]
#[inline]
fn ascii_classes(block: &[u8; 64]) -> Classes {
    use core::arch::x86_64::*;
    let mut classes = Classes::default();
    for part in 0..4 {
        // SAFETY: the load reads 16 bytes of the 64 at `block`; the rest computes in registers with baseline SSE2.
        unsafe {
            let bytes = _mm_loadu_si128(block.as_ptr().add(16 * part).cast());
            let mask = |found| (_mm_movemask_epi8(found) as u32 as u64) << (16 * part);
            // A byte lies in first..first + count: subtract, then compare unsigned by way of the minimum.
            let within = |bytes, first: u8, count: u8| {
                let shifted = _mm_sub_epi8(bytes, _mm_set1_epi8(first as i8));
                mask(_mm_cmpeq_epi8(_mm_min_epu8(shifted, _mm_set1_epi8(count as i8 - 1)), shifted))
            };
            let blank = mask(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(b' ' as i8)));
            classes.letter |= within(_mm_or_si128(bytes, _mm_set1_epi8(0x20)), b'a', 26);
            classes.number |= within(bytes, b'0', 10);
            classes.space |= within(bytes, b'\t', 5) | blank;
            classes.blank |= blank;
            classes.apostrophe |= mask(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(b'\'' as i8)));
            classes.high |= mask(bytes);
        }
    }
    classes
}

/// The same for other machines, and the truth for the one above.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn ascii_classes_plain(block: &[u8; 64]) -> Classes {
    let mut classes = Classes::default();
    for (place, &byte) in block.iter().enumerate() {
        let bit = 1 << place;
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => classes.letter |= bit,
            b'0'..=b'9' => classes.number |= bit,
            b'\t'..=b'\r' => classes.space |= bit,
            b' ' => (classes.space, classes.blank) = (classes.space | bit, classes.blank | bit),
            b'\'' => classes.apostrophe |= bit,
            0x80.. => classes.high |= bit,
            _ => {}
        }
    }
    classes
}

#[cfg(not(target_arch = "x86_64"))]
use ascii_classes_plain as ascii_classes;

#[cfg(test)]
#[path = "tests/scan.rs"]
mod tests;
