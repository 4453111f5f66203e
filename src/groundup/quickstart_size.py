"""How large a model the quickstart trains: as large as the machine can train well in the time there is.

A ladder of shapes, each with the optimizer settings that suit it. A few training steps on a rung are timed; if the
budget would show the model at least 0.4 tokens a parameter, the rung is good and the next one is tried. A model that
sees far fewer ends at a higher loss than a smaller one (110 seconds of two CPU cores on the embedded corpus: 1.2 to
1.6 M parameters 3.8 to 3.9 nats, 2.9 M 4.06), and so does one that reads the corpus more than five times (27 M
parameters: 2.63 nats after five epochs, 2.78 after eight).
Cost: two to three seconds a rung. Rejected: a table of machines, which knows neither a busy neighbour nor a new GPU.
"""

import time
from dataclasses import dataclass, replace
from math import ceil
from statistics import median

import torch

from groundup.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from groundup.model import TransformerLM, count_parameters
from groundup.optim import AdamW, clip_grad_norm, parameter_groups
from groundup.train.device import autocast, choose_precision, matmul_precision_kept, set_matmul_precision

TOKENS_PER_PARAMETER = 0.4
EPOCHS = 5
FEW_TOKENS = 400_000  # a corpus smaller than a fifth of this may be repeated more often
MIN_STEPS = 20
TIMED_SECONDS = 1.5
# A training run is a little slower than its bare steps: it reads, logs, evaluates and saves.
OVERHEAD = 1.15


@dataclass(frozen=True)
class Rung:
    """A shape and what to train it with."""

    model: ModelConfig
    optim: OptimConfig
    batch: int
    """Sequences a step."""


def _rung(d_model: int, n_layers: int, n_heads: int, context: int, batch: int, lr: float, tied: bool) -> Rung:
    model = ModelConfig(
        context_length=context, d_model=d_model, n_layers=n_layers, n_heads=n_heads, tie_embeddings=tied
    )
    # Tied models are those that repeat the corpus: they also get more weight decay.
    return Rung(model, OptimConfig(lr=lr, betas=(0.9, 0.98), weight_decay=0.3 if tied else 0.1), batch)


LADDER = (
    _rung(64, 2, 2, 128, 8, 8e-3, tied=False),
    _rung(128, 3, 4, 128, 8, 6e-3, tied=False),
    _rung(256, 4, 8, 256, 16, 3e-3, tied=False),
    _rung(384, 6, 6, 256, 32, 2e-3, tied=True),
    _rung(512, 6, 8, 256, 32, 2e-3, tied=True),
)


@matmul_precision_kept()
def choose(n_tokens: int, vocab_size: int, seconds: float, device: torch.device) -> RunConfig:
    """The run (resolved, without data.path) for `n_tokens` training tokens and `seconds`, the choosing included."""
    start = time.perf_counter()

    def tokens(rate: float) -> int:
        left = max(seconds / 2, seconds - (time.perf_counter() - start))
        return min(max(EPOCHS * n_tokens, FEW_TOKENS), int(rate * left / OVERHEAD))

    best: tuple[Rung, float] | None = None
    for rung in LADDER:
        rung = _fitted(rung, n_tokens, vocab_size)
        parameters, rate = _measure(rung, device)
        if best is not None and tokens(rate) < TOKENS_PER_PARAMETER * parameters:
            break
        best = rung, rate
    assert best is not None
    return _run(best[0], tokens(best[1]), device)


def _fitted(rung: Rung, n_tokens: int, vocab_size: int) -> Rung:
    """The rung with the corpus' vocabulary, its context cut to what a small corpus can fill."""
    context = max(1, min(rung.model.context_length, n_tokens - 1))
    return replace(rung, model=replace(rung.model, context_length=context).resolve(vocab_size))


def _measure(rung: Rung, device: torch.device) -> tuple[int, float]:
    """Parameters, and training tokens a second: the median step of a second or two of them, after two to warm up."""
    precision = choose_precision("auto", device)
    set_matmul_precision(precision)
    model = TransformerLM(rung.model).to(device)
    optimizer = AdamW(parameter_groups(model, rung.optim.weight_decay), lr=1e-4)
    shape = rung.batch, rung.model.context_length
    ids = torch.randint(rung.model.vocab_size, shape, device=device)
    times: list[float] = []
    while len(times) < 5 or (sum(times[2:]) < TIMED_SECONDS and len(times) < 50):
        start = time.perf_counter()
        with autocast(device, precision):
            loss = model(ids, ids)
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    return count_parameters(model), rung.batch * rung.model.context_length / median(times[2:])


def _run(rung: Rung, tokens: int, device: torch.device) -> RunConfig:
    steps = max(MIN_STEPS, ceil(tokens / (rung.batch * rung.model.context_length)))
    train = TrainConfig(
        steps=steps,
        micro_batch_size=rung.batch,
        device="cuda" if device.type == "cuda" else "cpu",
        # Eight evaluations of at most a fortieth of the steps, at a third of a step's cost: about 7% of the time.
        eval_every=ceil(steps / 8),
        eval_batches=max(2, min(20, steps // 40)),
        save_every=ceil(steps / 5),
    )
    optim = replace(rung.optim, warmup_steps=max(5, steps // 15), min_lr_ratio=0.05)
    return RunConfig(model=rung.model, optim=optim, train=train).resolve()
