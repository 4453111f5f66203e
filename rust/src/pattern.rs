//! The patterns that cut text into pre-tokens: GPT-2's (`scan`), cl100k's (here), any other by a regex engine.
//!
//! cl100k's, as tiktoken and (without `\s++$`) Llama 3 write it:
//!
//! ```text
//! '(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s
//! ```
//!
//! Both hand-written scanners are linear on every text. A regex engine that knows look-ahead backtracks: it is slower, and may
//! give up on a long text, which is an error and never a wrong piece.

use fancy_regex::Regex;

use crate::scan;
use crate::specials::Specials;
use crate::unicode::{class_at, class_before, decode, LETTER, NUMBER, OTHER, SPACE};

pub enum Pattern {
    Gpt2,
    /// `tail`: white space at the end of the text stays in one piece (`\s++$`).
    Cl100k {
        tail: bool,
    },
    Other(Box<Regex>),
}

/// Why a text could not be cut: the regex engine's reason.
pub type Failure = String;

impl Pattern {
    /// `"gpt2"`, `"cl100k"`, `"llama3"`, or a regular expression.
    pub fn new(name: &str) -> Result<Self, Failure> {
        Ok(match name {
            "gpt2" => Pattern::Gpt2,
            "cl100k" => Pattern::Cl100k { tail: true },
            "llama3" => Pattern::Cl100k { tail: false },
            expression => Pattern::Other(Box::new(Regex::new(expression).map_err(|error| error.to_string())?)),
        })
    }

    /// Calls `each` for batches of pieces, as `scan::for_each_batch` does.
    #[inline]
    pub fn for_each_batch(&self, text: &[u8], mut each: impl FnMut(&[usize]) -> bool) -> Result<(), Failure> {
        match self {
            Pattern::Gpt2 => scan::for_each_batch(text, each),
            Pattern::Cl100k { tail } => {
                let (mut bounds, mut filled) = ([0; scan::MOST + 1], 0);
                while bounds[filled] < text.len() {
                    bounds[filled + 1] = cl100k_piece_end(text, bounds[filled], *tail);
                    filled += 1;
                    if filled == scan::MOST {
                        if !each(&bounds) {
                            return Ok(());
                        }
                        (bounds[0], filled) = (bounds[filled], 0);
                    }
                }
                each(&bounds[..=filled]);
            }
            Pattern::Other(regex) => {
                let mut start = 0;
                for chunk in text.utf8_chunks() {
                    let end = start + chunk.valid().len() + chunk.invalid().len();
                    if !search(regex, chunk.valid(), start, &mut each)? {
                        return Ok(());
                    }
                    if !chunk.invalid().is_empty() {
                        each(&[end - chunk.invalid().len(), end]);
                    }
                    start = end;
                }
            }
        }
        Ok(())
    }

    /// Whether cutting the text before `at` changes no piece, whatever stands on either side.
    pub fn is_safe_cut(&self, text: &[u8], at: usize) -> bool {
        match self {
            Pattern::Gpt2 => scan::is_safe_cut(text, at),
            Pattern::Other(_) => false,
            Pattern::Cl100k { .. } => {
                if at == 0 || at >= text.len() || text[at] & 0xC0 == 0x80 {
                    return false;
                }
                // A run of letters or numbers ends where the class changes; one of other characters could take
                // newlines with it, or its last character could lead a word, but a space ends it. Behind a newline
                // no piece goes on but with white space, and with or without what follows, the white space before
                // it is one piece that ends there (`\s*[\r\n]`; at the end of the text `\s++$`).
                match class_before(text, at) {
                    SPACE => is_newline(text, at - 1) && class_at(text, at).0 != SPACE,
                    OTHER => text[at] == b' ',
                    class => class_at(text, at).0 != class,
                }
            }
        }
    }
}

/// How text is cut: first at special tokens, then by the pattern.
pub struct Cutter {
    pub specials: Specials,
    pub pattern: Pattern,
}

impl Cutter {
    pub fn new(pattern: &str, specials: &[Vec<u8>]) -> Result<Self, Failure> {
        Ok(Cutter { specials: Specials::new(specials)?, pattern: Pattern::new(pattern)? })
    }

    /// Whether the text may be cut before `at` without changing any count or id.
    pub fn is_cut(&self, text: &[u8], at: usize) -> bool {
        self.specials.is_cut(text, at, |text, at| self.pattern.is_safe_cut(text, at))
    }

    /// The last place where a text that goes on may be cut.
    pub fn last_cut(&self, text: &[u8]) -> Option<usize> {
        // The four bytes behind a cut tell the character there; a special token that covers it is complete by then.
        let visible = (text.len() + 1).saturating_sub(self.specials.longest().max(5));
        (1..=visible).rev().find(|&at| self.is_cut(text, at))
    }
}

/// The matches of a regex, and what lies between them, as pieces. Whether `each` wants more.
fn search(regex: &Regex, text: &str, offset: usize, each: &mut impl FnMut(&[usize]) -> bool) -> Result<bool, Failure> {
    let mut done = 0;
    let mut give = |start, end| start >= end || each(&[offset + start, offset + end]);
    for found in regex.find_iter(text) {
        let found = found.map_err(|error| error.to_string())?;
        if !give(done, found.start()) || !give(found.start(), found.end()) {
            return Ok(false);
        }
        done = found.end().max(done);
    }
    Ok(give(done, text.len()))
}

fn is_newline(text: &[u8], at: usize) -> bool {
    matches!(text.get(at), Some(b'\r' | b'\n'))
}

/// End of the run of `class` that goes on at `at`, of at most `most` characters.
fn run_end(text: &[u8], mut at: usize, class: u8, most: usize) -> usize {
    for _ in 0..most {
        if at >= text.len() {
            break;
        }
        let (next, size) = class_at(text, at);
        if next != class {
            break;
        }
        at += size;
    }
    at
}

/// End of the piece that starts at `start`, alternative by alternative.
fn cl100k_piece_end(text: &[u8], start: usize, tail: bool) -> usize {
    const ANY: usize = usize::MAX;
    if let Some(end) = contraction_end(text, start) {
        return end;
    }
    let (class, size) = class_at(text, start);
    let after = start + size;
    let next = if after < text.len() { class_at(text, after).0 } else { SPACE };
    match class {
        LETTER => return run_end(text, after, LETTER, ANY),
        NUMBER => return run_end(text, after, NUMBER, 2),
        _ if next == LETTER && !is_newline(text, start) => return run_end(text, after, LETTER, ANY),
        _ => {}
    }
    if class == OTHER || (text[start] == b' ' && next == OTHER) {
        let mut end = run_end(text, after, OTHER, ANY);
        while is_newline(text, end) {
            end += 1;
        }
        return end;
    }
    let end = run_end(text, after, SPACE, ANY);
    if tail && end == text.len() {
        return end;
    }
    if let Some(newline) = (start..end).rev().find(|&at| is_newline(text, at)) {
        return newline + 1;
    }
    if end == text.len() || end == after {
        return end;
    }
    (start..end).rev().find(|&at| text[at] & 0xC0 != 0x80).unwrap_or(end)
}

/// End of a contraction at `start`, in either case; U+017F (long s) is an s when case is ignored.
fn contraction_end(text: &[u8], start: usize) -> Option<usize> {
    if text[start] != b'\'' || start + 1 >= text.len() {
        return None;
    }
    if decode(text, start + 1) == (0x17F, 2) {
        return Some(start + 3);
    }
    let lower = |at: usize| text.get(at).map_or(0, u8::to_ascii_lowercase);
    match (lower(start + 1), lower(start + 2)) {
        (b's' | b'd' | b'm' | b't', _) => Some(start + 2),
        (b'l', b'l') | (b'v', b'e') | (b'r', b'e') => Some(start + 3),
        _ => None,
    }
}

#[cfg(test)]
#[path = "tests/pattern.rs"]
mod tests;
