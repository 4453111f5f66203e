//! From files to word counts, on all cores.
//!
//! Files are memory-mapped and cut into blocks at places where a cut changes nothing (`Specials::is_cut`), so the counts
//! do not depend on the number of threads or the size of the blocks. Each thread counts into a table of its own and adds
//! that to the one they share at the end, or before when it has grown to its share of the bound on memory: so whether the
//! words fit does not depend on the threads either. Cost: one pass over the text. Memory: one table a thread, and the sum.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use crate::pattern::{Cutter, Failure};
use crate::words::WordTable;

/// Why counting stopped.
#[derive(Debug)]
pub enum CountError {
    /// The file cannot be read: index of the file, reason.
    Unreadable(usize, String),
    /// Index of the file, byte offset of the block, and what is wrong there.
    Block(usize, u64, BlockError),
}

/// What is wrong with one block.
#[derive(Debug, PartialEq)]
pub enum BlockError {
    /// Offset of the first ill-formed UTF-8 sequence.
    IllFormed(usize),
    /// The pattern's engine gave up.
    Pattern(Failure),
    /// The table of words outgrew its bound.
    Full,
    /// A text that arrives in parts outgrew the bound before a place to cut it came.
    Uncut,
    Cancelled,
}

/// What to do about text that does not fit.
#[derive(Clone, Copy)]
pub struct Rules {
    /// Replace each ill-formed UTF-8 sequence by U+FFFD, as Python's `errors="replace"` does, and count them; or stop.
    pub replace: bool,
    /// Bound of the table of words, in bytes as `WordTable::weight` has them. The threads' own tables may add as much.
    pub most_bytes: usize,
    /// At the bound, forget the rarest words; or stop.
    pub prune: bool,
}

/// What the threads that count have in common.
pub struct Shared {
    pub cutter: Cutter,
    pub rules: Rules,
    pub threads: usize,
    /// Bound of one thread's table; the tables of several, grown once more, take about as much as the sum.
    share: usize,
    /// Bytes counted so far.
    pub done: AtomicU64,
    /// Setting it ends the work soon.
    pub cancel: AtomicBool,
    total: Mutex<Counted>,
}

/// Bound on memory that is worth a thread: below, its table would have to be added up all the time.
const BOUND_OF_A_THREAD: usize = if cfg!(test) { 1 } else { 1 << 20 };

impl Shared {
    /// `threads` or fewer of them count.
    pub fn new(cutter: Cutter, rules: Rules, threads: usize) -> Self {
        let threads = threads.min(rules.most_bytes / BOUND_OF_A_THREAD).max(1);
        let (done, cancel, total) = Default::default();
        Shared { cutter, rules, threads, share: rules.most_bytes / (2 * threads - 1), done, cancel, total }
    }

    /// What has been added up so far.
    pub fn total(&self) -> MutexGuard<'_, Counted> {
        self.total.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds up what one thread has counted, and holds the sum to its bound.
    pub fn take(&self, counted: &mut Counted) -> Result<(), BlockError> {
        let (counted, mut total) = (std::mem::take(counted), self.total());
        total.absorb(counted);
        if total.words.weight() > self.rules.most_bytes {
            if !self.rules.prune {
                return Err(BlockError::Full);
            }
            total.dropped += total.words.prune();
        }
        Ok(())
    }
}

/// Word counts of the text seen so far.
#[derive(Default)]
pub struct Counted {
    pub words: WordTable,
    /// Sequences replaced by U+FFFD.
    pub replaced: u64,
    pub bytes: u64,
    /// Occurrences of words that were forgotten at the bound.
    pub dropped: u64,
    /// Bytes that `Shared::done` does not know of yet.
    untold: usize,
}

/// Bytes after which a thread says how far it is, and looks whether it shall stop.
const TELL: usize = 1 << 16;

impl Counted {
    /// Counts the pre-tokens of one block of text.
    pub fn add_block(&mut self, block: &[u8], shared: &Shared) -> Result<(), BlockError> {
        self.bytes += block.len() as u64;
        match std::str::from_utf8(block) {
            Ok(_) => self.add_text(block, shared),
            Err(error) if !shared.rules.replace => Err(BlockError::IllFormed(error.valid_up_to())),
            Err(_) => {
                self.replaced += block.utf8_chunks().filter(|chunk| !chunk.invalid().is_empty()).count() as u64;
                self.add_text(String::from_utf8_lossy(block).as_bytes(), shared)
            }
        }
    }

    fn add_text(&mut self, text: &[u8], shared: &Shared) -> Result<(), BlockError> {
        let mut state = (self, Ok(()));
        let count = |(counted, result): &mut (&mut Counted, Result<(), BlockError>), segment: &[u8]| {
            let each = |bounds: &[usize]| {
                if result.is_ok() {
                    *result = counted.add_batch(segment, bounds, shared);
                }
                result.is_ok()
            };
            if let Err(failure) = shared.cutter.pattern.for_each_batch(segment, each) {
                *result = Err(BlockError::Pattern(failure));
            }
        };
        shared.cutter.specials.split(text, &mut state, count, |_, _| {});
        state.1
    }

    #[inline]
    fn add_batch(&mut self, text: &[u8], bounds: &[usize], shared: &Shared) -> Result<(), BlockError> {
        self.words.add_batch(text, bounds);
        self.untold += bounds[bounds.len() - 1] - bounds[0];
        if self.untold >= TELL {
            shared.done.fetch_add(std::mem::take(&mut self.untold) as u64, Ordering::Relaxed);
            if shared.cancel.load(Ordering::Relaxed) {
                return Err(BlockError::Cancelled);
            }
        }
        match self.words.weight() > shared.share {
            true => shared.take(self),
            false => Ok(()),
        }
    }

    fn absorb(&mut self, other: Counted) {
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

/// Files that are being counted.
struct Work<'a> {
    texts: &'a [memmap2::Mmap],
    /// (file, start, end) of every block.
    blocks: &'a [(usize, usize, usize)],
    next: AtomicUsize,
    /// The first block with which something is wrong: the later ones need not be looked at.
    failed: AtomicUsize,
}

impl Work<'_> {
    /// One thread's share, about `bytes` of text: blocks until none is left. The error is (file, start of the block,
    /// what is wrong).
    fn count(&self, shared: &Shared, bytes: usize) -> Result<(), (usize, usize, BlockError)> {
        let words = WordTable::for_text(bytes, shared.share / 8);
        let mut counted = Counted { words, ..Counted::default() };
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.blocks.len() || index > self.failed.load(Ordering::Relaxed) {
                return shared.take(&mut counted).map_err(|error| (usize::MAX, 0, error));
            }
            let (file, start, end) = self.blocks[index];
            if let Err(error) = counted.add_block(&self.texts[file][start..end], shared) {
                self.failed.fetch_min(index, Ordering::Relaxed);
                return Err((file, start, error));
            }
        }
    }
}

/// Size of a block in bytes: small enough to share work out, large enough for the cuts not to count.
const BLOCK: usize = 1 << 18;
/// Blocks that are worth a thread: each fills a table of its own with much the same words, and all are added up.
const WORTH_A_THREAD: usize = if cfg!(test) { 1 } else { 32 };

/// Counts the pre-tokens of whole files. All are mapped at once: the system allows some 65,000.
pub fn count_files(paths: &[PathBuf], shared: &Shared) -> Result<(), CountError> {
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
        for end in block_ends(text, BLOCK, &shared.cutter) {
            blocks.push((file, start, end));
            start = end;
        }
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let work = Work { texts: &texts, blocks: &blocks, next, failed };
    let used = shared.threads.min(blocks.len() / WORTH_A_THREAD).max(1);
    let results = on_threads(used, || work.count(shared, BLOCK * blocks.len() / used));
    match results.into_iter().filter_map(Result::err).min_by_key(|&(file, start, _)| (file, start)) {
        Some((file, start, error)) => Err(CountError::Block(*files.get(file).unwrap_or(&0), start as u64, error)),
        None => Ok(()),
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
