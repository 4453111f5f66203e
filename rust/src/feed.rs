//! Counting text that arrives in parts (unpacked files, iterators), on several threads.
//!
//! Whoever feeds gathers about a megabyte, cuts it where a cut changes nothing and hands it to the next free thread; each
//! thread counts into a table of its own, and the tables are added up at the end. So unpacking and counting overlap,
//! and the counts depend neither on the number of threads nor on the parts. In flight are two blocks a thread.

use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::count::{BlockError, Counted, Rules};
use crate::pattern::Cutter;

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
    fn count(&self, cutter: &Cutter, rules: Rules, counted: &mut Counted) -> Result<(), FeedError> {
        let (mut start, mut offset) = (0, self.offset);
        for &end in self.ends.iter().chain([&self.text.len()]) {
            counted.add_block(&self.text[start..end], cutter, rules).map_err(|error| (offset, error))?;
            (start, offset) = (end, 0);
        }
        Ok(())
    }
}

/// The threads, and the first block (by number) that failed.
struct Pool {
    send: SyncSender<Block>,
    threads: Vec<JoinHandle<Counted>>,
    failed: Arc<Mutex<Option<(usize, FeedError)>>>,
}

impl Pool {
    fn start(threads: usize, cutter: &Arc<Cutter>, rules: Rules) -> Self {
        let (send, receive) = sync_channel::<Block>(threads);
        let (receive, failed) = (Arc::new(Mutex::new(receive)), Arc::default());
        let threads = (0..threads)
            .map(|_| {
                let (receive, failed, cutter) = (Arc::clone(&receive), Arc::clone(&failed), Arc::clone(cutter));
                std::thread::spawn(move || work(&receive, &failed, &cutter, rules))
            })
            .collect();
        Pool { send, threads, failed }
    }
}

fn work(
    receive: &Mutex<Receiver<Block>>,
    failed: &Mutex<Option<(usize, FeedError)>>,
    cutter: &Cutter,
    rules: Rules,
) -> Counted {
    let mut counted = Counted::default();
    loop {
        let block = match receive.lock() {
            Ok(receive) => receive.recv(),
            Err(_) => return counted,
        };
        let Ok(block) = block else { return counted };
        if let (Err(error), Ok(mut failed)) = (block.count(cutter, rules, &mut counted), failed.lock()) {
            if failed.as_ref().is_none_or(|(number, _)| block.number < *number) {
                *failed = Some((block.number, error));
            }
        }
    }
}

pub struct Feeder {
    cutter: Arc<Cutter>,
    rules: Rules,
    threads: usize,
    /// Bytes worth handing over.
    block: usize,
    pool: Option<Pool>,
    /// The block that is being filled.
    text: Vec<u8>,
    ends: Vec<usize>,
    offset: u64,
    number: usize,
    /// Not worth looking for a cut before the last text has so many bytes (doubled after a vain search: linear in total).
    patience: usize,
}

impl Feeder {
    pub fn new(cutter: Arc<Cutter>, rules: Rules, threads: usize, block: usize) -> Self {
        let (text, ends) = (Vec::new(), Vec::new());
        Feeder { cutter, rules, threads, block, pool: None, text, ends, offset: 0, number: 0, patience: block }
    }

    /// Takes a part of a text that may go on. After an error, `finish` says which.
    pub fn feed(&mut self, part: &[u8], counted: &mut Counted) -> Result<(), FeedError> {
        self.text.extend_from_slice(part);
        let start = self.ends.last().copied().unwrap_or(0);
        if self.text.len() - start < self.patience {
            return Ok(());
        }
        match self.cutter.last_cut(&self.text[start..]) {
            Some(at) => self.hand_over(start + at, counted),
            None => {
                self.patience = (self.text.len() - start) * 2;
                Ok(())
            }
        }
    }

    /// Ends the text that was fed.
    pub fn end_text(&mut self, counted: &mut Counted) -> Result<(), FeedError> {
        self.ends.push(self.text.len());
        self.patience = self.block;
        match self.text.len() < self.block {
            true => Ok(()),
            false => self.hand_over(self.text.len(), counted),
        }
    }

    /// The first `length` bytes to the next free thread, or counted here if there is but one.
    fn hand_over(&mut self, length: usize, counted: &mut Counted) -> Result<(), FeedError> {
        let rest = self.text.split_off(length);
        let (text, ends) = (std::mem::replace(&mut self.text, rest), std::mem::take(&mut self.ends));
        let last = ends.last().copied();
        let block = Block { number: self.number, text, ends, offset: self.offset };
        self.offset = last.map_or(self.offset + length as u64, |end| (length - end) as u64);
        (self.number, self.patience) = (self.number + 1, self.block);
        if self.threads < 2 {
            return block.count(&self.cutter, self.rules, counted);
        }
        let pool = self.pool.get_or_insert_with(|| Pool::start(self.threads, &self.cutter, self.rules));
        let fine = pool.failed.lock().is_ok_and(|failed| failed.is_none()) && pool.send.send(block).is_ok();
        match fine {
            true => Ok(()),
            false => self.finish(counted),
        }
    }

    /// Counts what is left and waits for the threads. The error is that of the first block that failed.
    pub fn finish(&mut self, counted: &mut Counted) -> Result<(), FeedError> {
        let mut result = Ok(());
        if let Some(Pool { send, threads, failed }) = self.pool.take() {
            drop(send);
            for thread in threads {
                match thread.join() {
                    Ok(other) => counted.absorb(other),
                    Err(_) => result = Err((0, BlockError::Pattern("a thread panicked".into()))),
                }
            }
            if let Ok(Some((_, error))) = failed.lock().map(|mut failed| failed.take()) {
                result = Err(error);
            }
            let most = self.rules.most_bytes.saturating_mul(self.threads);
            result = result.and_then(|()| counted.keep_within(most, self.rules.prune).map_err(|error| (0, error)));
        }
        let (text, ends) = (std::mem::take(&mut self.text), std::mem::take(&mut self.ends));
        let rest = Block { number: self.number, text, ends, offset: self.offset };
        self.offset = 0;
        result.and_then(|()| rest.count(&self.cutter, self.rules, counted))
    }
}
