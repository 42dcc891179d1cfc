"""Checks of a run after each round: log-probabilities of engine and trainer, and rounds that teach nothing."""

from __future__ import annotations

from slimectl.errors import SlimectlError
from slimectl.settings.run import RunSettings
from slimectl.stages.signal import SignalCount
from slimectl.stdio import logger
from slimectl.types import StepReport


def check_log_prob_mismatch(report: StepReport, run: RunSettings) -> None:
    """Warn, or stop, if engine and trainer compute different log-probabilities for the same tokens."""
    difference = report.metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
    if run.max_logprob_mismatch is None or difference <= run.max_logprob_mismatch:
        return
    if report.metrics.get("rollout/staleness/max"):  # tokens of older weights differ by design
        return
    message = (
        f"round {report.rollout_id}: engine and trainer differ by {difference:.3f} a token on average, more than "
        f"run.max_logprob_mismatch = {run.max_logprob_mismatch:g}; `slimectl doctor --engine` looks for the cause"
    )
    if run.on_logprob_mismatch == "stop":
        raise SlimectlError(message)
    logger.warning(message)


def lasting_lack_of_signal(count: SignalCount, run: RunSettings, remedy: str) -> str:
    """Warn of many rounds without signal in a row, or return the message if the run is to stop for it."""
    if count.in_a_row and count.in_a_row >= run.no_signal_rounds and run.on_no_signal == "stop":
        return count.message_in_a_row(remedy)
    if count.in_a_row == run.no_signal_rounds:
        logger.warning(count.message_in_a_row(remedy))
    return ""
