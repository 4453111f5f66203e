//! Special tokens: where they stand in a text. Plain strings, never patterns.
//!
//! The leftmost match wins; of several that start at one place, the longest (an Aho-Corasick automaton, so the cost does
//! not grow with their number).

use aho_corasick::{AhoCorasick, MatchKind};

#[derive(Default)]
pub struct Specials {
    finder: Option<AhoCorasick>,
    names: Vec<Vec<u8>>,
    longest: usize,
}

impl Specials {
    /// Empty names are ignored. The error says that the automaton would be too large.
    pub fn new(names: &[Vec<u8>]) -> Result<Self, String> {
        let names: Vec<Vec<u8>> = names.to_vec();
        let longest = names.iter().map(Vec::len).max().unwrap_or(0);
        if longest == 0 {
            return Ok(Specials { finder: None, names, longest });
        }
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&names);
        Ok(Specials { finder: Some(finder.map_err(|error| error.to_string())?), names, longest })
    }

    /// Length in bytes of the longest name; 0 without any.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Whether a name holds the byte.
    pub fn hold(&self, byte: u8) -> bool {
        self.names.iter().any(|name| name.contains(&byte))
    }

    /// Calls `ordinary(segment)` and `special(index)` in the order of the text. No segment is empty.
    pub fn split<'t, S>(
        &self,
        text: &'t [u8],
        state: &mut S,
        mut ordinary: impl FnMut(&mut S, &'t [u8]),
        mut special: impl FnMut(&mut S, usize),
    ) {
        let mut start = 0;
        if let Some(finder) = &self.finder {
            for found in finder.find_iter(text).filter(|found| !found.is_empty()) {
                if found.start() > start {
                    ordinary(state, &text[start..found.start()]);
                }
                special(state, found.pattern().as_usize());
                start = found.end();
            }
        }
        if start < text.len() {
            ordinary(state, &text[start..]);
        }
    }

    /// Whether `at` lies inside some occurrence of some name (chosen by the split or not).
    fn covers(&self, text: &[u8], at: usize) -> bool {
        self.names.iter().any(|name| {
            let first = (at + 1).saturating_sub(name.len());
            (first..at).any(|start| text[start..].starts_with(name))
        })
    }

    fn begins(&self, text: &[u8], at: usize) -> bool {
        self.names.iter().any(|name| !name.is_empty() && text[at..].starts_with(name))
    }

    /// Whether the text may be cut before `at` without changing anything: at a place that is safe for the pattern
    /// (`is_safe`) or where a special token begins, and in any case not inside one.
    pub fn is_cut(&self, text: &[u8], at: usize, is_safe: impl Fn(&[u8], usize) -> bool) -> bool {
        0 < at
            && at < text.len()
            && (is_safe(text, at) || (self.longest > 0 && self.begins(text, at)))
            && !self.covers(text, at)
    }
}

#[cfg(test)]
#[path = "tests/specials.rs"]
mod tests;
