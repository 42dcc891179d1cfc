"""Stop at the first number that is not finite, before the optimizer has moved the weights by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slimectl.errors import DivergedError
from slimectl.ports import Critic, Loss, Policy
from slimectl.types import Metrics, Row

Trainable = Policy | Critic
Outputs = Callable[[Sequence[Row]], Sequence[Sequence[float]]]
"""What a model says of every response token of rows."""

NAMED = 4
"""Samples that an error names."""

COLUMNS = {
    "advantages": "advantages",
    "old_log_probs": "old log-probabilities",
    "ref_log_probs": "reference log-probabilities",
    "rollout_log_probs": "rollout log-probabilities",
    "values": "values",
    "returns": "returns",
}
"""What a row brings along, by field, and what it is called."""

WAY_OUT = "look at these samples, lower train.lr, or set train.dtype to float32"


@dataclass(frozen=True)
class FiniteCheck:
    """Checks one optimizer step over `rows`, whose samples are numbered `sample_ids`.

    Numbers are summed over all ranks before they come here, so that no rank goes on without the others; and neither
    trainer applies a gradient whose norm is not finite.
    """

    rows: Sequence[Row]
    sample_ids: Sequence[int]
    rollout_id: int
    step: int

    def check_rows(self) -> None:
        """Raises DivergedError if an advantage or log-probability that the step is to learn from is not finite."""
        for field, name in COLUMNS.items():
            bad = [i for i, row in enumerate(self.rows) if not _is_finite(getattr(row, field))]
            if bad:
                raise self._error(f"{name} that are not finite", self._blame(bad, name))

    def check(self, metrics: Metrics, name: str, *, of: str, outputs: Outputs) -> Metrics:
        """Return the metrics of a pass or an update if `name` among them is finite.

        `of` says whose they are, and `outputs` computes its value of every token, to find the samples to blame. Raises
        DivergedError.
        """
        value = metrics.get(name, 0.0)
        if math.isfinite(value):
            return metrics
        raise self._error(f"{of} {name} is {value}", self._blame(self._bad_rows(outputs), "outputs"))

    def update(self, model: Trainable, loss: Loss, *, of: str, outputs: Outputs) -> Metrics:
        """Make one optimizer step of `model` and return its metrics. Raises DivergedError before a bad update."""
        summed = model.forward_backward(self.rows, loss)
        if not math.isfinite(summed["loss"]):
            bad = self._bad_rows(outputs)
            blame = self._blame(bad, "outputs")
            if not bad:
                bad = self._search(range(len(self.rows)), model, loss)
                blame = self._blame(bad, "losses", complete=len(bad) <= NAMED)
            raise self._error(f"{of} loss is {summed['loss']}", blame)
        return summed | self.check(model.optim_step(), "grad_norm", of=of, outputs=outputs)

    def _bad_rows(self, outputs: Outputs) -> list[int]:
        return [i for i, numbers in enumerate(outputs(self.rows)) if not _is_finite(numbers)]

    def _search(self, among: Sequence[int], model: Trainable, loss: Loss) -> list[int]:
        """Return rows whose own loss is not finite, by halves, at most as many as are named and one."""
        if math.isfinite(model.forward_backward([self.rows[i] for i in among], loss)["loss"]):
            return []
        if len(among) == 1:
            return list(among)
        half = len(among) // 2
        first = self._search(among[:half], model, loss)
        return first if len(first) > NAMED else first + self._search(among[half:], model, loss)

    def _blame(self, bad: Sequence[int], name: str, *, complete: bool = True) -> str:
        """Return which samples have numbers that are not finite, in words; `complete`: there are no others."""
        if not bad:
            return f"no single sample is to blame, as the {name} of all {len(self.rows)} are finite"
        if complete and len(bad) == len(self.rows) > 1:
            return f"no single sample is to blame, as the {name} of none of the {len(bad)} are finite"
        numbers = list(dict.fromkeys(self.sample_ids[i] for i in bad))
        named = ", ".join(map(str, numbers[:NAMED]))
        rest = f"{len(numbers) - NAMED} more" if complete else "perhaps others"
        more = f" and {rest}" if len(numbers) > NAMED else ""
        return f"not finite: the {name} of sample{'s' if len(numbers) > 1 else ''} {named}{more}"

    def _error(self, fault: str, blame: str) -> DivergedError:
        return DivergedError(
            f"round {self.rollout_id}, step {self.step}: {fault} ({blame}); this update was not made; {WAY_OUT}"
        )


def _is_finite(numbers: Sequence[float] | None) -> bool:
    # One sum, in C: what is not finite does not leave it.
    return not numbers or math.isfinite(sum(numbers))
