"""Memory: held, byte for byte, to what autograd saves and to what torch's allocator is asked for on the CPU."""

import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_account_counts import SHAPES, VARIANTS, tiny
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from groundup.account import Setting, parameter_shapes, parameters, trace
from groundup.account.allocator import MIB, Block, CachingAllocator, PlainAllocator
from groundup.account.memory import kv_cache_bytes, memory
from groundup.account.program import AdamW
from groundup.config import ModelConfig
from groundup.model import TransformerLM
from groundup.optim import adamw

PRECISIONS = ["fp32", "bf16-mixed", "bf16-pure"]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64", torch.bool: "bool"}
HOST_SCALARS = 128
"""Bytes of Python numbers that torch wraps as tensors on the host; on a GPU they never reach the device."""


def autocast(precision: str) -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def real_model(config: ModelConfig, precision: str) -> TransformerLM:
    model = TransformerLM(config)
    return model.to(torch.bfloat16) if precision == "bf16-pure" else model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("changes", SHAPES + VARIANTS)
@pytest.mark.parametrize(("batch", "context"), [(3, 12), (1, 7), (2, 1)])
def test_saved_tensors_are_autograds(changes: dict[str, Any], batch: int, context: int, precision: str) -> None:
    config = tiny(**changes)
    model = real_model(config, precision)
    ids = torch.randint(config.vocab_size, (batch, context))
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), ids]}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            saved.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(precision):
        model(ids, ids)
    expected = Counter((t.untyped_storage().nbytes(), NAMES[t.dtype]) for t in saved.values())
    listed = trace(config, Setting(batch, context, "forward", precision, grad=True)).saved
    assert Counter((t.bytes, t.dtype) for t in listed) == expected


def profiled(run: Any) -> list[Any]:
    """Every allocation and mark of a run, as torch's profiler saw them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = run()
        assert profiler.profiler is not None
        events = profiler.profiler.kineto_results.events()
    del kept
    return list(events)


def peaks(run: Any) -> tuple[int, int, int, int]:
    """Largest and last sum of allocated bytes before and after the mark."""
    events = profiled(run)
    marks = [e.start_ns() for e in events if e.name() == "MARK"]
    mark = marks[0] if marks else float("inf")
    live, found = 0, [0, 0, 0, 0]
    for event in events:
        if event.name() != "[memory]":
            continue
        live += event.nbytes()
        at = 0 if event.start_ns() < mark else 2
        found[at], found[at + 1] = max(found[at], live), live
    return found[0], found[1], found[2], found[3]


def predicted_peaks(config: ModelConfig, setting: Setting) -> tuple[int, int, int, int]:
    phases = trace(config, setting, plain=True, steps=1).phases
    base, forward, backward = phases["init"].end, phases["forward"], phases.get("backward")
    after = (backward.peak - base, backward.end - base) if backward else (0, 0)
    return forward.peak - base, forward.end - base, *after


# Heavy attention, heavy logits, grouped heads, tied, one head: each puts the peak somewhere else.
PEAKS = [
    {"d_model": 64, "context_length": 128},
    {"d_model": 64, "context_length": 128, "n_kv_heads": 2},
    {"vocab_size": 3000, "context_length": 32},
    {"vocab_size": 3000, "context_length": 32, "tie_embeddings": True},
    {"d_model": 64, "context_length": 96, "n_heads": 1, "d_ff": 512},
    {"d_model": 64, "context_length": 128, "norm": "post", "ffn": "relu2", "d_ff": 256, "position": "nope"},
    {"d_model": 64, "context_length": 128, "norm": "none", "ffn": "silu", "attention_softcap": 5.0},
    {"d_model": 64, "context_length": 64, "vocab_size": 1000, "qk_norm": True, "logit_softcap": 5.0},
]


class LoggingAllocator(PlainAllocator):
    """Remembers (bytes asked for, bytes held) at every allocation."""

    log: list[tuple[int, int]] = []  # noqa: RUF012

    def malloc(self, nbytes: int) -> Block | None:
        block = super().malloc(nbytes)
        self.log.append((nbytes, self.allocated))
        return block


@pytest.mark.parametrize("changes", PEAKS)
def test_every_allocation_is_torchs(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in float32: the same sizes in the same order, and as many bytes held at each."""
    config = tiny(**changes)
    model = TransformerLM(config)
    ids = torch.randint(config.vocab_size, (3, config.context_length))

    def step() -> torch.Tensor:
        loss = model(ids, ids)
        loss.backward()
        return loss

    step()
    model.zero_grad()
    noise = 3 * 4 * config.context_length * 4  # a few numbers a row: helpers of reductions differ by device
    live, measured = 0, []
    for event in profiled(step):
        if event.name() == "[memory]":
            live += event.nbytes()
            if event.nbytes() > noise:
                measured.append((event.nbytes(), live))
    LoggingAllocator.log.clear()
    monkeypatch.setattr("groundup.account.memory.PlainAllocator", LoggingAllocator)
    trace(config, Setting(3, mode="forward-backward"), plain=True, steps=1)
    tables = 2 if config.position == "rope" else 0
    before = len(parameter_shapes(config)) + tables + 2  # ids and targets
    base = LoggingAllocator.log[before - 1][1]
    predicted = [(n, held - base) for n, held in LoggingAllocator.log[before:] if n > noise]
    assert [n for n, _ in predicted] == [n for n, _ in measured]
    assert [h for _, h in predicted] == pytest.approx([h for _, h in measured], rel=0, abs=HOST_SCALARS)


def measured_peaks(model: TransformerLM, precision: str) -> tuple[int, int, int, int]:
    """`peaks` of a forward and backward pass with gradients yet to be made."""
    ids = torch.randint(model.config.vocab_size, (3, model.config.context_length))

    def step() -> torch.Tensor:
        with autocast(precision):
            loss = model(ids, ids)
        with record_function("MARK"):
            pass
        loss.backward()
        return loss

    step()
    model.zero_grad()
    return peaks(step)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("changes", PEAKS)
def test_peaks_of_forward_and_backward_are_torchs(changes: dict[str, Any], precision: str) -> None:
    config = tiny(**changes)
    model = real_model(config, precision)
    measured = measured_peaks(model, precision)
    predicted = predicted_peaks(config, Setting(3, 0, "forward-backward", precision))
    assert predicted == pytest.approx(measured, rel=0, abs=HOST_SCALARS)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("changes", PEAKS[:2])
def test_peak_of_a_forward_pass_without_gradients(changes: dict[str, Any], precision: str) -> None:
    config = tiny(**changes)
    model = real_model(config, precision)
    ids = torch.randint(config.vocab_size, (3, config.context_length))

    def step() -> torch.Tensor:
        with torch.no_grad(), autocast(precision):
            return model(ids)

    step()
    predicted = predicted_peaks(config, Setting(3, 0, "forward", precision, loss=False))
    assert predicted == pytest.approx(peaks(step), rel=0, abs=HOST_SCALARS)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_peaks_with_activation_checkpointing(every: int, precision: str) -> None:
    """The host keeps the recomputation's frames, which a GPU's peak does not see."""
    config = tiny(d_model=64, context_length=128)
    model = real_model(replace(config, checkpoint_activations=every), precision)
    measured = measured_peaks(model, precision)
    setting = Setting(3, 0, "forward-backward", precision, checkpoint_every=every)
    host_state = 6000 * (config.n_layers // every + 3)
    assert predicted_peaks(config, setting) == pytest.approx(measured, rel=0, abs=host_state + HOST_SCALARS)
    assert host_state < 0.02 * measured[2]


def test_optimizer_lines_are_the_optimizers() -> None:
    """The update's lines in order, and the one temporary: a root of the second moment; with the kernel none."""
    called: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.__name__.split(".")[0].rstrip("_"))
            return function(*args, **(kwargs or {}))

    tensors = [torch.ones(500, 400) for _ in range(4)]

    def update() -> None:
        adamw.adamw_update(*tensors, 1, 1e-3, (0.9, 0.95), 1e-8, 0.1)

    with Log():
        update()
    assert called == [name for name, _ in AdamW.PASSES]
    assert peaks(update)[0] == pytest.approx(4 * 500 * 400, abs=HOST_SCALARS)
    config = tiny(context_length=2, vocab_size=4000)
    count, gains = parameters(config)["total"], config.d_model * (2 * config.n_layers + 1)
    roots = {"tensors": 4000 * config.d_model, "lists": count - gains, "kernel": 0}
    for optimizer, root in roots.items():
        step = trace(config, Setting(1, 2, optimizer=optimizer), plain=optimizer == "tensors")
        before = step.phases["backward"].end
        near = 0 if optimizer != "lists" else 0.05 * root  # blocks of the allocator
        assert step.phases["optimizer"].peak - before == pytest.approx(4 * root, abs=4 * near)
    plain = trace(config, Setting(1, 2), plain=True).phases
    state = plain["first.optimizer"].end - plain["first.backward"].end
    assert state == 8 * count
    assert plain["first.optimizer"].peak - plain["first.backward"].end >= 8 * (count - gains)


def test_what_stays_is_sixteen_bytes_a_parameter() -> None:
    config = tiny()
    table, count = memory(config, trace(config, Setting(2))), parameters(config)["total"]
    assert (table["parameters"], table["gradients"], table["optimizer"]) == (4 * count, 4 * count, 8 * count)
    half = memory(config, trace(config, Setting(2, precision="bf16-pure")))
    assert (half["parameters"], half["gradients"], half["optimizer"]) == (2 * count, 2 * count, 4 * count)
    forward = memory(config, trace(config, Setting(2, mode="forward")))
    assert (forward["gradients"], forward["optimizer"], forward["activations"]) == (0, 0, 0)


def test_one_block_by_hand() -> None:
    """batch 1, 2 tokens, d 4, one head, d_ff 6, fp32: the block's tensors as one would list them on paper."""
    config = ModelConfig(8, 2, 4, 1, 1, 1, 6).resolve()
    saved = trace(config, Setting(1, mode="forward-backward")).saved
    block = [t for t in saved if t.name.startswith("layers.0.")]
    row, wide, square = 2 * 4 * 4, 2 * 6 * 4, 2 * 2 * 4
    norms = 2 * (2 * 4 + 2 * row)  # 1 / rms, x / rms, the output (both norms)
    attention = 3 * 4 * 4 * 4 + 3 * row  # joined weights, and the joined output that v is a view of
    attention += 2 * row + 2 * 2 + 2 * square + 2 * 2 * 4  # q, k, mask, exp and weights, sum and clamped sum
    attention += row  # the heads' output
    assert sum(t.bytes for t in block) == norms + attention + 5 * wide + 2 * row  # 5 in the ffn, 2 residual sums


def test_flash_attention_keeps_no_scores() -> None:
    config = tiny(context_length=64)
    reference = trace(config, Setting(2, mode="forward-backward"))
    flash = trace(config, Setting(2, mode="forward-backward", attention="flash"))
    square = {t.shape for t in flash.saved if t.shape[-2:] == (64, 64)}
    assert not square
    scores = 2 * 4 * 64 * 64 * 4
    kept = sum(t.bytes for t in reference.saved) - sum(t.bytes for t in flash.saved)
    assert kept > config.n_layers * 1.5 * scores
    assert memory(config, trace(config, Setting(2, attention="flash")))["activations.scores"] == 0


def test_kv_cache_by_hand() -> None:
    assert kv_cache_bytes(tiny(n_kv_heads=2), 3, 10, 2) == 2 * 3 * 3 * 2 * 10 * 4 * 2


def test_allocator_counts_blocks() -> None:
    allocator = CachingAllocator()
    small = allocator.malloc(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    matrix = allocator.malloc(1600 * 6400 * 4)
    assert allocator.allocated == 512 + 40 * MIB  # 39.06 MiB: the rest is too small to split off
    split = allocator.malloc(10 * MIB + 512)
    assert allocator.allocated == 512 + 40 * MIB + 10 * MIB + 512  # 1.9995 MiB remain: split
    for block in (small, matrix, split):
        allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.reserved == 2 * MIB + 40 * MIB + 12 * MIB
    again = allocator.malloc(11 * MIB)  # best fit: the merged block of 12 MiB, whose rest of 1 MiB stays with it
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 54 * MIB)
    allocator.free(again)
    pair = [allocator.malloc(3 * MIB) for _ in range(2)]
    assert allocator.allocated == 6 * MIB  # cut from the 12 MiB block
    for block in pair:
        allocator.free(block)
    assert allocator.malloc(12 * MIB)
    assert allocator.reserved == 54 * MIB  # the pieces were merged again


def test_peaks_repeat_exactly() -> None:
    """Lifetimes follow Python's reference counts; the result must not depend on the garbage collector."""
    config = tiny(context_length=64)
    setting = Setting(2, checkpoint_every=2)
    first = trace(config, setting)
    assert [p.peak for p in first.phases.values()] == [p.peak for p in trace(config, setting).phases.values()]
