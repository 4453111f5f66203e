"""Check every kernel against a float64 truth and time most beside their peers, on one GPU, in about four minutes.

    python benchmarks/kernels_h200.py OUT [section ...]

Sections run each in a process of its own with a time limit, so a kernel that fails or hangs costs its section only.
OUT gets one JSON file a section; the table is printed last. It needs torch and Triton; the package is read from src/.
The cases: kernels_attention.py, kernels_rows.py.
"""

import subprocess
import sys
import time
from pathlib import Path

from kernels_timing import Section

CHECKS = {"attention_check": 7, "hopper_check": 4}
"""Section → processes over which its cases are dealt; all run at once, since most of their time is compiling."""
CHECK_SECONDS = 110
SECTIONS = {
    "attention_speed": 60, "hopper_speed": 60, "rows": 40, "loss": 40, "elementwise": 45, "optimizers": 45,
}  # fmt: skip
"""Section → seconds it may take; one after the other."""
STARTED = time.time()


def run_section(name: str, part: str, out: Path) -> None:
    import kernels_attention
    import kernels_rows
    import torch

    Section.part, Section.parts = (int(x) for x in part.split("/"))
    Section.path = out / f"{name}.{Section.part}.json"
    torch.manual_seed(0)
    module = kernels_attention if hasattr(kernels_attention, name) else kernels_rows
    getattr(module, name)()


def start(name: str, part: int, parts: int, out: Path) -> subprocess.Popen:
    command = [sys.executable, __file__, str(out), "--section", name, f"{part}/{parts}"]
    with (out / f"{name}.{part}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(name: str, process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(timeout=max(1.0, seconds))
        print(f"{time.time() - STARTED:5.0f} s  {name} ended with {process.returncode}", flush=True)
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"{time.time() - STARTED:5.0f} s  {name} ran out of time", flush=True)


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 5 and sys.argv[2] == "--section":
        return run_section(sys.argv[3], sys.argv[4], out)
    chosen = sys.argv[2:] or [*CHECKS, *SECTIONS]
    running = [
        (f"{name} {part}", start(name, part, CHECKS[name], out))
        for name in chosen
        if name in CHECKS
        for part in range(CHECKS[name])
    ]
    for name, process in running:
        finish(name, process, CHECK_SECONDS - (time.time() - STARTED))
    for name in chosen:
        if name in SECTIONS:
            finish(name, start(name, 0, 1, out), SECTIONS[name])
    print()
    for name in chosen:
        print(f"== {name}")
        for log in sorted(out.glob(f"{name}.*.log")):
            text = log.read_text(errors="replace")
            lines = [line[5:165] for line in text.splitlines() if line.startswith("case=")]
            print(*(lines or [f"nothing in {log.name}: {text[-500:]}"]), sep="\n")
    return None


if __name__ == "__main__":
    main()
