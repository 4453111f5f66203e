//! The Python face of the core: conversions, the GIL, signals. No algorithm.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyTypeError, PyUnicodeDecodeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString};

use crate::cache::Cache;
use crate::count::{count_files, on_threads, BlockError, CountError, Counted, Rules};
use crate::encode::{Ids, Model, Splitter, Stream, Width};
use crate::pattern::{Cutter, Failure};
use crate::train::{Ties, TrainError, Trainer};

/// How often a long computation looks for Ctrl-C and reports progress.
const TICK: Duration = Duration::from_millis(100);

/// Calls `progress(phase, done, total)` if there is one, and lets Python raise KeyboardInterrupt.
fn tick(progress: Option<&Py<PyAny>>, phase: &str, done: u64, total: u64) -> PyResult<()> {
    Python::attach(|py| {
        py.check_signals()?;
        progress.map_or(Ok(()), |call| call.call1(py, (phase, done, total)).map(|_| ()))
    })
}

/// The UTF-8 of a str (no copy) or the content of a bytes object.
fn text_of<'a>(text: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    if let Ok(text) = text.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes());
    }
    match text.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes()),
        Err(_) => Err(PyTypeError::new_err(format!("text must be str or bytes, not {}", text.get_type().name()?))),
    }
}

/// Word counts, gathered from files and from blocks of text.
#[pyclass]
struct WordCounter {
    cutter: Cutter,
    rules: Rules,
    counted: Counted,
    /// End of a text that goes on, from where it may be cut; what was counted of it so far, in bytes; and before how
    /// many bytes it is not worth looking for a cut (doubled after a vain search: linear in total).
    pending: Vec<u8>,
    fed: u64,
    patience: usize,
}

impl WordCounter {
    /// Counts the first `length` bytes of `pending`.
    fn count_pending(&mut self, py: Python<'_>, length: usize) -> PyResult<()> {
        let (cutter, rules, counted, pending) = (&self.cutter, self.rules, &mut self.counted, &self.pending);
        py.detach(|| counted.add_block(&pending[..length], cutter, rules))
            .map_err(|error| block_error(error, self.fed))?;
        self.pending.drain(..length);
        self.fed += length as u64;
        self.patience = 0;
        Ok(())
    }
}

#[pymethods]
impl WordCounter {
    /// `most_bytes`: bound of a table of words; at the bound `prune` forgets the rarest, otherwise MemoryError is raised.
    #[new]
    #[pyo3(signature = (specials, replace, pattern="gpt2", most_bytes=usize::MAX, prune=false))]
    fn new(specials: Vec<Vec<u8>>, replace: bool, pattern: &str, most_bytes: usize, prune: bool) -> PyResult<Self> {
        let cutter = Cutter::new(pattern, &specials).map_err(PyValueError::new_err)?;
        let rules = Rules { replace, most_bytes, prune };
        Ok(WordCounter { cutter, rules, counted: Counted::default(), pending: Vec::new(), fed: 0, patience: 0 })
    }

    /// Counts whole files. UnicodeDecodeError's `object` is the index of the file (as bytes) when one is not UTF-8.
    fn count_files(
        &mut self,
        py: Python<'_>,
        paths: Vec<PathBuf>,
        threads: usize,
        total: u64,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let (done, cancel) = (AtomicU64::new(0), AtomicBool::new(false));
        let (cutter, rules) = (&self.cutter, self.rules);
        let (result, raised) = py.detach(|| {
            std::thread::scope(|scope| {
                let (finished, wait) = channel();
                let (paths, done, cancel) = (&paths, &done, &cancel);
                let worker = scope.spawn(move || {
                    let result = count_files(paths, cutter, rules, threads, done, cancel);
                    let _ = finished.send(());
                    result
                });
                let mut raised = None;
                while let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(TICK) {
                    if raised.is_none() {
                        raised = tick(progress.as_ref(), "count", done.load(Ordering::Relaxed), total).err();
                        cancel.store(raised.is_some(), Ordering::Relaxed);
                    }
                }
                (worker.join(), raised)
            })
        });
        if let Some(error) = raised {
            return Err(error);
        }
        match result {
            Ok(Ok(counted)) => self.counted.absorb(counted),
            Ok(Err(CountError::IllFormed(file, offset))) => return Err(ill_formed(file, offset)),
            Ok(Err(CountError::Pattern(failure))) => return Err(PyValueError::new_err(failure)),
            Ok(Err(CountError::Full)) => return Err(block_error(BlockError::Full, 0)),
            Ok(Err(CountError::Unreadable(file, reason))) => {
                return Err(PyOSError::new_err(format!("{}: {reason}", paths[file].display())))
            }
            Ok(Err(CountError::Cancelled)) | Err(_) => return Err(PyValueError::new_err("counting was cancelled")),
        }
        if let Some(call) = &progress {
            call.call1(py, ("count", total, total))?;
        }
        Ok(())
    }

    /// Counts a part of a text that may go on.
    fn feed(&mut self, py: Python<'_>, part: &Bound<'_, PyAny>) -> PyResult<()> {
        self.pending.extend_from_slice(text_of(part)?);
        if self.pending.len() < self.patience {
            return Ok(());
        }
        match self.cutter.last_cut(&self.pending) {
            Some(at) => self.count_pending(py, at),
            None => {
                self.patience = self.pending.len() * 2;
                Ok(())
            }
        }
    }

    /// Counts a text.
    fn add_text(&mut self, py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<()> {
        self.feed(py, text)?;
        self.end_text(py)
    }

    /// Ends the text that was fed.
    fn end_text(&mut self, py: Python<'_>) -> PyResult<()> {
        self.count_pending(py, self.pending.len())?;
        self.fed = 0;
        Ok(())
    }

    /// Adds counts of finished words (pre-tokens).
    fn add_word(&mut self, word: &[u8], count: u64) {
        if !word.is_empty() {
            self.counted.words.add(word, 0, word.len(), count);
        }
    }

    /// (distinct words, bytes read, sequences replaced, occurrences forgotten)
    fn totals(&self) -> (usize, u64, u64, u64) {
        (self.counted.words.len(), self.counted.bytes, self.counted.replaced, self.counted.dropped)
    }

    /// All words and their counts, unordered.
    fn words<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyBytes>, u64)> {
        let mut found = Vec::with_capacity(self.counted.words.len());
        self.counted.words.for_each(|word, count| found.push((PyBytes::new(py, word), count)));
        found
    }

    /// Finds up to `wanted` merges; ties by Hugging Face's rule or to the greatest pair.
    #[pyo3(signature = (wanted, progress, hugging_face=false))]
    fn train<'py>(
        &self,
        py: Python<'py>,
        wanted: usize,
        progress: Option<Py<PyAny>>,
        hugging_face: bool,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let words = &self.counted.words;
        let ties = if hugging_face { Ties::HuggingFace } else { Ties::Greatest };
        let mut raised = None;
        let result = py.detach(|| {
            let mut last = Instant::now();
            Trainer::new(words, ties)?.run(wanted, &mut |done| {
                if last.elapsed() >= TICK {
                    last = Instant::now();
                    raised = tick(progress.as_ref(), "merge", done as u64, wanted as u64).err();
                }
                raised.is_none()
            })
        });
        match (raised, result) {
            (Some(error), _) => Err(error),
            (None, Ok(merges)) => {
                if let Some(call) = &progress {
                    call.call1(py, ("merge", merges.len(), wanted))?;
                }
                Ok(merges.iter().map(|(left, right)| (PyBytes::new(py, left), PyBytes::new(py, right))).collect())
            }
            (None, Err(TrainError::TooLarge)) => Err(PyValueError::new_err("more than 4e9 bytes of distinct words")),
            (None, Err(TrainError::Cancelled)) => Err(PyValueError::new_err("training was cancelled")),
        }
    }
}

fn block_error(error: BlockError, offset: u64) -> PyErr {
    match error {
        BlockError::IllFormed(at) => ill_formed(0, offset + at as u64),
        BlockError::Pattern(failure) => PyValueError::new_err(failure),
        BlockError::Full => PyMemoryError::new_err("the table of distinct words is full"),
    }
}

fn ill_formed(file: usize, offset: u64) -> PyErr {
    PyUnicodeDecodeError::new_err(("utf-8", file.to_string().into_bytes(), offset, offset + 1, "invalid UTF-8"))
}

/// A vocabulary with its merges. Every method may be called from any thread, and in forked children.
#[pyclass(frozen)]
struct Encoder {
    model: Model,
    splitter: Splitter,
    /// Caches at rest. A call takes one (or makes one) and gives it back, so no two threads share one.
    caches: Mutex<Vec<Cache>>,
}

/// Caches kept for later calls.
const CACHES: usize = 64;

impl Encoder {
    fn with_cache<R>(&self, work: impl FnOnce(&mut Cache) -> R) -> R {
        // `try_lock`: if a fork happened while another thread held the lock, it is never released in the child.
        let mut cache = self.caches.try_lock().ok().and_then(|mut caches| caches.pop()).unwrap_or_default();
        let result = work(&mut cache);
        if let Ok(mut caches) = self.caches.try_lock() {
            if caches.len() < CACHES {
                caches.push(cache);
            }
        }
        result
    }

    fn encode_text<T: Width>(&self, text: &[u8], specials: bool, cache: &mut Cache) -> Result<Vec<T>, Failure> {
        let mut ids = Ids::for_text(text.len());
        match specials {
            true => self.model.encode(text, &self.splitter, cache, &mut ids)?,
            false => self.model.encode_ordinary(text, &self.splitter, cache, &mut ids)?,
        }
        Ok(ids.into_vec())
    }

    fn bytes_of_ids<T: Copy + Into<u32> + Sync>(&self, py: Python<'_>, ids: &[T]) -> PyResult<Vec<u8>> {
        py.detach(|| self.model.decode(ids)).map_err(|id| PyValueError::new_err(id.to_string()))
    }

    fn bytes_of_array(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
        // Copies, so that nobody can change the ids while they are decoded without the lock.
        match PyBuffer::<u16>::get(ids) {
            Ok(narrow) => self.bytes_of_ids(py, &narrow.to_vec(py)?),
            Err(_) => self.bytes_of_ids(py, &PyBuffer::<u32>::get(ids)?.to_vec(py)?),
        }
    }

    fn encode_one<T: Width + Send>(&self, py: Python<'_>, text: &[u8], specials: bool) -> PyResult<Vec<T>> {
        py.detach(|| self.with_cache(|cache| self.encode_text(text, specials, cache))).map_err(PyValueError::new_err)
    }
}

/// The bytes of ids, in the machine's order.
fn bytes_of<T: Width>(ids: &[T]) -> &[u8] {
    // SAFETY: u16 and u32 (the only widths) have no padding, any byte is a valid u8, and the slice keeps its borrow.
    unsafe { std::slice::from_raw_parts(ids.as_ptr().cast(), std::mem::size_of_val(ids)) }
}

/// Texts of less than this many bytes in all are not worth a second thread.
const WORTH_A_THREAD: usize = 1 << 16;

#[pymethods]
impl Encoder {
    /// `tokens[id]`, merges as (left id, right id, rank), `merged[rank]` the id made, special tokens as (bytes, id). With
    /// `whole`, a piece that is a token is not merged.
    #[new]
    fn new(
        tokens: Vec<Option<Vec<u8>>>,
        merges: Vec<(u32, u32, u32)>,
        merged: Vec<u32>,
        specials: Vec<(Vec<u8>, u32)>,
        pattern: String,
        whole: bool,
    ) -> PyResult<Self> {
        let special_ids: Vec<u32> = specials.iter().map(|special| special.1).collect();
        let model = Model::new(&tokens, &merges, merged, &special_ids, whole).map_err(PyValueError::new_err)?;
        let names: Vec<Vec<u8>> = specials.into_iter().map(|special| special.0).collect();
        let cutter = Cutter::new(&pattern, &names).map_err(PyValueError::new_err)?;
        Ok(Encoder { model, splitter: Splitter { cutter, special_ids }, caches: Mutex::default() })
    }

    /// Without `specials`, special tokens are ordinary text; so in the methods below.
    fn encode<'py>(&self, py: Python<'py>, text: &Bound<'py, PyAny>, specials: bool) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.encode_one::<u32>(py, text_of(text)?, specials)?)
    }

    /// The ids as native-endian unsigned integers of 2 (`wide` false) or 4 bytes.
    fn encode_buffer<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        specials: bool,
        wide: bool,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let text = text_of(text)?;
        Ok(match wide {
            true => PyByteArray::new(py, bytes_of(&self.encode_one::<u32>(py, text, specials)?)),
            false => PyByteArray::new(py, bytes_of(&self.encode_one::<u16>(py, text, specials)?)),
        })
    }

    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<Bound<'py, PyAny>>,
        specials: bool,
        threads: usize,
    ) -> PyResult<Vec<Bound<'py, PyList>>> {
        let views: Vec<&[u8]> = texts.iter().map(text_of).collect::<PyResult<_>>()?;
        let size: usize = views.iter().map(|view| view.len()).sum();
        let threads = if size < WORTH_A_THREAD { 1 } else { threads.min(views.len()) };
        let next = AtomicUsize::new(0);
        let share = |cache: &mut Cache| {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(view) = views.get(index) else { return done };
                done.push((index, self.encode_text::<u32>(view, specials, cache)));
            }
        };
        let parts = py.detach(|| on_threads(threads, || self.with_cache(share)));
        let mut lists: Vec<Option<Bound<'py, PyList>>> = vec![None; texts.len()];
        for (index, ids) in parts.into_iter().flatten() {
            lists[index] = Some(PyList::new(py, ids.map_err(PyValueError::new_err)?)?);
        }
        Ok(lists.into_iter().flatten().collect())
    }

    /// The bytes of a list of ids. ValueError names the first unknown one.
    fn decode<'py>(&self, py: Python<'py>, ids: Vec<u32>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.bytes_of_ids(py, &ids)?))
    }

    /// The bytes of an array of u16 or u32.
    fn decode_array<'py>(&self, py: Python<'py>, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.bytes_of_array(py, ids)?))
    }

    /// The text of an array of u16 or u32, None if its bytes are not UTF-8.
    fn decode_text<'py>(&self, py: Python<'py>, ids: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyString>>> {
        let bytes = self.bytes_of_array(py, ids)?;
        Ok(std::str::from_utf8(&bytes).ok().map(|text| PyString::new(py, text)))
    }

    /// A new stream over this encoder.
    fn stream(slf: Py<Self>) -> EncoderStream {
        EncoderStream { encoder: slf, stream: Stream::default() }
    }
}

/// A text that arrives in parts.
#[pyclass]
struct EncoderStream {
    encoder: Py<Encoder>,
    stream: Stream,
}

#[pymethods]
impl EncoderStream {
    fn feed<'py>(&mut self, py: Python<'py>, part: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let (part, encoder, stream) = (text_of(part)?, self.encoder.get(), &mut self.stream);
        let mut ids = Ids::<u32>::default();
        py.detach(|| encoder.with_cache(|cache| stream.feed(&encoder.model, &encoder.splitter, part, cache, &mut ids)))
            .map_err(PyValueError::new_err)?;
        PyList::new(py, ids.into_vec())
    }

    fn finish<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (encoder, stream) = (self.encoder.get(), &mut self.stream);
        let mut ids = Ids::<u32>::default();
        py.detach(|| encoder.with_cache(|cache| stream.finish(&encoder.model, &encoder.splitter, cache, &mut ids)))
            .map_err(PyValueError::new_err)?;
        PyList::new(py, ids.into_vec())
    }
}

/// The pre-tokens of a text, as byte strings.
#[pyfunction]
#[pyo3(signature = (text, pattern="gpt2"))]
fn pre_tokens<'py>(py: Python<'py>, text: &Bound<'py, PyAny>, pattern: &str) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let (text, cutter) = (text_of(text)?, Cutter::new(pattern, &[]).map_err(PyValueError::new_err)?);
    let mut found = Vec::new();
    let each =
        |bounds: &[usize]| found.extend(bounds.windows(2).map(|piece| PyBytes::new(py, &text[piece[0]..piece[1]])));
    cutter.pattern.for_each_batch(text, each).map_err(PyValueError::new_err)?;
    Ok(found)
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<WordCounter>()?;
    module.add_class::<Encoder>()?;
    module.add_class::<EncoderStream>()?;
    module.add_function(wrap_pyfunction!(pre_tokens, module)?)
}
