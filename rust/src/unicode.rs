//! Classes of characters, and a UTF-8 decoder that never fails.
//!
//! GPT-2's pattern knows four classes: `\p{L}`, `\p{N}`, `\s` and the rest. They lie in one flat table of two bits a
//! code point (65 KB; English touches 32 bytes of it, Chinese 5 KB), filled at compile time from the ranges in
//! `unicode_ranges.rs`. Rust's own `char::is_alphabetic` is not `\p{L}`, and its Unicode version moves with the compiler.

use crate::unicode_ranges::RANGES;

pub const OTHER: u8 = 0;
pub const LETTER: u8 = 1;
pub const NUMBER: u8 = 2;
pub const SPACE: u8 = 3;

/// Code points from here on are OTHER (the last entry of RANGES says so; checked below).
const LIMIT: usize = (RANGES[RANGES.len() - 1] >> 2) as usize;
const _: () = assert!(RANGES[RANGES.len() - 1] & 3 == OTHER as u32);

static CLASSES: [u8; LIMIT.div_ceil(4)] = fill();

const fn fill() -> [u8; LIMIT.div_ceil(4)] {
    let mut table = [0u8; LIMIT.div_ceil(4)];
    let mut range = 0;
    while range + 1 < RANGES.len() {
        let class = (RANGES[range] & 3) as u8;
        let mut code = (RANGES[range] >> 2) as usize;
        let end = (RANGES[range + 1] >> 2) as usize;
        while class != OTHER && code < end {
            if code % 4 == 0 && code + 4 <= end {
                table[code / 4] = class * 0b0101_0101;
                code += 4;
            } else {
                table[code / 4] |= class << (2 * (code % 4));
                code += 1;
            }
        }
        range += 1;
    }
    table
}

/// The class of a code point.
#[inline]
pub fn class_of(code: u32) -> u8 {
    let code = code as usize;
    if code >= LIMIT {
        return OTHER;
    }
    CLASSES[code / 4] >> (2 * (code % 4)) & 3
}

/// Code point and length in bytes of the character at `at`. A byte that does not begin a well-formed UTF-8 sequence
/// stands alone, as U+FFFD of length 1: bytes that are no text pass through and come back from decoding unchanged.
#[inline]
pub fn decode(text: &[u8], at: usize) -> (u32, usize) {
    const INVALID: (u32, usize) = (0xFFFD, 1);
    let rest = &text[at..];
    let first = rest[0];
    let tail = |i: usize| match rest.get(i) {
        Some(&byte) if byte & 0xC0 == 0x80 => (byte & 0x3F) as u32,
        _ => u32::MAX,
    };
    match first {
        0..=0x7F => (first as u32, 1),
        0xC2..=0xDF => match tail(1) {
            u32::MAX => INVALID,
            b => ((first as u32 & 0x1F) << 6 | b, 2),
        },
        0xE0..=0xEF => match (tail(1), tail(2)) {
            (u32::MAX, _) | (_, u32::MAX) => INVALID,
            (b, c) => {
                let code = (first as u32 & 0x0F) << 12 | b << 6 | c;
                if code < 0x800 || (0xD800..0xE000).contains(&code) {
                    return INVALID;
                }
                (code, 3)
            }
        },
        0xF0..=0xF4 => match (tail(1), tail(2), tail(3)) {
            (u32::MAX, _, _) | (_, u32::MAX, _) | (_, _, u32::MAX) => INVALID,
            (b, c, d) => {
                let code = (first as u32 & 0x07) << 18 | b << 12 | c << 6 | d;
                if !(0x10000..0x110000).contains(&code) {
                    return INVALID;
                }
                (code, 4)
            }
        },
        _ => INVALID,
    }
}

/// Class and length in bytes of the character at `at`.
#[inline]
pub fn class_at(text: &[u8], at: usize) -> (u8, usize) {
    let (code, length) = decode(text, at);
    (class_of(code), length)
}

/// The same, quicker where four bytes are left and the character takes two or three, as most do that are not ASCII.
#[inline]
pub fn wide_class_at(text: &[u8], at: usize) -> (u8, usize) {
    if let Some(&bytes) = text[at..].first_chunk::<4>() {
        let word = u32::from_le_bytes(bytes);
        let (a, b, c) = (word & 0x1F, word >> 8 & 0x3F, word >> 16 & 0x3F);
        if word & 0xC0E0 == 0x80C0 && a >= 2 {
            return (class_of(a << 6 | b), 2);
        }
        let code = (a & 0x0F) << 12 | b << 6 | c;
        if word & 0xC0_C0F0 == 0x80_80E0 && code >= 0x800 && code >> 11 != 0xD800 >> 11 {
            return (class_of(code), 3);
        }
    }
    class_at(text, at)
}

/// Class of the character that ends at `end` (> 0).
pub fn class_before(text: &[u8], end: usize) -> u8 {
    let mut start = end - 1;
    while start > 0 && end - start < 4 && text[start] & 0xC0 == 0x80 {
        start -= 1;
    }
    match decode(text, start) {
        (code, length) if start + length == end => class_of(code),
        _ => OTHER, // an ill-formed sequence: its last byte stands alone
    }
}

#[cfg(test)]
#[path = "tests/unicode.rs"]
mod tests;
