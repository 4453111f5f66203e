//! Counting text that arrives in parts (unpacked files, iterators), on several threads.
//!
//! Whoever feeds gathers about a megabyte, cuts it where a cut changes nothing and hands it to the next free thread; each
//! thread counts into a table of its own, and the tables are added up (`count`). So unpacking and counting overlap,
//! and the counts depend neither on the number of threads nor on the parts. In flight are two blocks a thread.

use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::count::{BlockError, Counted, Shared};

/// Bytes worth handing over, for text of any kind.
pub const BLOCK: usize = 1 << 20;

/// Byte offset of a block within its text, and what is wrong with it.
pub type FeedError = (u64, BlockError);

/// Texts, or parts of them, end to end.
struct Block {
    number: usize,
    text: Vec<u8>,
    /// Where texts end; the last may go on.
    ends: Vec<usize>,
    /// Place of the first byte within its text.
    offset: u64,
}

impl Block {
    fn count(&self, shared: &Shared, counted: &mut Counted) -> Result<(), FeedError> {
        let (mut start, mut offset) = (0, self.offset);
        for &end in self.ends.iter().chain([&self.text.len()]) {
            counted.add_block(&self.text[start..end], shared).map_err(|error| (offset, error))?;
            (start, offset) = (end, 0);
        }
        Ok(())
    }
}

/// The first block that failed, by number.
type Failed = Option<(usize, FeedError)>;

/// The threads, and what went wrong there.
struct Pool {
    send: SyncSender<Block>,
    threads: Vec<JoinHandle<()>>,
    failed: Arc<Mutex<Failed>>,
}

impl Pool {
    fn start(shared: &Arc<Shared>) -> Self {
        let (send, receive) = sync_channel::<Block>(shared.threads);
        let (receive, failed) = (Arc::new(Mutex::new(receive)), Arc::default());
        let threads = (0..shared.threads)
            .map(|_| {
                let (receive, failed, shared) = (Arc::clone(&receive), Arc::clone(&failed), Arc::clone(shared));
                std::thread::spawn(move || work(&receive, &failed, &shared))
            })
            .collect();
        Pool { send, threads, failed }
    }
}

fn work(receive: &Mutex<Receiver<Block>>, failed: &Mutex<Failed>, shared: &Shared) {
    let mut counted = Counted::default();
    let fail = |number, error| {
        if let Ok(mut failed) = failed.lock() {
            if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                *failed = Some((number, error));
            }
        }
    };
    loop {
        let received = receive.lock().map(|receive| receive.recv());
        let Ok(Ok(block)) = received else { break };
        if let Err(error) = block.count(shared, &mut counted) {
            fail(block.number, error);
        }
    }
    if let Err(error) = shared.take(&mut counted) {
        fail(usize::MAX, (0, error));
    }
}

pub struct Feeder {
    shared: Arc<Shared>,
    /// Bytes worth handing over.
    block: usize,
    pool: Option<Pool>,
    /// What was counted here.
    counted: Counted,
    /// The block that is being filled.
    text: Vec<u8>,
    ends: Vec<usize>,
    offset: u64,
    number: usize,
    /// Not worth looking for a cut before the last text has so many bytes (doubled after a vain search: linear in total).
    patience: usize,
}

impl Feeder {
    pub fn new(shared: Arc<Shared>, block: usize) -> Self {
        let (counted, text, ends) = Default::default();
        Feeder { shared, block, pool: None, counted, text, ends, offset: 0, number: 0, patience: block }
    }

    /// Takes a part of a text that may go on. After an error, `finish` says which.
    pub fn feed(&mut self, part: &[u8]) -> Result<(), FeedError> {
        part.chunks(self.block).try_for_each(|part| self.feed_some(part))
    }

    fn feed_some(&mut self, part: &[u8]) -> Result<(), FeedError> {
        self.text.extend_from_slice(part);
        let start = self.ends.last().copied().unwrap_or(0);
        let length = self.text.len() - start;
        if length < self.patience {
            return Ok(());
        }
        match self.shared.cutter.last_cut(&self.text[start..]) {
            Some(at) => self.hand_over(start + at),
            None if length > self.shared.rules.most_bytes => Err((0, BlockError::Uncut)),
            None => {
                self.patience = length * 2;
                Ok(())
            }
        }
    }

    /// Ends the text that was fed.
    pub fn end_text(&mut self) -> Result<(), FeedError> {
        self.ends.push(self.text.len());
        self.patience = self.block;
        match self.text.len() < self.block {
            true => Ok(()),
            false => self.hand_over(self.text.len()),
        }
    }

    /// The first `length` bytes to the next free thread; with one thread they are counted here, but for a text so long that
    /// whoever feeds should see signals meanwhile.
    fn hand_over(&mut self, length: usize) -> Result<(), FeedError> {
        let rest = self.text.split_off(length);
        let (text, ends) = (std::mem::replace(&mut self.text, rest), std::mem::take(&mut self.ends));
        let last = ends.last().copied();
        let block = Block { number: self.number, text, ends, offset: self.offset };
        self.offset = last.map_or(self.offset + length as u64, |end| (length - end) as u64);
        (self.number, self.patience) = (self.number + 1, self.block);
        if self.shared.threads < 2 && self.pool.is_none() && length <= 4 * self.block {
            return block.count(&self.shared, &mut self.counted);
        }
        let pool = self.pool.get_or_insert_with(|| Pool::start(&self.shared));
        let fine = pool.failed.lock().is_ok_and(|failed| failed.is_none()) && pool.send.send(block).is_ok();
        match fine {
            true => Ok(()),
            false => self.finish(),
        }
    }

    /// Counts what is left and waits for the threads. The error is that of the first block that failed.
    pub fn finish(&mut self) -> Result<(), FeedError> {
        let mut result = Ok(());
        if let Some(Pool { send, threads, failed }) = self.pool.take() {
            drop(send);
            for thread in threads {
                if thread.join().is_err() {
                    result = Err((0, BlockError::Pattern("a thread panicked".into())));
                }
            }
            if let Ok(Some((_, error))) = failed.lock().map(|mut failed| failed.take()) {
                result = Err(error);
            }
        }
        let (text, ends) = (std::mem::take(&mut self.text), std::mem::take(&mut self.ends));
        let rest = Block { number: self.number, text, ends, offset: self.offset };
        self.offset = 0;
        result?;
        rest.count(&self.shared, &mut self.counted)?;
        self.shared.take(&mut self.counted).map_err(|error| (0, error))
    }
}
