//! The tokenizer's core: byte-level BPE, training and encoding. `python.rs` is the only file that knows Python.
//!
//! Training: `count` and `feed` (text → pre-tokens → counts, with `pattern`, `scan`, `specials`, `words`), then `train` (counts →
//! merges, with `queue` and `pairs`). Encoding: `encode`, with `cache`, `merge`, `ids` and `stream`.

pub mod cache;
pub mod count;
pub mod encode;
pub mod feed;
pub mod ids;
pub mod merge;
pub mod pairs;
pub mod pattern;
#[cfg(feature = "python")]
mod python;
pub mod queue;
pub mod scan;
pub mod specials;
pub mod stream;
pub mod train;
pub mod unicode;
mod unicode_ranges;
pub mod words;

#[cfg(test)]
#[path = "tests/fuzz.rs"]
mod fuzz;
