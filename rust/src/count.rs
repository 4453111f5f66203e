//! From files to word counts, on all cores.
//!
//! Files are memory-mapped and cut into blocks at places where a cut changes nothing (`Specials::is_cut`), so the counts
//! do not depend on the number of threads or the size of the blocks. Each thread counts into its own table; the tables are
//! added up at the end. Cost: one pass over the text. Memory: one table a thread.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Builder;

use crate::pattern::{Cutter, Failure};
use crate::words::WordTable;

/// Why counting stopped.
#[derive(Debug)]
pub enum CountError {
    /// The file cannot be read: index of the file, reason.
    Unreadable(usize, String),
    /// Index of the file and byte offset of the first ill-formed UTF-8 sequence.
    IllFormed(usize, u64),
    /// The pattern's engine gave up.
    Pattern(Failure),
    /// The table of words outgrew its bound.
    Full,
    Cancelled,
}

/// What is wrong with one block.
#[derive(Debug, PartialEq)]
pub enum BlockError {
    /// Offset of the first ill-formed UTF-8 sequence.
    IllFormed(usize),
    Pattern(Failure),
    Full,
}

/// What to do about text that does not fit.
#[derive(Clone, Copy)]
pub struct Rules {
    /// Replace each ill-formed UTF-8 sequence by U+FFFD, as Python's `errors="replace"` does, and count them; or stop.
    pub replace: bool,
    /// Bound of one table of words, in bytes.
    pub most_bytes: usize,
    /// At the bound, forget the rarest words; or stop.
    pub prune: bool,
}

#[cfg(test)]
const STRICT: Rules = Rules { replace: false, most_bytes: usize::MAX, prune: false };

/// Word counts of the text seen so far.
#[derive(Default)]
pub struct Counted {
    pub words: WordTable,
    /// Sequences replaced by U+FFFD.
    pub replaced: u64,
    pub bytes: u64,
    /// Occurrences of words that were forgotten at the bound.
    pub dropped: u64,
}

impl Counted {
    /// Counts the pre-tokens of one block of text.
    pub fn add_block(&mut self, block: &[u8], cutter: &Cutter, rules: Rules) -> Result<(), BlockError> {
        self.bytes += block.len() as u64;
        match std::str::from_utf8(block) {
            Ok(_) => self.add_text(block, cutter, rules),
            Err(error) if !rules.replace => Err(BlockError::IllFormed(error.valid_up_to())),
            Err(_) => {
                self.replaced += block.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count() as u64;
                self.add_text(String::from_utf8_lossy(block).as_bytes(), cutter, rules)
            }
        }
    }

    fn add_text(&mut self, text: &[u8], cutter: &Cutter, rules: Rules) -> Result<(), BlockError> {
        let mut state = (self, Ok(()));
        cutter.specials.split(
            text,
            &mut state,
            |(counted, result), segment| {
                let done = cutter.pattern.for_each_batch(segment, |bounds| {
                    if result.is_ok() {
                        counted.words.add_batch(segment, bounds);
                        *result = counted.keep_within(rules.most_bytes, rules.prune);
                    }
                });
                if let Err(failure) = done {
                    *result = Err(BlockError::Pattern(failure));
                }
            },
            |_, _| {},
        );
        state.1
    }

    /// Holds the table to its bound.
    pub fn keep_within(&mut self, most_bytes: usize, prune: bool) -> Result<(), BlockError> {
        if self.words.bytes() > most_bytes {
            if !prune {
                return Err(BlockError::Full);
            }
            self.dropped += self.words.prune();
        }
        Ok(())
    }

    pub fn absorb(&mut self, other: Counted) {
        if self.words.is_empty() {
            self.words = other.words;
        } else {
            self.words.absorb(other.words);
        }
        self.replaced += other.replaced;
        self.bytes += other.bytes;
        self.dropped += other.dropped;
    }
}

/// Ends of the blocks of a text, each about `size` bytes long.
pub fn block_ends(text: &[u8], size: usize, cutter: &Cutter) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut start = 0;
    while start < text.len() {
        let end = (start + size.max(1)..text.len()).find(|&at| cutter.is_cut(text, at)).unwrap_or(text.len());
        ends.push(end);
        start = end;
    }
    ends
}

/// Everything the worker threads share.
struct Work<'a> {
    texts: &'a [memmap2::Mmap],
    /// (file, start, end) of every block.
    blocks: &'a [(usize, usize, usize)],
    next: AtomicUsize,
    done: &'a AtomicU64,
    cancel: &'a AtomicBool,
    /// Set when some block holds ill-formed UTF-8: the others need not be looked at, but for those before it.
    failed: AtomicUsize,
}

impl Work<'_> {
    /// One thread's share, about `bytes` of text: blocks until none is left. The error is (file, start of the block,
    /// what is wrong).
    fn count(&self, cutter: &Cutter, rules: Rules, bytes: usize) -> Result<Counted, (usize, usize, BlockError)> {
        let words = WordTable::for_text(bytes, rules.most_bytes / 2);
        let mut counted = Counted { words, ..Counted::default() };
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let needless = index >= self.blocks.len() || index > self.failed.load(Ordering::Relaxed);
            if needless || self.cancel.load(Ordering::Relaxed) {
                return Ok(counted);
            }
            let (file, start, end) = self.blocks[index];
            if let Err(error) = counted.add_block(&self.texts[file][start..end], cutter, rules) {
                self.failed.fetch_min(index, Ordering::Relaxed);
                return Err((file, start, error));
            }
            self.done.fetch_add((end - start) as u64, Ordering::Relaxed);
        }
    }
}

/// Size of a block in bytes: small enough to share work out, large enough for the cuts not to count.
const BLOCK: usize = 1 << 18;
/// Blocks that are worth a thread: each fills a table of its own with much the same words, and all are added up.
const WORTH_A_THREAD: usize = if cfg!(test) { 1 } else { 32 };

/// Counts the pre-tokens of whole files. `done` is raised by the bytes finished; setting `cancel` ends the work soon.
pub fn count_files(
    paths: &[PathBuf],
    cutter: &Cutter,
    rules: Rules,
    threads: usize,
    done: &AtomicU64,
    cancel: &AtomicBool,
) -> Result<Counted, CountError> {
    let mut texts = Vec::new();
    let mut files = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        let unreadable = |error: std::io::Error| CountError::Unreadable(index, error.to_string());
        let file = File::open(path).map_err(unreadable)?;
        if file.metadata().map_err(unreadable)?.len() > 0 {
            // SAFETY: the mapping is private and read-only. Another process that shortens the file meanwhile would end
            // this one with SIGBUS; every reader of memory-mapped files accepts that, and no memory of ours is at stake.
            texts.push(unsafe { memmap2::Mmap::map(&file) }.map_err(unreadable)?);
            files.push(index);
        }
    }
    let mut blocks = Vec::new();
    for (file, text) in texts.iter().enumerate() {
        let mut start = 0;
        for end in block_ends(text, BLOCK, cutter) {
            blocks.push((file, start, end));
            start = end;
        }
    }
    let work = Work {
        texts: &texts,
        blocks: &blocks,
        next: AtomicUsize::new(0),
        done,
        cancel,
        failed: AtomicUsize::new(usize::MAX),
    };
    let used = threads.min(blocks.len() / WORTH_A_THREAD).max(1);
    let results = on_threads(used, || work.count(cutter, rules, BLOCK * blocks.len() / used));
    if cancel.load(Ordering::Relaxed) {
        return Err(CountError::Cancelled);
    }
    let mut total = Counted::default();
    let mut errors = Vec::new();
    for result in results {
        match result {
            Ok(counted) => {
                total.absorb(counted);
                if let Err(error) = total.keep_within(rules.most_bytes.saturating_mul(threads), rules.prune) {
                    errors.push((files.len(), 0, error));
                }
            }
            Err(error) => errors.push(error),
        }
    }
    match errors.into_iter().min_by_key(|&(file, start, _)| (file, start)) {
        Some((file, start, BlockError::IllFormed(at))) => Err(CountError::IllFormed(files[file], (start + at) as u64)),
        Some((_, _, BlockError::Full)) => Err(CountError::Full),
        Some((_, _, BlockError::Pattern(failure))) => Err(CountError::Pattern(failure)),
        None => Ok(total),
    }
}

/// Runs `work` on `threads` threads, of which the caller's is one, and returns what each returned.
///
/// They live for this call only. A pool kept between calls would be dead in a forked child, which then waits for ever;
/// starting a thread costs some ten microseconds, which the callers' work outweighs a thousandfold.
pub fn on_threads<R: Send>(threads: usize, work: impl Fn() -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        // Where the system refuses a thread, the others do its work.
        let spawn = |_| Builder::new().spawn_scoped(scope, &work).ok();
        let others: Vec<_> = (1..threads).filter_map(spawn).collect();
        let mut results = vec![work()];
        for other in others {
            results.push(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        results
    })
}

#[cfg(test)]
#[path = "tests/count.rs"]
pub(crate) mod tests;
