"""Compares the log-probabilities of samples with the trained model, and warns or stops."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.errors import SlimectlError
from slimectl.settings.run import RunSettings
from slimectl.stdio import logger
from slimectl.types import StepReport

METRIC, STALENESS = "train/train_rollout_logprob_abs_diff", "rollout/staleness/max"


@dataclass
class LogProbCheck:
    """Warns, or stops, if engine and trainer compute different log-probabilities for the same tokens.

    For `recorded` samples it checks only the first round with a step, because later rounds differ by the training.
    """

    run: RunSettings
    recorded: bool = False
    first_round: int | None = None
    """Round of the first step, or None before it."""
    is_stale: bool = False
    """Whether older weights wrote tokens of this round. They differ by design."""

    def check(self, report: StepReport) -> None:
        """Check a step. Raises SlimectlError if run.on_logprob_mismatch is "stop"."""
        if report.samples or STALENESS in report.metrics:
            self.is_stale = bool(report.metrics.get(STALENESS))
        if self.first_round is None and report.is_step:
            self.first_round = report.rollout_id
        trained = self.recorded and report.rollout_id != self.first_round
        difference, bound = report.metrics.get(METRIC, 0.0), self.run.max_logprob_mismatch
        if self.is_stale or trained or bound is None or difference <= bound:
            return
        beyond = f"{difference:.3f} a token on average, more than run.max_logprob_mismatch = {bound:g}"
        message = f"engine and trainer differ by {beyond}. Run `slimectl doctor --engine` to find the cause."
        if self.recorded:
            message = (
                f"the log-probabilities of the samples and the model differ by {beyond}. Sample with the model that "
                f"you train, with its tokenizer and rollout.temperature."
            )
        message = f"round {report.rollout_id}: {message}"
        if self.run.on_logprob_mismatch == "stop":
            raise SlimectlError(message)
        logger.warning(message)
