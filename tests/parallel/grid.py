"""The parity grid's worker: every engine on every case in one process group, each held against one process."""

import random
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import contracts
import torch
import torch.distributed as dist
from late import late_collectives
from torch import Tensor, nn

from groundup.parallel import fsdp, launch
from groundup.parallel.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP, OverlapDDP
from groundup.parallel.processes import connect, disconnect, this_world
from groundup.parallel.torch_engines import TorchDDP, TorchFSDP2
from groundup.parallel.zero import ShardedDDP, ShardedOptimizer

STEPS, ROWS, VOCAB = 4, 3, 11
OPTIM: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """What a cell's model and run are like."""

    accumulation: int = 1
    unused: str = ""
    """"some": rank 0 alone uses the branch; "all": nobody does, in odd steps."""
    tied: bool = False
    frozen: bool = False
    buffers: bool = False
    mixed: bool = False
    odd: bool = False
    delays: bool = False
    clip: float = 0.0
    """Largest norm of the gradients over all shards; 0: any."""
    late: bool = False
    """Collectives give their result to those who wait, and NaN to others."""


CASES = {
    "plain": Case(),
    "accumulation": Case(accumulation=3),
    "unused on some": Case(unused="some"),
    "unused on all": Case(unused="all"),
    "unused, accumulation": Case(unused="some", accumulation=2),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
    "buffers": Case(buffers=True),
    "mixed dtype": Case(mixed=True),
    "uneven sizes": Case(odd=True),
    "random delays": Case(delays=True, accumulation=2, unused="some"),
    "clipping": Case(clip=0.5),
    "clipping, uneven sizes": Case(clip=0.5, odd=True),
    "late collectives": Case(late=True),
    "late, accumulation, unused": Case(late=True, accumulation=2, unused="some"),
}


class Block(nn.Module):
    """x + w2(relu(w1 x)), scaled by a gain that FSDP replicates."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.w1, self.w2 = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.relu(self.w1(x * self.gain)))


class Net(nn.Module):
    """Embedding, two blocks, a branch that may be left out, a head; defined in another order than it runs."""

    def __init__(self, case: Case):
        super().__init__()
        width, inner = (7, 13) if case.odd else (8, 16)
        self.case = case
        self.embed = nn.Embedding(VOCAB, width)
        self.branch = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen:
            self.layers[0].w1.weight.requires_grad_(False)
            self.branch.requires_grad_(False)
        if case.buffers:
            self.register_buffer("shift", torch.randn(width))
            self.register_buffer("count", torch.tensor(3), persistent=False)
        if case.mixed:
            self.layers[1].double()

    def forward(self, ids: Tensor, use_branch: bool = True) -> Tensor:
        x = self.embed(ids)
        if self.case.buffers:
            x = x * self.shift * self.count
        for layer in self.layers:
            x = layer(x.to(layer.gain.dtype)).to(x.dtype)
        if use_branch:
            x = x + torch.tanh(self.branch(x))
        return self.head(x)


def make_net(case: Case, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(case)


def micro_batch(step: int, rank: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return tuple(torch.randint(VOCAB, (ROWS,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def uses_branch(case: Case, step: int, rank: int) -> bool:
    return (
        not case.unused
        or (case.unused == "some" and (rank == 0 or step == 2))
        or (case.unused == "all" and step % 2 == 0)
    )


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as a run has: matrices decay, vectors do not. By name, because FSDP's pieces are 1-D."""
    names = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    flat = ("gain", "bias")
    return [
        {"params": [p for n, p in names if not n.endswith(flat)], "weight_decay": 0.1},
        {"params": [p for n, p in names if n.endswith(flat)], "weight_decay": 0.0},
    ]


def reference(case: Case, world: int) -> tuple[dict[str, Tensor], dict[str, dict], list[float]]:
    """One process: the ranks' gradients one after the other, summed in the order of ranks, averaged."""
    net = make_net(case, 0)
    optimizer = torch.optim.AdamW(groups_of(net), **OPTIM)
    params = [p for p in net.parameters() if p.requires_grad]
    norms = []
    for step in range(STEPS):
        total: list[Tensor | None] = [None] * len(params)
        for rank in range(world):
            net.zero_grad()
            for index in range(case.accumulation):
                ids, targets = micro_batch(step, rank, index)
                nn.functional.cross_entropy(net(ids, uses_branch(case, step, rank)), targets).backward()
            for i, p in enumerate(params):
                if p.grad is not None:
                    total[i] = p.grad.clone() if total[i] is None else total[i] + p.grad
        for p, grad in zip(params, total, strict=True):
            p.grad = None if grad is None else grad / world
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, case.clip or 1e9)))
        optimizer.step()
    state = {n: optimizer.state[p] for n, p in net.named_parameters() if p in optimizer.state}
    return {n: p.detach() for n, p in net.named_parameters()}, state, norms


def build(engine: str, net: Net) -> tuple[DataParallel, torch.optim.Optimizer]:
    small = 0.0005  # MiB: several buckets of several tensors
    if engine == "zero1":
        optimizer = ShardedOptimizer(groups_of(net), torch.optim.AdamW, bucket_mb=small, **OPTIM)
        gates = () if net.case.unused else (net.embed, *net.layers, net.branch, net.head)
        return ShardedDDP(net, optimizer, gates=gates), optimizer
    if engine == "zero1 after bucketed":
        model: DataParallel = BucketedDDP(net, small)
        return model, ShardedOptimizer(groups_of(net), torch.optim.AdamW, bucket_mb=small, **OPTIM)
    makers: dict[str, Callable[[], DataParallel]] = {
        "naive": lambda: NaiveDDP(net),
        "flat": lambda: FlatDDP(net),
        "overlap": lambda: OverlapDDP(net),
        "bucketed": lambda: BucketedDDP(net, small),
        "fsdp": lambda: fsdp.FSDP(net),
        "torch-ddp": lambda: TorchDDP(net, small),
        "torch-fsdp2": lambda: TorchFSDP2(net, list(net.layers)),
    }
    model = makers[engine]()
    return model, torch.optim.AdamW(groups_of(net), **OPTIM)


def run_cell(engine: str, case: Case) -> dict[str, Any]:
    rank = dist.get_rank()
    net = make_net(case, rank)  # every rank starts differently: rank 0's weights must win
    model, optimizer = build(engine, net)
    sleep = random.Random(rank)
    norms = []
    for step in range(STEPS):
        for index in range(case.accumulation):
            ids, targets = micro_batch(step, rank, index)
            if case.delays:
                time.sleep(sleep.random() * 0.01)
            if index < case.accumulation - 1:
                with model.no_sync():
                    nn.functional.cross_entropy(model(ids, uses_branch(case, step, rank)), targets).backward()
            else:
                nn.functional.cross_entropy(model(ids, uses_branch(case, step, rank)), targets).backward()
        model.finish_gradient_synchronization()
        norms.append(float(model.clip_grad_norm(case.clip or 1e9)))
        optimizer.step()
        # Kept gradients and dropped ones must both work.
        optimizer.zero_grad(set_to_none=step % 2 == 0 or case.unused != "" or engine == "zero1")
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.wait()
    if isinstance(model, fsdp.FSDP | TorchFSDP2):
        weights = dict(model.full_parameters())
    else:
        weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    buffers = {n: b.clone() for n, b in net.named_buffers()}
    model.remove_hooks()
    return {"weights": weights, "buffers": buffers, "norms": norms}


def compare(case: Case, found: dict[str, Any], truth: tuple, exact: bool) -> str:
    weights, _, norms = truth
    for name, expected in weights.items():
        actual = found["weights"][name]
        if exact and not torch.equal(actual, expected):
            return f"{name} is not bit-equal: {(actual - expected).abs().max():.2e}"
        if not torch.allclose(actual, expected, rtol=1e-5, atol=1e-6):
            return f"{name} differs by {(actual - expected).abs().max():.2e}"
    for name, expected in make_net(case, 0).named_buffers():
        if not torch.equal(found["buffers"][name], expected):
            return f"buffer {name} differs"
    if any(abs(a - b) > 1e-5 * max(1.0, b) for a, b in zip(found["norms"], norms, strict=True)):
        return f"norms {found['norms']} are not {norms}"
    return ""


def is_exact(engine: str, case: Case, world: int) -> bool:
    """Two ranks sum in either order alike; FSDP adds micro-batches after ranks, FSDP2 may divide before it adds."""
    return world <= 2 and not (engine.endswith(("fsdp", "fsdp2")) and case.accumulation > 1)


def run_cells(cells: list[tuple[str, str]], catch: bool = True) -> dict[tuple[str, str], str]:
    """Cell → "" where it equals one process, else what is wrong (on this rank)."""
    results = {}
    for engine, name in cells:
        case, world = CASES[name], dist.get_world_size()
        truth = reference(case, world)
        try:
            with late_collectives() if case.late else nullcontext():
                found = run_cell(engine, case)
            exact = is_exact(engine, case, world) and not case.clip
            results[engine, name] = compare(case, found, truth, exact)
        except Exception as error:
            if not catch:
                raise
            results[engine, name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return results


def worker(cells: list[tuple[str, str]], checks: list[str], catch: bool = True) -> dict[Any, str]:
    """One rank: the cells of the grid, then the checks of contracts.py."""
    torch.set_num_threads(1)
    connect(this_world(), torch.device("cpu"), timeout=240)
    results = run_cells(cells, catch) | contracts.run_checks(checks)
    disconnect()
    return results


def run_grid(world: int, cells: list[tuple[str, str]], checks: list[str], catch: bool = True) -> list[dict[Any, str]]:
    """What each rank found."""
    return launch.spawn(worker, world, cells, checks, catch)
