"""Measure tile sizes of the plain Triton attention on this GPU and write the best into flash_tiles.json.

    python benchmarks/tune_attention.py [--bits 16,32] [--width 64,128,256] [--kernel forward,keys,queries] [--write]

Every candidate runs in a process of its own, for a tile that the compiler gets wrong can spoil a whole process: first
against float64, then the clock. They compile side by side and take turns on the GPU. A line of the table keeps the
fastest candidate and, for GPUs with less shared memory, up to two smaller ones.
"""

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
TABLE = ROOT / "src" / "groundup" / "kernels" / "flash_tiles.json"
SHAPES = {64: (1, 16, 4096), 128: (1, 16, 4096), 256: (1, 8, 4096)}
"""Width → batch, heads, sequence of the timed problem."""
TOLERANCE = {16: 1e-2, 32: 2e-6}


def candidates(bits: int, width: int) -> list[list]:
    """[block_q, block_k, warps, stages, maxnreg] that fit in shared memory and give every warp a fair piece."""
    blocks = (16, 32, 64) if width == 256 and bits == 32 else (32, 64, 128)
    found = []
    for q, k, warps, stages in product(blocks, blocks, (4, 8), (1, 2, 3) if bits == 16 else (1, 2)):
        held = (q + 2 * stages * k) * width * bits // 8
        if held < 200_000 and warps * 256 <= q * k <= warps * 2048:
            found.append([q, k, warps, stages, None])
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
    run = problem(*SHAPES[width])[3]
    run()
    torch.cuda.synchronize()
    with (Path(tempfile.gettempdir()) / "tune_attention.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ms = triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")
    return {"error": error, "ms": ms}


def attempt(kernel: str, bits: int, width: int, tile: list) -> dict:
    """`measure` in a process of its own; a failure is a row with its last line."""
    command = [sys.executable, __file__, "--one", json.dumps([kernel, bits, width, tile])]
    row = {"kernel": kernel, "bits": bits, "width": width, "tile": tile}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return row | {"failed": "over 120 s"}
    lines = [line[4:] for line in run.stdout.splitlines() if line.startswith("ROW ")]
    last = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "")
    return row | (json.loads(lines[0]) if lines else {"failed": last[:200]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bits", default="16,32")
    parser.add_argument("--width", default="64,128,256")
    parser.add_argument("--kernel", default="forward,keys,queries")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile side by side")
    parser.add_argument("--json", help="file for all rows")
    parser.add_argument("--write", action="store_true", help="write the best tiles into flash_tiles.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("ROW " + json.dumps(measure(*json.loads(options.one))), flush=True)
        return
    jobs = [
        (kernel, int(bits), int(width), tile)
        for kernel in options.kernel.split(",")
        for bits in options.bits.split(",")
        for width in options.width.split(",")
        for tile in candidates(int(bits), int(width))
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda job: attempt(*job), jobs))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    table = json.loads(TABLE.read_text())
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
    if options.write:
        TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
