"""Ablations: a recipe and what becomes of it when one thing is changed at a time.

Each variation is a run of its own in its own directory, trained like any other with the same seed, batches and budget.
What a run gave is read from its files alone, so a second call goes on where the first one stopped: finished runs are
read, interrupted ones resumed. A variation that fails (it diverges, or does not fit) has a row that says so.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from groundup.config import RunConfig
from groundup.config.model import nearest_multiple
from groundup.errors import UserError, nearest_name
from groundup.model import TransformerLM, count_parameters
from groundup.rows import Row, read_rows
from groundup.train.device import concrete
from groundup.train.guards import BestLoss, is_out_of_memory
from groundup.train.interrupt import Interrupt
from groundup.train.loop import train
from groundup.train.progress import Progress
from groundup.train.run_directory import RunDirectory, refuse_changes

BASELINE = "baseline"
LOGIT_CAP, ATTENTION_CAP = 30.0, 50.0
"""Gemma Team (2024), section 2."""

Changes = dict[str, Any]
"""Fields such as {"model.norm": "post"}."""


@dataclass(frozen=True)
class Variation:
    """One row of the table."""

    name: str
    """Also its directory's."""
    changes: Changes


@dataclass(frozen=True)
class Outcome:
    """What a variation gave."""

    name: str
    changes: Changes
    steps: int
    """Taken; `planned_steps` is what its configuration says."""
    planned_steps: int
    parameters: int
    valid_loss: float | None
    """Nats a token after the last step (with early stopping the lowest); None where the run failed or was stopped
    before: a loss from the middle of a run says nothing beside one from the end."""
    change: float | None
    """Its difference to the baseline's; positive is worse."""
    tokens_per_second: float | None
    """Median over the steps, without the first tenth."""
    failed: str | None = None
    """Why it cannot be trained; None also for a run that was merely stopped and can go on."""


def _others(field: str, values: Iterable[Any]) -> Callable[[RunConfig], dict[str, Changes]]:
    """All values of a field but the recipe's."""
    section, name = field.split(".")
    return lambda c: {str(v): {field: v} for v in values if v != getattr(getattr(c, section), name)}


def _switch(field: str, on: Any = True, off: Any = False) -> Callable[[RunConfig], dict[str, Changes]]:
    """A field turned on where the recipe has it off, and the other way round."""
    section, name = field.split(".")
    return lambda c: {"on": {field: on}} if getattr(getattr(c, section), name) == off else {"off": {field: off}}


def _feed_forwards(config: RunConfig) -> dict[str, Changes]:
    """The other kinds, with d_ff chosen so that the parameters stay about the same."""
    model, found = config.model, {}
    for kind in ("swiglu", "silu", "relu2"):
        if kind == model.ffn:
            continue
        wide = model.d_ff
        if wide and (kind == "swiglu") != model.gated:
            wide = nearest_multiple(wide * 2 / 3, 64) if kind == "swiglu" else wide * 3 // 2
        found[kind] = {"model.ffn": kind, "model.d_ff": wide}
    return found


def _precisions(config: RunConfig) -> dict[str, Changes]:
    on_gpu = config.train.device != "cpu" and torch.cuda.is_available()
    names = ("fp32", *(["tf32"] if on_gpu else []), "bf16-mixed", "fp16-mixed", "bf16-pure")
    return _others("train.precision", names)(replace(config, train=concrete(config.train)))


def _softcaps(config: RunConfig) -> dict[str, Changes]:
    logit = _switch("model.logit_softcap", LOGIT_CAP, 0.0)(config)
    attention = _switch("model.attention_softcap", ATTENTION_CAP, 0.0)(config)
    return {
        f"{kind}-{how}": c for kind, both in (("logit", logit), ("attention", attention)) for how, c in both.items()
    }


def _sizes(config: RunConfig) -> dict[str, Changes]:
    layers = config.model.n_layers
    half = {"half-depth": {"model.n_layers": layers // 2}} if layers > 1 else {}
    return {**half, "double-depth": {"model.n_layers": 2 * layers}}


AXES: dict[str, Callable[[RunConfig], dict[str, Changes]]] = {
    "norm": _others("model.norm", ("pre", "post", "none")),
    "rope": _switch("model.position", "rope", "nope"),
    "ffn": _feed_forwards,
    "qk_norm": _switch("model.qk_norm"),
    "softcap": _softcaps,
    "tie": _switch("model.tie_embeddings"),
    "norm_decay": _switch("optim.decay_norms"),
    "embedding_decay": _switch("optim.decay_embeddings"),
    "optimizer": _others("optim.name", ("adamw", "muon")),
    "schedule": _others("optim.schedule", ("cosine", "linear", "wsd", "constant")),
    "precision": _precisions,
    "size": _sizes,
}
"""What can be varied → from a recipe, the other values by name."""


def variations(base: RunConfig, vary: Sequence[str]) -> list[Variation]:
    """The baseline and every variation of the axes `vary`. Raises UserError for an axis that does not exist."""
    found = [Variation(BASELINE, {})]
    for axis in dict.fromkeys(vary):
        if axis not in AXES:
            raise UserError(f'--vary cannot be "{axis}"{nearest_name(axis, AXES)}')
        found += [Variation(f"{axis}-{name}", changes) for name, changes in AXES[axis](base).items()]
    return found


def changed(base: RunConfig, changes: Changes) -> RunConfig:
    """`base` with the fields of `changes`."""
    for field, value in changes.items():
        section, name = field.split(".")
        base = replace(base, **{section: replace(getattr(base, section), **{name: value})})
    return base


def shortened(base: RunConfig, steps: int) -> RunConfig:
    """The recipe as every variation runs it: `steps` long (0: its own length), evaluated at the end, one checkpoint.

    A warm-up made for a longer run is cut to a tenth of this one.
    """
    if steps:
        warmup = min(base.optim.warmup_steps, max(1, steps // 10))
        loop = replace(base.train, steps=steps, tokens=0)
        base = replace(base, train=loop, optim=replace(base.optim, warmup_steps=warmup))
    train = base.train
    return replace(base, train=replace(train, eval_every=train.eval_every or train.steps or 1000, keep_last=1))


def ablate(
    base: RunConfig,
    found: Sequence[Variation],
    out: Path,
    progress: Callable[[], Progress] = Progress,
    say: Callable[[str], None] = lambda line: None,
) -> list[Outcome] | None:
    """Train what is not finished of the variations `found` of `base` below `out`; None when a signal ended it.

    Raises UserError where `out` holds a run of another recipe, and for a baseline that fails: nothing can be compared.
    """
    outcomes: list[Outcome] = []
    with Interrupt() as between:  # a run has its own
        for number, variation in enumerate(found, 1):
            config, run = changed(base, variation.changes), RunDirectory(out / variation.name)
            failed = None
            if run.config.exists():
                refuse_changes(run.load_config(), config, run.path)
            if is_finished(run):
                say(f"{variation.name} ({number} of {len(found)}): finished before")
            else:
                say(f"{variation.name} ({number} of {len(found)}): {_told(variation.changes)}")
                interrupted, failed = _train(config, run, progress())
                if interrupted or between.requested:
                    return None
            if failed and variation.name == BASELINE:
                raise UserError(f"the baseline failed: {failed}")
            outcomes.append(outcome(variation, config, run, failed, outcomes[0].valid_loss if outcomes else None))
    return outcomes


def _train(config: RunConfig, run: RunDirectory, progress: Progress) -> tuple[bool, str | None]:
    """Train or resume one run: (ended by a signal, why it failed)."""
    try:
        return train(config, run.path, resume=run.config.exists(), progress=progress).interrupted, None
    except UserError as error:
        return False, str(error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False, "out of memory"
    finally:
        # The next variation is another model: nothing of this one may take its memory or its compilations.
        gc.collect()
        if "torch._dynamo" in sys.modules:  # importing it only to reset it would cost seconds
            torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_finished(run: RunDirectory) -> bool:
    """Whether the run was evaluated after its last step, which is the last thing it does, or stopped early."""
    config, _, best = _read(run)
    return best.seen == config.train.steps > 0 or 0 < config.train.early_stopping <= best.waited


def _read(run: RunDirectory) -> tuple[RunConfig, list[Row], BestLoss]:
    """A run's configuration (one of no steps where it has none yet), its rows, and what its evaluations say."""
    config = run.load_config() if run.config.exists() else RunConfig()
    rows, best = read_rows(run.metrics), BestLoss(config.train.min_delta)
    best.replay(rows)
    return config, rows, best


def outcome(
    variation: Variation, config: RunConfig, run: RunDirectory, failed: str | None, baseline: float | None
) -> Outcome:
    """A row of the table from a run's files; `baseline`: the baseline's validation loss, None for itself."""
    saved, rows, best = _read(run)
    config = saved if run.config.exists() else config
    steps = [row for row in rows if "loss" in row]
    speeds = [row["tokens_per_second"] for row in steps[len(steps) // 10 :]]
    losses = [row["valid_loss"] for row in rows if "valid_loss" in row]
    loss = None
    if not failed and is_finished(run):
        loss = best.loss if config.train.early_stopping else losses[-1]
    with torch.device("meta"):
        parameters = count_parameters(TransformerLM(config.model)) if config.model.vocab_size else 0
    return Outcome(
        variation.name,
        variation.changes,
        steps=steps[-1]["step"] if steps else 0,
        planned_steps=config.train.steps,
        parameters=parameters,
        valid_loss=loss,
        change=None if loss is None or baseline is None else loss - baseline,
        tokens_per_second=median(speeds) if speeds else None,
        failed=failed,
    )


def _told(changes: Changes) -> str:
    return ", ".join(f"{field} = {value}" for field, value in changes.items()) or "the recipe itself"
