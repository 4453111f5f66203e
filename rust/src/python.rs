//! The Python face of the core: conversions, the GIL, signals. No algorithm.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOSError, PyTypeError, PyUnicodeDecodeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString};

use crate::cache::Cache;
use crate::count::{count_files, on_threads, CountError, Counted, OnIllFormed};
use crate::encode::{Ids, Model, Stream, Width};
use crate::specials::Specials;
use crate::train::{TrainError, Trainer};

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
    specials: Specials,
    policy: OnIllFormed,
    counted: Counted,
}

#[pymethods]
impl WordCounter {
    #[new]
    fn new(specials: Vec<Vec<u8>>, replace: bool) -> PyResult<Self> {
        let policy = if replace { OnIllFormed::Replace } else { OnIllFormed::Stop };
        Ok(WordCounter {
            specials: Specials::new(&specials).map_err(PyValueError::new_err)?,
            policy,
            counted: Counted::default(),
        })
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
        let (specials, policy) = (&self.specials, self.policy);
        let (result, raised) = py.detach(|| {
            std::thread::scope(|scope| {
                let (finished, wait) = channel();
                let (paths, done, cancel) = (&paths, &done, &cancel);
                let worker = scope.spawn(move || {
                    let result = count_files(paths, specials, policy, threads, done, cancel);
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

    /// Counts one block of text; it must end where a cut changes nothing (at the end of a document).
    fn add_text(&mut self, py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = text_of(text)?;
        let (specials, policy, counted) = (&self.specials, self.policy, &mut self.counted);
        py.detach(|| counted.add_block(block, specials, policy)).map_err(|offset| ill_formed(0, offset as u64))
    }

    /// Adds counts of finished words (pre-tokens).
    fn add_word(&mut self, word: &[u8], count: u64) {
        if !word.is_empty() {
            self.counted.words.add(word, 0, word.len(), count);
        }
    }

    /// (distinct words, bytes read, sequences replaced)
    fn totals(&self) -> (usize, u64, u64) {
        (self.counted.words.len(), self.counted.bytes, self.counted.replaced)
    }

    /// All words and their counts, unordered.
    fn words<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyBytes>, u64)> {
        let mut found = Vec::with_capacity(self.counted.words.len());
        self.counted.words.for_each(|word, count| found.push((PyBytes::new(py, word), count)));
        found
    }

    /// Finds up to `wanted` merges.
    fn train<'py>(
        &self,
        py: Python<'py>,
        wanted: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let words = &self.counted.words;
        let mut raised = None;
        let result = py.detach(|| {
            let mut last = Instant::now();
            Trainer::new(words)?.run(wanted, &mut |done| {
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

fn ill_formed(file: usize, offset: u64) -> PyErr {
    PyUnicodeDecodeError::new_err(("utf-8", file.to_string().into_bytes(), offset, offset + 1, "invalid UTF-8"))
}

/// A vocabulary with its merges. Every method may be called from any thread, and in forked children.
#[pyclass(frozen)]
struct Encoder {
    model: Model,
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

    fn encode_text<T: Width>(&self, text: &[u8], specials: bool) -> Vec<T> {
        self.with_cache(|cache| {
            let mut ids = Ids::for_text(text.len());
            self.model.encode(text, specials, cache, &mut ids);
            ids.into_vec()
        })
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
    /// `tokens[id]`, merges as (left, right, merged) ids by rank, special tokens as (bytes, id).
    #[new]
    fn new(
        tokens: Vec<Option<Vec<u8>>>,
        merges: Vec<(u32, u32, u32)>,
        specials: Vec<(Vec<u8>, u32)>,
    ) -> PyResult<Self> {
        let model = Model::new(&tokens, &merges, &specials).map_err(PyValueError::new_err)?;
        Ok(Encoder { model, caches: Mutex::default() })
    }

    fn encode<'py>(&self, py: Python<'py>, text: &Bound<'py, PyAny>, specials: bool) -> PyResult<Bound<'py, PyList>> {
        let text = text_of(text)?;
        let ids: Vec<u32> = py.detach(|| self.encode_text(text, specials));
        PyList::new(py, ids)
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
        if wide {
            let ids: Vec<u32> = py.detach(|| self.encode_text(text, specials));
            return Ok(PyByteArray::new(py, bytes_of(&ids)));
        }
        let ids: Vec<u16> = py.detach(|| self.encode_text(text, specials));
        Ok(PyByteArray::new(py, bytes_of(&ids)))
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
        let parts = py.detach(|| {
            let next = AtomicUsize::new(0);
            on_threads(threads, || {
                self.with_cache(|cache| {
                    let mut done = Vec::new();
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(view) = views.get(index) else { return done };
                        let mut ids = Ids::<u32>::for_text(view.len());
                        self.model.encode(view, specials, cache, &mut ids);
                        done.push((index, ids.into_vec()));
                    }
                })
            })
        });
        let mut lists: Vec<Option<Bound<'py, PyList>>> = vec![None; texts.len()];
        for (index, ids) in parts.into_iter().flatten() {
            lists[index] = Some(PyList::new(py, ids)?);
        }
        Ok(lists.into_iter().flatten().collect())
    }

    /// The bytes of a list of ids.
    fn decode<'py>(&self, py: Python<'py>, ids: Vec<u64>) -> PyResult<Bound<'py, PyBytes>> {
        let mut out = Vec::with_capacity(ids.len() * 4);
        match py.detach(|| self.model.decode(ids.into_iter(), &mut out)) {
            Ok(()) => Ok(PyBytes::new(py, &out)),
            Err(id) => Err(PyValueError::new_err(format!("{id}"))),
        }
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
        py.detach(|| encoder.with_cache(|cache| stream.feed(&encoder.model, part, cache, &mut ids)));
        PyList::new(py, ids.into_vec())
    }

    fn finish<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let (encoder, stream) = (self.encoder.get(), &mut self.stream);
        let mut ids = Ids::<u32>::default();
        py.detach(|| encoder.with_cache(|cache| stream.finish(&encoder.model, cache, &mut ids)));
        PyList::new(py, ids.into_vec())
    }
}

/// The pre-tokens of a text, as byte strings.
#[pyfunction]
fn pre_tokens<'py>(py: Python<'py>, text: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let text = text_of(text)?;
    let mut found = Vec::new();
    crate::scan::for_each_piece(text, |start, end| found.push(PyBytes::new(py, &text[start..end])));
    Ok(found)
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<WordCounter>()?;
    module.add_class::<Encoder>()?;
    module.add_class::<EncoderStream>()?;
    module.add_function(wrap_pyfunction!(pre_tokens, module)?)
}
