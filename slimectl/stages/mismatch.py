"""Compares log-probabilities of samples with the trained model's, and warns or stops."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.errors import SlimectlError
from slimectl.settings import Settings
from slimectl.settings.checks import off_policy_penalties
from slimectl.system.stdio import logger
from slimectl.types import StepReport

METRIC, STALENESS = "train/train_rollout_logprob_abs_diff", "rollout/staleness/max"


@dataclass
class LogProbCheck:
    """Warns, or stops, if engine and trainer compute different log-probabilities for the same tokens.

    For `recorded` samples, it checks the first step only, because afterwards the model differs by its training. If the
    engine's log-probabilities are the old ones, this also holds for the policy after the first step of a round.
    """

    settings: Settings
    recorded: bool = False
    has_trained: bool = False
    """Whether an optimizer step was made before."""
    is_stale: bool = False
    """Whether older weights wrote tokens of this round. Their log-probabilities differ by design."""
    round: int = 0
    has_older_rows: bool = False
    """Whether rows that were sampled before the last step are waiting for the next one."""

    def __post_init__(self) -> None:
        if (message := off_policy_penalties(self.settings)) is not None:
            logger.warning(message)

    def check(self, report: StepReport) -> None:
        """Check a step. Raises SlimectlError if run.on_logprob_mismatch is "stop"."""
        if report.samples or STALENESS in report.metrics:
            self.is_stale = bool(report.metrics.get(STALENESS))
        run, takes_old = self.settings.run, getattr(self.settings.algorithm, "use_rollout_logprobs", False)
        is_moved = takes_old and (self.has_older_rows or report.rollout_id == self.round)
        is_moved = self.has_trained if self.recorded else is_moved
        rows_wait = "train/rollouts_left_over" in report.metrics
        self.has_older_rows = rows_wait and (report.is_step or self.has_older_rows)
        self.round, self.has_trained = report.rollout_id, self.has_trained or report.is_step
        difference, bound = report.metrics.get(METRIC, 0.0), run.max_logprob_mismatch
        may_be_taught = self.recorded and self.settings.algorithm.learns_from_teachers_samples
        is_explained = self.is_stale or is_moved or may_be_taught or bool(self.settings.rollout.penalties)
        if is_explained or bound is None or difference <= bound:
            return
        beyond = f"{difference:.3f} per token on average, more than run.max_logprob_mismatch = {bound:g}"
        message = f"engine and trainer differ by {beyond}. Run `slimectl doctor --engine` to find the cause."
        if self.recorded:
            message = (
                f"the log-probabilities of the samples and the model differ by {beyond}. Sample with the model that "
                f"you train, with its tokenizer, rollout.temperature and penalties."
            )
        message = f"round {report.rollout_id}: {message}"
        if run.on_logprob_mismatch == "stop":
            raise SlimectlError(message)
        logger.warning(message)
