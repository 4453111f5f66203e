//! Pre-tokens: where GPT-2's pattern cuts a text. No regex engine; one pass, no backtracking, no recursion.
//!
//! ```text
//! '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//! In words. A piece is (1) an English contraction, if a piece starts at its apostrophe; else (2) an optional U+0020 and
//! a run of characters of one class; else (3) a run of white space, which gives its last character back when
//! something else follows (that character then begins the next piece if it is U+0020, and stands alone if not).

use crate::unicode::{class_at, class_before, LETTER, OTHER, SPACE};

/// End of the piece that starts at `start`.
///
/// `start < text.len()`, at the start of a character. Ill-formed bytes count as OTHER.
#[inline]
pub fn piece_end(text: &[u8], start: usize) -> usize {
    let length = text.len();
    let first = text[start];
    if first == b'\'' {
        if let Some(end) = contraction_end(text, start) {
            return end;
        }
    }
    let (class, size) = class_at(text, start);
    if class != SPACE {
        return run_end(text, start + size, class);
    }
    if first == b' ' && start + 1 < length {
        let (next, size) = class_at(text, start + 1);
        if next != SPACE {
            return run_end(text, start + 1 + size, next);
        }
    }
    let (mut last, mut at) = (start, start + size);
    while at < length {
        let (class, size) = class_at(text, at);
        if class != SPACE {
            return if last == start { at } else { last };
        }
        last = at;
        at += size;
    }
    length
}

/// End of the run of `class` that goes on at `at`.
#[inline]
fn run_end(text: &[u8], mut at: usize, class: u8) -> usize {
    while at < text.len() {
        let (next, size) = class_at(text, at);
        if next != class {
            break;
        }
        at += size;
    }
    at
}

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

/// Calls `each(start, end)` for every piece of `text`.
#[inline]
pub fn for_each_piece(text: &[u8], mut each: impl FnMut(usize, usize)) {
    let mut start = 0;
    while start < text.len() {
        let end = piece_end(text, start);
        each(start, end);
        start = end;
    }
}

const _: () = assert!(LETTER != OTHER);

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &[u8]) -> Vec<&[u8]> {
        let mut found = Vec::new();
        for_each_piece(text, |start, end| found.push(&text[start..end]));
        found
    }

    fn cut(text: &str) -> Vec<String> {
        pieces(text.as_bytes()).into_iter().map(|p| String::from_utf8(p.to_vec()).unwrap()).collect()
    }

    #[test]
    fn words_numbers_and_the_rest() {
        assert_eq!(cut("Hello, world 42!"), ["Hello", ",", " world", " 42", "!"]);
        assert_eq!(cut("a1b2 中文 ½"), ["a", "1", "b", "2", " 中文", " ½"]);
        assert_eq!(cut(""), [""; 0]);
    }

    #[test]
    fn contractions_only_at_the_start_of_a_piece() {
        assert_eq!(cut("don't we'll I'VE"), ["don", "'t", " we", "'ll", " I", "'", "VE"]);
        assert_eq!(cut(" 't ''s 'same"), [" '", "t", " ''", "s", " '", "same"]);
        assert_eq!(cut("x'same'rest"), ["x", "'s", "ame", "'re", "st"]);
        assert_eq!(cut("'s's'l'"), ["'s", "'s", "'", "l", "'"]);
    }

    #[test]
    fn white_space_gives_its_last_character_back() {
        assert_eq!(cut("a   b"), ["a", "  ", " b"]);
        assert_eq!(cut("a \n b"), ["a", " \n", " b"]);
        assert_eq!(cut("a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(cut("a \u{3000}b  "), ["a", " ", "\u{3000}", "b", "  "]);
        assert_eq!(cut("\u{85}x \t"), ["\u{85}", "x", " \t"]);
    }

    #[test]
    fn ill_formed_bytes_are_pieces_too() {
        assert_eq!(pieces(b"a\xFF\xFEb \xE4\xB8"), [&b"a"[..], b"\xFF\xFE", b"b", b" \xE4\xB8"]);
    }

    /// Random strings over an alphabet that holds every trap, cut at every place that claims to be safe.
    #[test]
    fn safe_cuts_change_nothing() {
        let alphabet = ["a", "s", "r", "e", "l", "'", "'", " ", " ", "\n", "1", ".", "中", "\u{3000}", "é", "\u{301}"];
        let mut state = 1u64;
        let mut cuts = 0;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..14 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                text += alphabet[(state >> 33) as usize % alphabet.len()];
            }
            let whole = pieces(text.as_bytes());
            for at in 1..text.len() {
                if is_safe_cut(text.as_bytes(), at) {
                    cuts += 1;
                    let mut parts = pieces(&text.as_bytes()[..at]);
                    parts.extend(pieces(&text.as_bytes()[at..]));
                    assert_eq!(parts, whole, "{text:?} cut at {at}");
                }
            }
        }
        assert!(cuts > 50_000);
    }
}
