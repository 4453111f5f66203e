"""Data parallelism on the GPUs of one machine: every engine checked against one process and timed beside PyTorch's own.

    python benchmarks/parallel_h200.py OUT [section ...] [--only engine,engine] [--tiny] [--ranks N] [--seconds S]

check      every engine's weights after three steps against one process, then all-reduce by size
small      gpt2-124m, 32 sequences of 1024 a GPU: step time, memory, exposed communication under each engine
large      gpt2-1.5b, 8 sequences of 1024 a GPU: the same
buckets    xl (1600 × 48), 4 × 512: naive, flat, overlap, and buckets of 1, 10, 100, 1000 MiB, ours and torch's
board      two layers of the 8B model (context 32,768, one sequence a GPU) under FSDP: time, memory extrapolated to 34

Each section is a start of its own with a time limit (--seconds in all, 300 by default); what fails or hangs costs its
section only, and OUT/SECTION.json holds the rows that were done. `--only` keeps the rows of some engines. NCCL's own
variables may be tried from outside and are written into the rows: TORCH_NCCL_HIGH_PRIORITY=1, NCCL_MAX_CTAS=8.
`--tiny` runs everything on the CPU in a minute. It needs torch and Triton; the package is read from src/.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
SECTIONS = {"check": 75, "small": 70, "large": 105, "buckets": 100, "board": 90}
"""Section → seconds it may take. In order of importance: what the time in all does not reach is left out."""
ENGINES = ("none", "bucketed", "torch-ddp", "zero1", "fsdp", "torch-fsdp2", "overlap", "flat", "naive")
TIMED = ENGINES[:-2]
"""flat and naive are timed at xl only."""


class Rows:
    """Rank 0 writes each row at once, so that a section that is stopped keeps what it has done."""

    def __init__(self, path: Path, rank: int, end: float, only: list[str]):
        self.path, self.rank, self.end, self.only = path, rank, end, only
        self.rows: list[dict] = []

    def add(self, **row) -> None:
        self.rows.append(row)
        if self.rank == 0:
            aside = self.path.with_suffix(".tmp")
            aside.write_text(json.dumps(self.rows, indent=1, default=str) + "\n")
            os.replace(aside, self.path)
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, dict)}
            if isinstance(row.get("time.step"), dict):
                shown["ms"] = round(row["time.step"]["median"], 3)
            print(json.dumps(shown, default=str), flush=True)

    def time_left(self) -> bool:
        """Whether another case may start, as rank 0 sees it."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor(float(time.time() < self.end))
        dist.broadcast(flag, 0)
        return flag.item() > 0


def attempt(rows: Rows, name: dict, work, device) -> None:
    """One case on every rank; its failure is a row, if all ranks fail alike. Frees what the case held."""
    import gc

    import torch

    if rows.only and "engine" in name and name["engine"] not in rows.only:
        return
    if not rows.time_left():
        rows.add(**name, left_out="no time left")
        return
    start = time.time()
    try:
        found = work()
        rows.add(**name, **found, seconds=time.time() - start)
    except Exception as error:
        traceback.print_exc()
        rows.add(**name, FAILED=f"{type(error).__name__}: {str(error)[:300]}")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# --- check -------------------------------------------------------------------------------------------------------


def check(rows: Rows, device, tiny: bool) -> None:
    import torch

    from groundup.bench.parallel import measure_all_reduce
    from groundup.config import ModelConfig

    shape = ModelConfig(vocab_size=503, context_length=64, d_model=72, n_layers=3, n_heads=4, d_ff=201)
    for tied in (False, True):
        model = replace(shape, tie_embeddings=tied).resolve()
        truth = one_process(model, device)
        for engine in ENGINES[1:]:
            name = {"case": "equal to one process", "engine": engine, "tied": tied}
            attempt(rows, name, partial(difference, engine, model, truth, device), device)
    sizes = (512, 1024, 10 * 1024, 100 * 1024, 1024 * 1024)
    for kib in sizes[: 2 if tiny else 5]:
        case = {"case": "all-reduce", "MiB": kib / 1024}
        attempt(rows, case, partial(measure_all_reduce, kib * 1024, device, torch.float32, 5, 20), device)


def batches(model, rank: int, device) -> Iterator[tuple]:
    """Three steps of two micro-batches of a rank; some targets are masked, another number on each."""
    import torch

    for step in range(3):
        for index in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
            ids = torch.randint(model.vocab_size, (3, model.context_length), generator=generator)
            targets = ids.roll(-1, 1)
            targets[0, : 5 * (rank + 1)] = -100
            yield step, index, ids.to(device), targets.to(device)


def n_valid(model, step: int, device) -> float:
    """Valid targets of a step over all ranks and micro-batches."""
    import torch.distributed as dist

    every = (batch for rank in range(dist.get_world_size()) for batch in batches(model, rank, device))
    return float(sum(int((targets != -100).sum()) for at, _, _, targets in every if at == step))


def adamw(model):
    import torch

    from groundup.optim import parameter_groups

    return torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2, eps=1e-3)


def one_process(config, device) -> dict:
    """Weights after the steps of all ranks, in float32 on one device."""
    import torch
    import torch.distributed as dist

    from groundup.model import TransformerLM

    model = TransformerLM(config)
    model.init_weights(0)
    model.to(device)
    optimizer = adamw(model)
    everything = [b for rank in range(dist.get_world_size()) for b in batches(config, rank, device)]
    for step in range(3):
        for at, _, ids, targets in everything:
            if at == step:
                model(ids, targets, n_valid=n_valid(config, step, device)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def difference(engine_name: str, config, truth: dict, device) -> dict:
    """The largest difference of any weight, relative to the largest weight."""
    import torch
    import torch.distributed as dist

    from groundup.config import ParallelConfig
    from groundup.model import TransformerLM
    from groundup.parallel.engine import parallelize

    rank = dist.get_rank()
    model = TransformerLM(config)
    model.init_weights(rank)  # rank 0's must win
    model.to(device)
    data, kind = ("bucketed", "zero1") if engine_name == "zero1" else (engine_name, "whole")
    engine, optimizer = parallelize(model, ParallelConfig(data=data, optimizer=kind, bucket_mb=0.05), adamw)
    for step, index, ids, targets in batches(config, rank, device):
        count = n_valid(config, step, device)
        if index == 0:
            with engine.no_sync():
                engine(ids, targets, n_valid=count).backward()
            continue
        engine(ids, targets, n_valid=count).backward()
        engine.finish_gradient_synchronization()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(engine, "full_parameters"):
        weights = dict(engine.full_parameters())
    else:
        optimizer.wait() if hasattr(optimizer, "wait") else None
        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    worst = max(((weights[n] - t).abs().max() / t.abs().max()).item() for n, t in truth.items())
    engine.remove_hooks()
    slowest = torch.tensor(worst)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"largest_difference": slowest.item(), "ok": slowest.item() < 2e-5, "names": len(weights) == len(truth)}


# --- steps -------------------------------------------------------------------------------------------------------


def steps(rows: Rows, device, tiny: bool, name: str, batch: int, context: int, timed: int, settings: list) -> None:
    """One row a setting: engine, bucket size, what measure_step finds."""
    from groundup.bench.parallel import Setting, at_context, measure_step
    from groundup.config import size

    model = at_context(size("tiny" if tiny else name), 32 if tiny else context)
    batch = 2 if tiny else batch
    options = {"compile": not tiny, "warmup": 4, "steps": 2 if tiny else timed}
    for chosen in settings:
        setting = Setting(model, batch_size=batch, **options, **chosen)
        case = {"size": name, "batch_size": batch, "context_length": model.context_length, **chosen}
        attempt(rows, case, partial(measure_step, setting, device), device)


def small(rows: Rows, device, tiny: bool) -> None:
    steps(rows, device, tiny, "gpt2-124m", 32, 1024, 20, [{"engine": engine} for engine in TIMED])


def large(rows: Rows, device, tiny: bool) -> None:
    steps(rows, device, tiny, "gpt2-1.5b", 8, 1024, 12, [{"engine": engine} for engine in TIMED])


def buckets(rows: Rows, device, tiny: bool) -> None:
    sizes = (1.0, 10.0, 100.0, 1000.0)
    ours = [{"engine": "bucketed", "bucket_mb": mb} for mb in sizes]
    theirs = [{"engine": "torch-ddp", "bucket_mb": mb} for mb in sizes]
    plain = [{"engine": name} for name in ("none", "overlap", "flat", "naive")]
    more = [{"engine": "zero1", "bucket_mb": 100.0}, {"engine": "bucketed", "bucket_mb": 100.0, "reduce": "bf16"}]
    steps(rows, device, tiny, "xl", 4, 512, 20, [*plain[:1], *ours, *plain[1:], *theirs, *more])


# --- the 8B board ------------------------------------------------------------------------------------------------


def board(rows: Rows, device, tiny: bool) -> None:
    """Two layers of the 34; a layer's share is the difference to one layer, the rest is embedding, head and loss."""
    from groundup.bench.parallel import Setting, at_context, measure_step
    from groundup.config import ModelConfig

    shape = ModelConfig(vocab_size=151_936, d_model=4096, n_heads=32, d_ff=11_008)
    context = 32_768
    if tiny:
        shape, context = ModelConfig(vocab_size=256, d_model=32, n_heads=4, d_ff=64), 64
    for attention, deterministic in (("auto", False), ("auto", True), ("sdpa", False)):
        how = {"engine": "fsdp", "attention": attention, "attention_deterministic": deterministic}
        found: dict[int, dict] = {}

        def measured(layers: int, how: dict = how, found: dict = found) -> dict:
            model = replace(at_context(replace(shape, n_layers=layers), context), checkpoint_activations=1)
            chosen = "sdpa" if tiny else how["attention"]
            model = replace(model, attention=chosen, attention_deterministic=how["attention_deterministic"])
            setting = Setting(model, "fsdp", batch_size=1, compile=not tiny, warmup=2, steps=3, trace=layers == 2)
            found[layers] = measure_step(setting, device)
            return found[layers]

        for layers in (2, 1):
            attempt(rows, {"layers": layers, "d_model": shape.d_model, **how}, partial(measured, layers), device)
        if len(found) == 2:
            rows.add(case="extrapolated to 34 layers", **how, **extrapolated(found))


def extrapolated(found: dict[int, dict], layers: int = 34) -> dict:
    """One layer's share, 34 times, and what is there without layers."""

    def grow(key: str) -> float | None:
        values = [found[n][key] for n in (1, 2)]
        if any(v is None for v in values):
            return None
        one, two = (v["median"] if isinstance(v, dict) else v for v in values)
        return one + (layers - 1) * (two - one)

    keys = ("time.step", "memory.parameters", "memory.gradients", "memory.state", "memory.after_step", "memory.peak")
    return {f"{key} (ms)" if key == "time.step" else f"{key} (bytes)": grow(key) for key in keys}


# --- processes ---------------------------------------------------------------------------------------------------


def work(section: str, out: Path, tiny: bool, end: float, only: list[str]) -> None:
    """One rank of one section."""
    import torch
    import torch._dynamo

    from groundup.bench.environment import environment
    from groundup.parallel.processes import connect, disconnect, local_device, this_world

    world = this_world()
    device = local_device("cpu" if tiny else "cuda", world)
    if tiny:
        torch.set_num_threads(1)
    chosen = connect(world, device, start_timeout=60, timeout=60)
    rows = Rows(out / f"{section}.json", world.rank, end, only)
    given = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_"))}
    rows.add(section=section, world_size=world.size, nccl_variables=given | chosen, environment=environment(device))
    torch.set_float32_matmul_precision("highest" if section == "check" else "high")
    torch._dynamo.config.recompile_limit = 64  # several engines with weights of two types share one process
    {"check": check, "small": small, "large": large, "buckets": buckets, "board": board}[section](rows, device, tiny)
    disconnect()
    sys.stdout.flush()
    os._exit(0)  # nothing of the backend may hold the process up now


def run_section(section: str, options: argparse.Namespace, seconds: float) -> str:
    """Start the ranks, wait, stop what is left at the limit; returns how it ended."""
    from torch.distributed import TCPStore

    out, ranks = options.out, options.ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # held here: nobody can take its port
    end = time.time() + seconds
    processes = []
    for rank in range(ranks):
        variables = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": "1" if options.tiny else "8",
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/tmp/groundup-inductor"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, __file__, str(out), section, "--only", options.only, "--worker", str(end - 12)]
        command += ["--tiny"] if options.tiny else []
        with open(out / f"{section}.rank{rank}.log", "w") as log:  # the process has its own handle
            stdout = None if rank == 0 else log
            processes.append(subprocess.Popen(command, env=variables, stdout=stdout, stderr=log))
    codes: list[int | None] = [None] * ranks
    while None in codes and time.time() < end:
        codes = [process.poll() for process in processes]
        if any(codes):
            time.sleep(3)  # let the others end by themselves
            break
        time.sleep(0.2)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    return "ok" if not any(codes) and None not in codes else f"exit codes {codes} (None: stopped at {seconds:.0f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("sections", nargs="*")
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--worker", type=float)
    options = parser.parse_args()
    if any(section not in SECTIONS for section in options.sections):
        parser.error(f"the sections are {', '.join(SECTIONS)}")
    if options.worker:
        only = [word for word in options.only.split(",") if word]
        work(options.sections[0], options.out, options.tiny, options.worker, only)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    for section in options.sections or SECTIONS:
        left = started + options.seconds - time.time()
        if left < 25:
            print(f"{section}: left out, {left:.0f} s are left", flush=True)
            continue
        began = time.time()
        ending = run_section(section, options, min(left, SECTIONS[section]))
        print(f"== {section}: {ending}, {time.time() - began:.0f} s", flush=True)
        if ending != "ok":
            for log in sorted(options.out.glob(f"{section}.rank*.log")):
                print(f"-- {log.name}: {log.read_text(errors='replace')[-1500:]}", flush=True)


if __name__ == "__main__":
    main()
