"""The best validation loss so far, and whether it is time to stop waiting for a better one (Prechelt 1998).

The state is a function of the evaluations seen. A checkpoint of step k is written before the evaluation of step k, so
it holds the state up to the evaluation before; `replay` catches up from the rows of metrics.jsonl.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any


@dataclass
class BestLoss:
    """Lowest validation loss, nats a token, and the evaluations since."""

    min_delta: float = 0.0
    loss: float = inf
    step: int = 0
    """Where `loss` was found; 0: nowhere yet."""
    waited: int = 0
    """Evaluations since."""
    seen: int = 0
    """The step of the last evaluation that counted here."""

    def observe(self, step: int, loss: float) -> bool:
        """Count an evaluation; True where it is the best so far. The same step again changes nothing: a run killed
        between the save of its best and the evaluation's row evaluates once more.
        """
        if step == self.seen:
            return step == self.step
        self.seen = step
        better = loss < self.loss - self.min_delta
        if better:
            self.loss, self.step, self.waited = loss, step, 0
        else:
            self.waited += 1
        return better

    def replay(self, rows: Iterable[dict[str, Any]]) -> None:
        """Count the evaluations among `rows` that came after the last one counted."""
        for row in rows:
            if row["step"] > self.seen and "valid_loss" in row:
                self.observe(row["step"], row["valid_loss"])

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it; an infinite loss is None."""
        state = asdict(self)
        del state["min_delta"]
        return {**state, "loss": None if self.loss == inf else self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what state_dict gave."""
        self.loss = inf if state["loss"] is None else state["loss"]
        self.step, self.waited, self.seen = state["step"], state["waited"], state["seen"]
