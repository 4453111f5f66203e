"""Check every kernel against a float64 truth and time most beside their peers, on the GPUs there are.

    python benchmarks/kernels_h200.py OUT [section ...] [--seconds 580] [--tiny]

Every section is a process of its own with a time limit, begun again after the case that ended it. Checks come first,
all at once, since most of their time is compiling; then every GPU times one section after the other. On two H200s about
five minutes. OUT/kernels.jsonl gets every row at once. A second call with the same OUT leaves out the cases that are
done; for another state of the kernels take another OUT. It needs torch and Triton; the package is read from src/.
--tiny tries the script on a CPU, in Triton's interpreter, which cuts bfloat16 off where a GPU rounds: some checks then
say ok=False.
The cases: kernels_attention*.py, kernels_rows.py, kernels_promises.py.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from gpu_jobs import append, exit_on_signals, gpus, read, start, stop

CHECKS = {"attention_check": 8, "hopper_check": 8, "repeats": 4}
"""Section → processes over which its cases are dealt."""
CHECK_SECONDS = 200
SECTIONS = {
    "hopper_speed": 100, "attention_speed": 180, "elementwise": 80, "loss": 45, "rows": 60, "optimizers": 60,
    "huge": 150,
}  # fmt: skip
"""Section → seconds it may take."""
MODULES = ("kernels_attention", "kernels_attention_speed", "kernels_rows", "kernels_promises")


@dataclass
class Part:
    """A process of a section; `rows`: how many the file held when it began."""

    name: str
    part: int
    gpu: str
    limit: float
    process: subprocess.Popen
    started: float
    rows: int


def run_section(name: str, part: int, path: Path, call: float) -> None:
    """In the section's own process."""
    import torch
    from kernels_timing import DEVICE, enter

    enter(name, part, CHECKS.get(name, 1), path, call)
    torch.manual_seed(0)
    if DEVICE == "cpu":
        torch.set_num_threads(1)
    next(found for m in MODULES if (found := getattr(import_module(m), name, None)))()


class Call:
    """Everything one call starts."""

    def __init__(self, out: Path, seconds: float, tiny: bool):
        self.path, self.began = out / "kernels.jsonl", time.time()
        self.end, self.tiny = self.began + seconds, tiny
        self.logs = Path(tempfile.mkdtemp(prefix="groundup-kernels-"))  # of OUT few files may come back
        self.running: list[Part] = []

    def begin(self, name: str, part: int, gpu: str, limit: float) -> None:
        command = [sys.executable, __file__, str(self.path), "--section", name, str(part), str(self.began)]
        variables = {"KERNELS_TINY": "1", "TRITON_INTERPRET": "1"} if self.tiny else {}
        now = time.time()
        limit *= 8 if self.tiny else 1
        process = start(command, gpu, self.logs / f"{name}.{part}.log", **variables)
        self.running.append(Part(name, part, gpu, min(limit, self.end - now), process, now, len(read(self.path))))

    def look(self) -> None:
        """Put an end to what is over; go on behind the case that ended a process."""
        for part in list(self.running):
            code, now = part.process.poll(), time.time()
            if code is None and now - part.started < part.limit:
                continue
            self.running.remove(part)
            stop(part.process)
            left = part.limit - (now - part.started)
            if code not in (0, None) and left > 5 and len(read(self.path)) > part.rows:
                self.begin(part.name, part.part, part.gpu, left)
                continue
            how = "out of time" if code is None else f"exit code {code}"
            if code != 0:
                tail = (self.logs / f"{part.name}.{part.part}.log").read_text(errors="replace")[-1500:]
                append(self.path, section=part.name, part=part.part, call=self.began, ended=how, tail=tail)
            print(f"{now - self.began:5.0f} s  {part.name} {part.part} on GPU {part.gpu}: {how}", flush=True)

    def work_through(self, chosen: list[str], on: list[str]) -> None:
        checks = [(name, part) for name in chosen if name in CHECKS for part in range(CHECKS[name])]
        timed = [name for name in chosen if name in SECTIONS]
        at_once = 2 if self.tiny else len(checks)
        while checks or timed or self.running:
            while checks and len(self.running) < at_once:
                name, part = checks.pop(0)
                self.begin(name, part, on[len(checks) % len(on)], CHECK_SECONDS)
            if not checks and not any(part.name in CHECKS for part in self.running):
                for gpu in on:
                    if timed and self.end - time.time() > 20 and all(part.gpu != gpu for part in self.running):
                        name = timed.pop(0)
                        self.begin(name, 0, gpu, SECTIONS[name])
            if self.end - time.time() <= 20:
                checks, timed = [], []
            time.sleep(0.1)
            self.look()


def shown(path: Path) -> None:
    """The table: the rows of each section, the failures last in it."""
    rows = [row for row in read(path) if "case" in row or "ended" in row]
    for name in dict.fromkeys(row["section"] for row in rows):
        print(f"\n== {name}")
        for row in sorted((row for row in rows if row["section"] == name), key=lambda row: "case" not in row):
            kept = {k: v for k, v in row.items() if k not in ("section", "call", "part", "tail")}
            print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in kept.items())[:170])
    bad = [row for row in rows if row.get("ok") is False or "FAILED" in row]
    print(f"\n{len(rows)} rows, {len(bad)} of them not ok or failed")


def main() -> None:
    if "--section" in sys.argv:
        path, _, name, part, call = sys.argv[1:]
        return run_section(name, int(part), Path(path), float(call))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("sections", nargs="*", help=", ".join([*CHECKS, *SECTIONS]))
    parser.add_argument("--seconds", type=float, default=580.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    chosen = options.sections or [*CHECKS, *SECTIONS]
    if unknown := [name for name in chosen if name not in CHECKS and name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}; there are {', '.join([*CHECKS, *SECTIONS])}")
    options.out.mkdir(parents=True, exist_ok=True)
    exit_on_signals()
    call = Call(options.out.resolve(), options.seconds, options.tiny)
    try:
        call.work_through(chosen, gpus())
    finally:
        for part in call.running:
            stop(part.process)
        shown(call.path)
    return None


if __name__ == "__main__":
    main()
