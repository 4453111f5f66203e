"""The account of kernels: what they keep, held to the operators themselves without a GPU or data (fake tensors)."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from test_account_counts import SHAPES, VARIANTS, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from groundup.account import Setting, fused, trace
from groundup.account.memory import memory
from groundup.config import size
from groundup.model import TransformerLM

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64", torch.bool: "bool"}


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's operators accept tensors that are not on a GPU; of fake ones only their shape rules run."""
    for name in ("backend", "attention"):
        monkeypatch.setattr(import_module(f"groundup.kernels.{name}"), "runs_triton", lambda _: True)


def kept_by_autograd(model: TransformerLM, ids: torch.Tensor, context: AbstractContextManager) -> Counter:
    """(bytes, type) of every piece of memory that autograd keeps, parameters and buffers apart."""
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), ids]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), context:
        loss = model(ids, ids)
    counted = Counter((t.untyped_storage().nbytes(), NAMES[t.dtype]) for t in kept.values())
    del loss
    return counted


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-pure"])
@pytest.mark.parametrize(
    ("attention", "kernels"), [("reference", "triton"), ("flash-triton", "loss"), ("flash-triton", "triton")]
)
@pytest.mark.parametrize(
    "changes",
    [*SHAPES[:2], SHAPES[4], {"n_heads": 1, "position": "nope"}, VARIANTS[1], *VARIANTS[3:6:2], *VARIANTS[-2:]],
)
def test_saved_tensors_are_the_operators(
    changes: dict[str, Any], attention: str, kernels: str, precision: str, anywhere: None
) -> None:
    config = tiny(**changes, attention=attention, kernels=kernels)
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16-pure" else torch.float32)
        try:
            model = TransformerLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
        measured = kept_by_autograd(model, torch.zeros(3, 12, dtype=torch.int64), autocast)
    listed = trace(config, Setting.on_gpu(config, batch=3, mode="forward", precision=precision, grad=True)).saved
    assert Counter((t.bytes, t.dtype) for t in listed) == measured


def test_the_loss_takes_its_chunks_as_the_kernel_does() -> None:
    theirs = import_module("groundup.kernels.linear_cross_entropy").chunk_rows
    for shape in (
        (16384, 50304, 768, 2),
        (32768, 50304, 768, 2),
        (1 << 17, 128256, 4096, 2),
        (16384, 128256, 2048, 2),
        (300, 97, 16, 4),
        (1000, 2_000_000, 64, 2),
    ):
        for weight_item in (2, 4):
            assert fused.chunk_rows(*shape, weight_item) == theirs(*shape, weight_item)


def test_kernels_need_less_memory_and_the_loss_never_all_logits() -> None:
    """GPT-2 124M, batch 16, context 1024, bf16 autocast: one chunk of logits instead of 1.6 GB in three types."""
    config = size("gpt2-124m").resolve()
    step = Setting(16, precision="bf16-mixed", mode="forward-backward")
    plain, loss, all_kernels = (
        memory(config, trace(config, replace(step, attention=attention, kernels=kernels)))
        for attention, kernels in (("flash", "reference"), ("flash", "loss"), ("flash", "triton"))
    )
    logits = 16 * 1024 * 50_257 * 4
    assert plain["peak_backward"] - loss["peak_forward"] > logits
    assert loss["activations"] > 1.3 * all_kernels["activations"]
    assert memory(config, trace(config, step))["activations"] > plain["activations"]


def test_the_setting_follows_the_configuration() -> None:
    config = size("gpt2-124m").resolve()
    found = Setting.on_gpu(replace(config, checkpoint_activations=2), batch=8)
    assert (found.attention, found.kernels, found.checkpoint_every, found.batch) == ("flash", "triton", 2, 8)
    found = Setting.on_gpu(replace(config, attention="reference", kernels="loss"), checkpoint_every=3)
    assert (found.attention, found.kernels, found.checkpoint_every) == ("reference", "loss", 3)
