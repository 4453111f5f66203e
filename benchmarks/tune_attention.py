"""Measure tile sizes of the plain Triton attention on these GPUs and write the best into flash_tiles.json.

    python benchmarks/tune_attention.py ROWS [--bits 16,32] [--width 64,128,256] [--kernel forward,keys,queries]
                                             [--seconds 580] [--jobs 16] [--write [TABLE]]

Every candidate runs in a process of its own, for a tile that the compiler gets wrong can spoil a whole process: first
against float64, then the clock. They compile side by side and take turns on a GPU. ROWS, a file of JSON lines, gets
each as it is measured; a second call goes on, and with `--seconds 0 --write` only chooses. The table's own tiles are
measured first. A line of the table keeps the fastest candidate and, for GPUs with less shared memory, up to two smaller
ones.
"""

import argparse
import fcntl
import json
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from gpu_jobs import ROOT, append, exit_on_signals, gpus, read, start, stop

TABLE = ROOT / "src" / "groundup" / "kernels" / "flash_tiles.json"
SHAPES = {64: (4, 16, 4096), 128: (4, 16, 4096), 256: (1, 8, 4096)}
"""Width → batch, heads, sequence of the timed problem."""
OTHERS = {64: [(16, 16, 1024)], 128: [(16, 16, 1024), (1, 16, 16384)], 256: []}
"""Width → problems that are timed as well: does the best tile depend on the length?"""
TOLERANCE = {16: 1e-2, 32: 2e-6}


CANDIDATE_SECONDS = 120


def candidates(kernel: str, bits: int, width: int) -> list[list]:
    """[block_q, block_k, warps, stages] that fit in shared memory and give every warp a fair piece, after the
    tiles that the table has now."""
    found = json.loads(TABLE.read_text())[kernel][str(bits)][str(width)]
    blocks = (16, 32, 64) if width == 256 and bits == 32 else (32, 64, 128)
    for q, k, warps, stages in product(blocks, blocks, (4, 8), (1, 2, 3) if bits == 16 else (1, 2)):
        held = (q + 2 * stages * k) * width * bits // 8
        if held < 200_000 and warps * 256 <= q * k <= warps * 2048:
            found += [tile] if (tile := [q, k, warps, stages]) not in found else []
    return found


def measure(kernel: str, bits: int, width: int, tile: list) -> dict:
    """Largest relative error and milliseconds of one tile."""
    import torch
    import triton

    from groundup.kernels import flash_triton as flash
    from groundup.kernels.attention import reference

    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    usual = flash.pick_tile
    flash.pick_tile = lambda name, *rest: flash.Tile(*tile) if name == kernel else usual(name, *rest)
    rule = flash.Rule(True, 0, 0.0, width**-0.5)

    def problem(batch, heads, n):
        q, k, v, d_out = (torch.randn(batch, heads, n, width, device="cuda").to(dtype) for _ in range(4))
        out, lse = flash.attention_forward(q, k, v, rule)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        fixed = flash.constants(rule, q, k, v)
        runs = {
            "forward": lambda: flash.attention_forward(q, k, v, rule),
            "queries": lambda: flash.launch_queries((q, k, v, d_out), out, (lse, None), grads[0], rule, fixed),
            "keys": lambda: flash.launch_keys((q, k, v, d_out), (grads[1], grads[2]), rows, rule, fixed),
        }
        rows = runs["queries"]()
        return (q, k, v, d_out), out, grads, runs[kernel]

    tensors, out, grads, run = problem(1, 2, 520)
    run()
    torch.cuda.synchronize()
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    truth = reference(*leaves, rule, None)[0]
    true_grads = torch.autograd.grad(truth, leaves, tensors[3].double())
    pairs = {"forward": [(out, truth.detach())], "queries": [(grads[0], true_grads[0])]}
    pairs["keys"] = [(grads[1], true_grads[1]), (grads[2], true_grads[2])]
    error = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs[kernel])
    problem(1, 2, 512)[3]()  # compiled for lengths that 16 divides, before anybody waits for this process
    torch.cuda.synchronize()
    lock_name = f"tune_attention.{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock"
    with (Path(tempfile.gettempdir()) / lock_name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {}
        for shape in (SHAPES[width], *OTHERS[width]):
            run = problem(*shape)[3]
            run()
            torch.cuda.synchronize()
            found[shape[2]] = triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")
    return {"error": error, "ms": found.pop(SHAPES[width][2]), "others": found}


def work_through(path: Path, jobs: list[tuple], at_once: int, seconds: float) -> None:
    """Measure every job (kernel, bits, width, tile) that `path` has no row of, `at_once` at a time."""
    known = [key_of(row) for row in read(path)]
    waiting = [job for job in jobs if job not in known]
    print(f"{len(jobs)} candidates, {len(waiting)} to measure", flush=True)
    end, running, started, on = time.time() + seconds, [], 0, gpus()
    logs = Path(tempfile.mkdtemp(prefix="groundup-tune-"))
    try:
        while waiting or running:
            while waiting and len(running) < at_once and time.time() < end - 30:
                job, log, started = waiting.pop(0), logs / f"{started}.log", started + 1
                command = [sys.executable, __file__, str(path), "--one", json.dumps(job)]
                process = start(command, on[started % len(on)], log)
                running.append((job, process, log, min(time.time() + CANDIDATE_SECONDS, end)))
            if not running:
                break
            time.sleep(0.05)
            for one in list(running):
                job, process, log, until = one
                if (code := process.poll()) is None and time.time() < until:
                    continue
                stop(process)
                running.remove(one)
                late = code is None and time.time() >= end
                if code != 0 and not late:  # a candidate that only the end of the call stopped is measured in the next
                    last = log.read_text(errors="replace").strip().splitlines()[-1:]
                    how = f"over {CANDIDATE_SECONDS} s" if code is None else f"exit code {code}"
                    append(path, **row_of(job), failed=how, last=last)
    finally:
        for _, process, *_ in running:
            stop(process)


def row_of(job: tuple) -> dict:
    return dict(zip(("kernel", "bits", "width", "tile"), job, strict=True))


def key_of(row: dict) -> tuple:
    return row["kernel"], row["bits"], row["width"], row["tile"]


def chosen(rows: list[dict], table: dict) -> dict:
    """`table` with the best of the rows; says which those are."""
    for kernel, bits, width in dict.fromkeys((r["kernel"], r["bits"], r["width"]) for r in rows):
        mine = [r for r in rows if (r["kernel"], r["bits"], r["width"]) == (kernel, bits, width)]
        right = sorted((r for r in mine if r.get("error", 1) < TOLERANCE[bits]), key=lambda r: r["ms"])
        print(f"{kernel} {bits} bits, width {width}: {len(right)} of {len(mine)} right")
        for row in right[:5]:
            print(f"  {row['tile']}  {row['ms']:.3f} ms  error {row['error']:.1e}")
        if right:
            best = right[0]["tile"]
            smaller = [r["tile"] for r in right[1:] if r["tile"][0] * r["tile"][1] < best[0] * best[1]][:2]
            table[kernel][str(bits)][str(width)] = [best, *smaller]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--bits", default="16,32")
    parser.add_argument("--width", default="64,128,256")
    parser.add_argument("--kernel", default="forward,keys,queries")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile side by side")
    parser.add_argument("--seconds", type=float, default=580.0)
    parser.add_argument(
        "--write", nargs="?", type=Path, const=TABLE, help="write the best tiles, by default into the package"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        job = json.loads(options.one)
        append(options.rows, **row_of(job), **measure(*job))
        return
    jobs = [
        (kernel, int(bits), int(width), tile)
        for kernel in options.kernel.split(",")
        for bits in options.bits.split(",")
        for width in options.width.split(",")
        for tile in candidates(kernel, int(bits), int(width))
    ]
    exit_on_signals()
    try:
        work_through(options.rows.resolve(), jobs, options.jobs, options.seconds)
    finally:
        table = chosen(read(options.rows), json.loads(TABLE.read_text()))
        if options.write:
            options.write.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
