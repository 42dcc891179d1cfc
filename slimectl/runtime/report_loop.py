"""Loop over the reports of a run: records every step, and after rounds evaluates, checks, saves or ends the run."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slimectl.data.run_dir import RunDir
from slimectl.errors import SlimectlError
from slimectl.runtime import builders
from slimectl.runtime.evaluator import Evaluator
from slimectl.runtime.grace import RoundAbandoned
from slimectl.runtime.run_parts import RunParts
from slimectl.settings.run import RunSettings
from slimectl.stages.mismatch import LogProbCheck
from slimectl.stages.signal import SignalCount
from slimectl.system.liveness import note_progress
from slimectl.system.stdio import logger, quantity
from slimectl.types import Sample, StepReport

Reports = Generator[StepReport, None, bool]
"""Generator of a run's reports. It returns whether the run reached its end."""


def abandonment(loss: str, folder: RunDir, resume_command: str) -> str:
    """Return the message about an abandoned round: the newest checkpoint, and the command to continue."""
    rounds = folder.checkpoints()
    after = f"The last checkpoint is from round {rounds[-1]}" if rounds else "No checkpoint was saved"
    return f"{loss} abandoned. {after}. Continue with: {resume_command}"


@dataclass
class ReportLoop:
    """Processes the reports of a run. A signal ends it after the round, or within the round when `grace` is over.

    `resume_command` is the command that continues the run.
    """

    parts: RunParts
    evaluator: Evaluator
    resume_command: str

    def __post_init__(self) -> None:
        self.settings, self.recorder, self.state = self.parts.settings, self.parts.recorder, self.parts.state
        self._between_rounds = True
        """Whether policy and state are exactly as after a whole round."""
        self._newest_checkpoint = self.state.place if self.state.rollout_id else None
        """Round and step of the newest checkpoint."""
        self._log_prob_check = LogProbCheck(self.settings, not self.parts.rounds.samples, bool(self.state.step))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the next round. Until it arrives, the policy is still as after the previous round."""
        self.parts.profiler.before_round(self.state.rollout_id + 1)
        self._between_rounds = True
        yield
        self._between_rounds = False

    def consume(self, reports: Iterator[StepReport]) -> Reports:
        """Record and yield every report. Evaluate and save at intervals and after the last round."""
        samples: list[Sample] = []
        complete = False
        try:
            for report in reports:
                samples = [*([] if report.samples else samples), *report.samples]
                if self._end_step(report, samples):
                    yield report
                    return False
                yield report
                if report.last_step_of_round and self._stops_early():
                    break
            self._between_rounds = True
            self.evaluator.evaluate()
            with self.parts.grace.shielded():
                self._save(samples, is_last=True)
                complete = True
        except RoundAbandoned:
            if not complete:
                self._save_abandoned(samples)
        if complete:
            # A lack of signal that has been reported as a finding is not repeated.
            signal = "" if self._has_finding("no-signal") else self.state.signal.closing_message(self._remedy)
            closing = (signal, self._unmet_schedule)
            for message in filter(None, closing):
                logger.warning(message)
        return complete

    @property
    def _unmet_schedule(self) -> str:
        """Return a warning if the learning-rate schedule expected a different number of steps, else ""."""
        updates = self.state.step - self.settings.algorithm.critic_only_steps
        return builders.unmet_schedule(self.settings.train, updates, self.parts.models.total_steps)

    def _end_step(self, report: StepReport, samples: Sequence[Sample]) -> bool:
        """Record a step, and evaluate after a round. Return whether an interrupt ends the run here."""
        number = report.rollout_id
        note_progress()
        with self.parts.grace.shielded():
            self.recorder.check_save()
            if report.last_step_of_round:
                report.timings |= self.recorder.record_spans(number, self.parts.models.policy)
                engines = None if self.parts.service is None else self.parts.service.engines
                report.timings |= {} if engines is None else {"perf/engines": float(engines)}
            self.recorder.record(report)
            if not self.parts.rounds.samples or self.settings.run.on_logprob_mismatch == "stop":
                self._log_prob_check.check(report)  # otherwise the diagnosis reports it
            self.recorder.sampling = report.sampling or self.recorder.sampling
            if report.last_step_of_round:
                self.parts.profiler.after_round(number)
                policy, checkpoints = self.parts.models.policy, self.recorder.checkpoints()
                self.parts.periodic_reference.follow(number, policy, checkpoints)
                self.parts.progress.reach(number)
            self._between_rounds = report.last_step_of_round
        if not report.last_step_of_round or number == self.settings.run.num_rollout:
            return False
        self.evaluator.after_round(number)
        with self.parts.grace.shielded():
            return self._end_round(number, samples)

    def _end_round(self, number: int, samples: Sequence[Sample]) -> bool:
        """Save after a round, at the interval or because the run ends. Return whether an interrupt ends it here.

        Raises SlimectlError after too many rounds without a learning signal.
        """
        run = self.settings.run
        if self.parts.interrupted():
            self._save(samples, is_last=True)
            logger.warning(f"interrupted after round {number}. Continue with: {self.resume_command}")
            return True
        if fault := lasting_lack_of_signal(self.state.signal, run, self._remedy):
            self._save(samples, is_last=True)
            raise SlimectlError(f"{fault}. To continue anyway: {self.resume_command} -s run.on_no_signal=warn")
        if run.on_finding == "stop" and self.recorder.errors:
            self._save(samples, is_last=True)
            message = self.recorder.errors[0].message(self.recorder.folder.path)
            raise SlimectlError(f"{message}. To continue (run.on_finding = stop): {self.resume_command}")
        if (run.save_interval and number % run.save_interval == 0) or self.recorder.is_best(number):
            self._save(samples)
        else:
            self.recorder.keep_round(self.recorder.folder.step(number), samples)
        return False

    def _save(self, samples: Sequence[Sample], *, is_last: bool = False) -> None:
        """Save a checkpoint, unless this step already has one. Wait for the last one, also in the background."""
        if self._newest_checkpoint != self.state.place:
            with self.parts.progress.phase("saving"):
                self.recorder.save(self.parts.models.policy, self.state, samples)
            self._newest_checkpoint = self.state.place
        if is_last:
            self.recorder.finish_save()

    def _save_abandoned(self, samples: Sequence[Sample]) -> None:
        """Save the state after the last whole round if training has not moved past it, and log how to continue."""
        folder, number = self.recorder.folder, self.state.rollout_id
        self.recorder.finish_save()
        if self._between_rounds and number and number not in folder.checkpoints():
            self._save(samples, is_last=True)
        is_last = self._between_rounds and number == self.settings.run.num_rollout
        loss = f"the evaluation after round {number}" if is_last else f"round {number + self._between_rounds}"
        logger.warning(abandonment(loss, folder, self.resume_command))

    def _stops_early(self) -> bool:
        """Return whether run.early_stop_patience evaluations passed without a new best value. Logs it if so."""
        patience, compared = self.settings.run.early_stop_patience, self.recorder.compared
        is_evaluated = self.state.rollout_id in {number for number, _ in self.recorder.evaluations[-1:]}
        if not patience or compared is None or not is_evaluated or compared.since_best < patience:
            return False
        assert compared.best is not None, "an evaluation after the best one has been counted"
        number, value = compared.best
        logger.warning(
            f"stopped early after round {self.state.rollout_id}: {compared.metric} was best at round {number} "
            f"({value:.3g}), {quantity(compared.since_best, 'evaluation')} ago (run.early_stop_patience)"
        )
        return True

    def _has_finding(self, kind: str) -> bool:
        findings = self.recorder.diagnosis.findings if self.recorder.diagnosis else []
        return any(finding.kind == kind for finding in findings)

    @property
    def _remedy(self) -> str:
        """Return advice for rounds without a learning signal."""
        reward_check = self.parts.rounds.reward_check(self.recorder.folder.path, self.state.rollout_id)
        return self.state.signal.remedy(reward_check)


def lasting_lack_of_signal(count: SignalCount, run: RunSettings, remedy: str) -> str:
    """Return the message if the run must stop after many consecutive rounds without a learning signal, else ""."""
    must_stop = run.on_no_signal == "stop" and count.in_a_row >= run.no_signal_rounds
    return count.message_in_a_row(remedy) if count.in_a_row and must_stop else ""
