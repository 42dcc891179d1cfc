"""Stops training at the first non-finite number, before the optimizer applies it to the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slimectl.errors import DivergedError
from slimectl.protocols import Critic, Policy
from slimectl.types import Loss, Metrics, TrainingSample

Trainable = Policy | Critic
Outputs = Callable[[Sequence[TrainingSample]], Sequence[Sequence[float]]]
"""Computes a model's output (log-probability or value) for every response token of rows."""

NAMED = 4
"""Maximum number of samples listed in an error."""

COLUMNS = {
    "advantages": "advantages",
    "old_log_probs": "old log-probabilities",
    "ref_log_probs": "reference log-probabilities",
    "rollout_log_probs": "rollout log-probabilities",
    "values": "values",
    "returns": "returns",
}
"""Row fields to check, and their names in errors."""

REMEDY = "Look at these samples, lower train.lr, or set train.dtype to float32"


@dataclass(frozen=True)
class FiniteCheck:
    """Checks one optimizer step over `rows`, whose samples are numbered `sample_ids`.

    Metrics are summed over all ranks before the check, so that all ranks stop together. Neither trainer applies a
    gradient whose norm is not finite.
    """

    rows: Sequence[TrainingSample]
    sample_ids: Sequence[int]
    rollout_id: int
    step: int

    def check_rows(self) -> None:
        """Raise DivergedError if an advantage or log-probability of the rows is not finite."""
        for field, name in COLUMNS.items():
            bad = [i for i, row in enumerate(self.rows) if not _is_finite(getattr(row, field))]
            if bad:
                raise self._error(f"{name} that are not finite", self._blame(bad, name))

    def check(self, metrics: Metrics, name: str, *, of: str, outputs: Outputs) -> Metrics:
        """Return the metrics of a pass or an update if the metric `name` is finite.

        `of` names the model in the error, and `outputs` computes its values per token, to find the samples to blame.
        Raises DivergedError.
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
        """Return at most NAMED + 1 rows whose loss is not finite, found by bisection."""
        if math.isfinite(model.forward_backward([self.rows[i] for i in among], loss)["loss"]):
            return []
        if len(among) == 1:
            return list(among)
        half = len(among) // 2
        first = self._search(among[:half], model, loss)
        return first if len(first) > NAMED else first + self._search(among[half:], model, loss)

    def _blame(self, bad: Sequence[int], name: str, *, complete: bool = True) -> str:
        """Describe the samples with non-finite numbers. `complete` means that `bad` lists all of them."""
        if not bad:
            return f"no single sample is to blame, as the {name} of all {len(self.rows)} are finite"
        if complete and len(bad) == len(self.rows) > 1:
            return f"no single sample is to blame, as the {name} of none of the {len(bad)} are finite"
        numbers = list(dict.fromkeys(self.sample_ids[i] for i in bad))
        named = ", ".join(map(str, numbers[:NAMED]))
        remainder = f"{len(numbers) - NAMED} more" if complete else "perhaps others"
        suffix = f" and {remainder}" if len(numbers) > NAMED else ""
        return f"not finite: the {name} of sample{'s' if len(numbers) > 1 else ''} {named}{suffix}"

    def _error(self, fault: str, blame: str) -> DivergedError:
        return DivergedError(
            f"round {self.rollout_id}, step {self.step}: {fault} ({blame}). The update was not applied. {REMEDY}"
        )


def _is_finite(numbers: Sequence[float] | None) -> bool:
    # One sum, in C: a non-finite term makes the sum non-finite.
    return not numbers or math.isfinite(sum(numbers))
