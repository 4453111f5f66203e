"""The tokenizer: training, encoding, decoding, files, beside its peers.

Timed is the work through a tool's Python API with reading the file; not timed are imports and loading a vocabulary. One
thread means pinned to one core. "first" is the first pass over the text with a new tokenizer, "warm" the better of two
more; "decode" starts from the ids that the tool's own encoder returned. Memory is the peak of anonymous memory above
the start, sampled every 5 ms. Processor time stands beside wall time: on a machine that others use, it is the fairer.
"""

import os
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from groundup.bench.benchmark import Benchmark, Measurement, SweepOptions, at_least, numbers, words
from groundup.bench.cells import Parameters
from groundup.data.embedded import write_embedded_corpus
from groundup.errors import UserError, optional_package
from groundup.tokenizer import END_OF_TEXT, Tokenizer, formats, training
from groundup.tokenizer.profile import Phases, anonymous_bytes

TASKS = {
    "train": ("groundup", "gigabpe", "tokenizers"),
    "count": ("groundup",),
    "encode": ("groundup", "gigatoken", "tiktoken"),
    "files": ("groundup", "gigatoken"),
}
"""What is measured, and the tools that can do it."""
THREADED = ("train", "count", "files")
MB = 1_000_000


@dataclass(frozen=True)
class Options(SweepOptions):
    task: str = ",".join(TASKS)
    """train; count (the scan and count of training alone); encode (one string, first pass and warm, and decode); files
    (`groundup tokenize`; gigatoken: its encoding of a file, into memory)."""
    tool: str = "groundup"
    """groundup; train: gigabpe, tokenizers; encode: gigatoken, tiktoken; files: gigatoken. Peers must be installed."""
    text: str = ""
    """Text files; empty: the source of Python's standard library."""
    max_bytes: int = 8_000_000
    """How much of the standard library's source."""
    vocab_size: str = "10000"
    """Sizes of the vocabularies to train."""
    tokenizer: str = ""
    """Directory or file of the vocabulary for encode and files; empty: trained on the text."""
    threads: str = "1,2"
    """Threads, for train, count and files."""
    steps: int = 5
    """Timed samples."""
    device: Literal["cpu"] = "cpu"
    """Where to measure: tokenizers run on processors."""
    seed: int = field(default=0, init=False)  # nothing here is random: no flag


def cells(options: Options) -> list[Parameters]:
    """Every combination that exists, the tools of one task next to each other."""
    at_least(options.steps, "--steps", 1)
    at_least(options.max_bytes, "--max-bytes", 1)
    tools = words(options.tool, "--tool", tuple(dict.fromkeys(tool for known in TASKS.values() for tool in known)))
    texts = [text.strip() for text in options.text.split(",") if text.strip()] or [""]
    for text in filter(None, texts):
        if not Path(text).is_file():
            raise UserError(f"--text: no such file: {text}")
    threads = numbers(options.threads, "--threads")
    return [
        {
            "task": task,
            "tool": tool,
            "text": text,
            "max_bytes": 0 if text else options.max_bytes,
            "vocab_size": vocab_size,
            "tokenizer": options.tokenizer if task in ("encode", "files") else "",
            "threads": count,
            "steps": options.steps,
            "device": options.device,
        }
        for task in words(options.task, "--task", tuple(TASKS))
        for text in texts
        for vocab_size in numbers(options.vocab_size, "--vocab-size", 257)
        for count in (threads if task in THREADED else [1])
        for tool in tools
        if tool in TASKS[task]
    ]


# One sample: a function that does the work once and returns seconds


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Wall and processor seconds of a call, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}, result


def with_memory(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call, and the peak of anonymous memory above its start."""
    before = anonymous_bytes()
    with Phases("all") as phases:
        row, _ = timed(work)
        phases.end("")
    return row | {"peak": float(max(0, phases.rows["all"]["peak_bytes"] - before))}


def _trainer(tool: str, path: Path, vocab_size: int, threads: int) -> Callable[[], Any]:
    if tool == "groundup":
        return lambda: Tokenizer.train([path], vocab_size, [END_OF_TEXT], threads=threads)
    peer = optional_package(tool, "this benchmark")
    if tool == "gigabpe":
        return lambda: peer.train_bpe([str(path)], vocab_size, special_tokens=[END_OF_TEXT], threads=threads)

    def train() -> None:
        tokenizer = peer.Tokenizer(peer.models.BPE())
        tokenizer.pre_tokenizer = peer.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = peer.pre_tokenizers.ByteLevel.alphabet()
        settings = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet, "show_progress": False}
        tokenizer.train([str(path)], peer.trainers.BpeTrainer(vocab_size=vocab_size, **settings))

    return train


def encode_sample(tool: str, path: Path, tokenizer: Tokenizer) -> dict[str, float]:
    """Seconds of the first pass, the better of two more, and of decoding."""
    encode, decode = _encoder(tool, tokenizer)
    first, ids = timed(lambda: encode(path))
    warm = min((timed(lambda: encode(path))[0] for _ in range(2)), key=lambda row: row["seconds"])
    plain = ids.tolist() if tool == "tiktoken" else ids
    back, _ = timed(lambda: decode(plain))
    named = {"first": first, "warm": warm, "decode": back}
    return {f"{name}_{key}": row[key] for name, row in named.items() for key in row} | {"tokens": float(len(ids))}


def _encoder(tool: str, tokenizer: Tokenizer) -> tuple[Callable[[Path], Any], Callable[[Any], str]]:
    """(path → ids, ids → text) of a new object of the tool with this vocabulary."""
    if tool == "groundup":
        ours = Tokenizer._from_parts(tokenizer._parts)
        return lambda path: ours.encode_numpy(path.read_bytes()), ours.decode
    if tool == "gigatoken":
        peer = _gigatoken(tokenizer)
        return lambda path: peer.encode(path.read_bytes()), peer.decode
    ranks = formats.token_ids(tokenizer._parts)
    peer = optional_package(tool, "this benchmark").Encoding(
        "benchmark",
        pat_str=formats.expression_of(tokenizer.pattern),
        mergeable_ranks=ranks,
        special_tokens=tokenizer.special_tokens,
    )
    return lambda path: peer.encode_to_numpy(path.read_bytes().decode(), allowed_special="all"), peer.decode


def _gigatoken(tokenizer: Tokenizer) -> Any:
    package = optional_package("gigatoken", "this benchmark")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_json(Path(folder) / "tokenizer.json")
        return package.Tokenizer(str(Path(folder) / "tokenizer.json"))


def files_sample(tool: str, path: Path, tokenizer: Tokenizer, threads: int) -> dict[str, float]:
    """Seconds and memory of a file's ids: ours on disk with offsets and checksums, gigatoken's in memory (with more
    than one thread: on as many as RAYON_NUM_THREADS says, else on all cores)."""
    from groundup.data import tokenize_corpus

    if tool == "gigatoken":
        peer = _gigatoken(tokenizer)
        source = optional_package(tool, "this benchmark").TextFileSource([path], separator=END_OF_TEXT)
        return with_memory(lambda: peer.encode_files(source, parallel=threads > 1))
    with tempfile.TemporaryDirectory() as folder:
        valid = Path(folder) / "valid.txt"
        valid.write_text("one document", "utf-8")
        return with_memory(lambda: tokenize_corpus([path], [valid], tokenizer, Path(folder) / "out", threads=threads))


def sample(task: str, tool: str, path: Path, vocab_size: int, threads: int, tokenizer: Tokenizer | None) -> dict:
    """One sample of a task, in this process."""
    with _pinned(threads):
        if task == "train":
            return with_memory(_trainer(tool, path, vocab_size, threads))
        if task == "count":
            options = training.Options([END_OF_TEXT], "gpt2", threads=threads)
            return with_memory(lambda: training.count_files([path], options))
        assert tokenizer is not None
        if task == "encode":
            return encode_sample(tool, path, tokenizer)
        return files_sample(tool, path, tokenizer, threads)


@contextmanager
def _pinned(threads: int) -> Generator[None]:
    """One thread: on one core."""
    if threads > 1 or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def vocabulary(name: str, path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer at `name`, or one that is trained on the text."""
    return Tokenizer.load(name) if name else Tokenizer.train([path], vocab_size, [END_OF_TEXT])


def run(parameters: Parameters, device: Any) -> Measurement:
    """Times, rates and memory of one task with one tool."""
    from groundup.bench.harness import summary

    task, tool = parameters["task"], parameters["tool"]
    size, threads = parameters["vocab_size"], parameters["threads"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(parameters["text"])
        if not parameters["text"]:
            path = Path(folder) / "library.txt"
            write_embedded_corpus(path, parameters["max_bytes"])
        tokenizer = vocabulary(parameters["tokenizer"], path, size) if task in ("encode", "files") else None
        megabytes = path.stat().st_size / MB
        samples = [sample(task, tool, path, size, threads, tokenizer) for _ in range(parameters["steps"])]
    metrics: dict[str, Any] = {"text_bytes": round(megabytes * MB)}
    for key in (key for key in samples[0] if key.endswith("seconds") and "cpu" not in key):
        name = key.removesuffix("seconds").rstrip("_") or task
        metrics[f"time.{name}"] = summary([1e3 * row[key] for row in samples])
        metrics[f"time.{name}_processor"] = summary(
            [1e3 * row[key.replace("seconds", "cpu_seconds")] for row in samples]
        )
        metrics[f"mb_per_second.{name}"] = megabytes * 1e3 / metrics[f"time.{name}"]["median"]
    if "peak" in samples[0]:
        metrics["memory.peak"] = round(max(row["peak"] for row in samples))
    if "tokens" in samples[0]:
        metrics["tokens"] = round(samples[0]["tokens"])
    return Measurement(metrics, {"dtype": "none", "grad_mode": "none", "method": "perf_counter"})


BENCHMARK = Benchmark(
    module=__name__,
    options=Options,
    cells=cells,
    run=run,
    group=lambda parameters: (parameters["task"], parameters["tool"], parameters["threads"]),
    columns={
        "train, ms": "time.train",
        "train, MB/s": "mb_per_second.train",
        "count, ms": "time.count",
        "first, MB/s": "mb_per_second.first",
        "warm, MB/s": "mb_per_second.warm",
        "decode, MB/s": "mb_per_second.decode",
        "files, MB/s": "mb_per_second.files",
        "peak memory": "memory.peak",
    },
    plot_x="threads",
    plot_y="mb_per_second.train",
)
