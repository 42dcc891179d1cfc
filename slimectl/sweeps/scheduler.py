"""Runs the trials of a sweep in slots, rung by rung, and ranks them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slimectl.errors import SettingsError, SlimectlError
from slimectl.protocols import Command, Commands
from slimectl.sweeps.folder import FAILED, TRIAL_TOML, Run, Score, SweepFolder
from slimectl.sweeps.plan import Rung, Trial, run_options
from slimectl.system import stdio

POLL_S = 0.1
MAX_RESTARTS = 3
"""Times that a run is continued after a signal has ended it, in one call of the command."""
KILLED_AT = 3
"""Number of signals after which the runs are killed."""
FIRST_FAILURES = 2
"""Trials that may fail before any run has completed a round. Then the sweep stops."""


@dataclass(frozen=True)
class Outcome:
    """What a run has come to at a rung: its score, or the reason of its failure."""

    score: float | None = None
    reason: str = ""


@dataclass
class Row:
    """A trial in the table: its newest rung, and the outcomes of its seeds there."""

    trial: Trial
    rung: int
    rounds: int | None
    """Rounds of a run at the newest rung."""
    seeds: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    running: list[Run] = field(default_factory=list)
    unfinished: list[Run] = field(default_factory=list)
    """Runs that have not ended, running or not."""
    is_last: bool = True
    """Whether the trial takes part in the last rung so far."""

    @property
    def score(self) -> Score | None:
        """The scores of the seeds that have finished, or None if none has."""
        values = tuple(outcome.score for outcome in self.outcomes.values() if outcome.score is not None)
        return Score(values) if values else None

    @property
    def reason(self) -> str:
        """Why a seed failed, or ""."""
        return next((outcome.reason for outcome in self.outcomes.values() if outcome.reason), "")

    @property
    def is_complete(self) -> bool:
        """Whether every seed has a score."""
        return len(self.outcomes) == self.seeds and not self.reason

    @property
    def state(self) -> str:
        """failed, running, finished, dropped (by successive halving), stopped (by a signal), or waiting."""
        if self.reason:
            return "failed"
        if self.running:
            return "running"
        if self.is_complete:
            return "finished" if self.is_last else "dropped"
        return "stopped" if self.unfinished else "waiting"


@dataclass
class Observer:
    """Receives what happens in a sweep."""

    started: Callable[[Run], None] = lambda run: None
    ended: Callable[[Run, str], None] = lambda run, text: None
    tick: Callable[[], None] = lambda: None


class Sweeper:
    """Runs a sweep. `signals` receives the signals that end it, which are passed on to the runs.

    With `retry_failed`, runs that failed in an earlier call are tried again.
    """

    def __init__(
        self, folder: SweepFolder, commands: Commands | None, signals: Sequence[int] = (), *, retry_failed: bool = False
    ) -> None:
        self.folder, self.plan = folder, folder.plan
        self._commands, self._signals, self._retry_failed = commands, signals, retry_failed
        self.observer = Observer()
        self._entrants: list[list[Trial]] = []
        """Trials of every rung so far."""
        self._outcomes: dict[tuple[Run, int], Outcome] = {}
        self._jobs: dict[int, tuple[Run, Command]] = {}
        """Running commands by slot."""
        self._restarts: Counter[Run] = Counter()
        self._failed_first: set[str] = set()
        self._passed_on = 0
        """Number of signals that the runs have received."""

    def execute(self) -> bool:
        """Run everything that has not ended yet. Return False if a signal ended it."""
        try:
            for number, rung in enumerate(self.plan.rungs):
                self._entrants.append(self._survivors(number - 1, rung) if number else self.plan.trials)
                if not self._complete(number, rung):
                    return False
            return True
        finally:
            for _, command in self._jobs.values():
                command.send_signal(signal.SIGKILL)

    def rows(self) -> list[Row]:
        """Return the trials, best first: by rung and score. Failed ones are last."""
        rows, running = [], [run for run, _ in self._jobs.values()]
        for trial in self.plan.trials:
            number = max(i for i, trials in enumerate(self._entrants) if trial in trials)
            runs = self.folder.runs(trial)
            outcomes = {run.seed: outcome for run in runs if (outcome := self._outcomes.get((run, number)))}
            is_last = number == len(self._entrants) - 1
            active = [run for run in runs if run in running]
            unfinished = [run for run in runs if run.seed not in outcomes and run.has_begun]
            rows.append(
                Row(trial, number, self.plan.rungs[number].rounds, len(runs), outcomes, active, unfinished, is_last)
            )
        return sorted(rows, key=self._order)

    def _order(self, row: Row) -> tuple[int, int, bool, float]:
        """Return the sorting key of a row. Equal ones keep the order of the trials."""
        if row.reason:
            return 1, -row.rung, True, 0.0
        mean = row.score.mean if row.is_complete and row.score else 0.0
        return 0, -row.rung, not row.is_complete, -mean if self.plan.higher_is_better else mean

    def _survivors(self, number: int, rung: Rung) -> list[Trial]:
        """Return the best trials of rung `number`, as many as the next `rung` has, in the order of the plan."""
        complete = [row for row in self.rows() if row.rung == number and row.is_complete]
        if not complete:
            raise SlimectlError(f"{self.folder.path}: every trial failed, so none can continue. Read the logs there.")
        best = {row.trial.name for row in complete[: rung.trials]}
        return [trial for trial in self.plan.trials if trial.name in best]

    def _outcome(self, run: Run, number: int, rung: Rung) -> Outcome | None:
        """Return what a run has come to, or None if it has to run. It is read once."""
        if (run, number) not in self._outcomes:
            if run.has_finished(rung.rounds):
                score = self.folder.score_of(run, rung.rounds)
                metric = self.plan.sweep.metric
                reason = "" if score is not None else f"metrics.jsonl has no finite value of {metric}"
                self._outcomes[run, number] = Outcome(score, reason)
            elif not self._retry_failed and (reason := run.failure):
                self._outcomes[run, number] = Outcome(None, reason)
        return self._outcomes.get((run, number))

    def _complete(self, number: int, rung: Rung) -> bool:
        """Run all seeds of a rung's trials, the first seed of all trials first. Return False if a signal ended it."""
        seeds, trials = self.plan.sweep.seeds, self._entrants[number]
        runs = (self.folder.run(trial, seed) for seed in seeds for trial in trials)
        waiting = deque(run for run in runs if self._outcome(run, number, rung) is None)
        while waiting or self._jobs:
            if not self._signals:
                self._start(waiting, number, rung)
            elif not self._jobs:
                return False
            self._pass_signals_on()
            for slot, (run, command) in list(self._jobs.items()):
                if (code := command.poll()) is not None:
                    del self._jobs[slot]
                    self._end(run, code, waiting, (number, rung))
            self.observer.tick()
            time.sleep(POLL_S)
        return True

    def _start(self, waiting: deque[Run], number: int, rung: Rung) -> None:
        """Start runs in free slots. One that a process of an earlier sweep still writes waits until it has ended."""
        assert self._commands is not None
        for slot in range(self._commands.slots):
            if slot in self._jobs:
                continue
            run = next((run for run in waiting if not run.is_active), None)
            if run is None:
                return
            waiting.remove(run)
            if self._outcome(run, number, rung) is not None:  # that process has finished it
                self.observer.ended(run, "finished")
                continue
            command = self._command(run, rung)
            run.write_line(f"sweep: {shlex.join(['slimectl', *command])}")
            self.observer.started(run)
            environment = {name: text for name, text in os.environ.items() if name not in self.plan.variables}
            arguments = [sys.executable, "-m", "slimectl", *command]
            self._jobs[slot] = run, self._commands.start(arguments, environment, run.log, slot)

    def _command(self, run: Run, rung: Rung) -> list[str]:
        options = run_options(self.plan, run.trial, rung.rounds)
        if run.has_begun:
            return ["run", "--resume", str(run.path), *options]
        place = ["--seed", str(run.seed), "--name", run.path.name, "-s", f"run.dir={run.parent}"]
        return ["run", "-c", str(run.parent / TRIAL_TOML), *place, *options]

    def _end(self, run: Run, code: int, waiting: deque[Run], at: tuple[int, Rung]) -> None:
        """Record how a run ended, or let it continue if a signal ended it."""
        if self._outcome(run, *at) is not None:
            self.observer.ended(run, "finished")
            return
        if run.is_active:  # a process of an earlier sweep, which began just before it was killed, writes it
            waiting.append(run)
            return
        was_signal = code < 0 or code > 128
        if was_signal and (self._signals or self._restarts[run] < MAX_RESTARTS):
            self._restarts[run] += 1
            waiting.appendleft(run)
            return
        messages = [line for line in run.last_lines(run.log) if line.startswith("slimectl: ")]
        if was_signal:
            name = signal.Signals(-code if code < 0 else code - 128).name
            reason = f"ended {stdio.quantity(MAX_RESTARTS + 1, 'time')} by {name}"
        else:
            reason = messages[-1].removeprefix("slimectl: ") if messages else f"exit code {code}"
        run.write_line(f"{FAILED}{reason}")
        self._outcomes[run, at[0]] = Outcome(None, reason)
        self.observer.ended(run, f"failed: {reason}")
        self._check_first_failures(run, reason)

    def _check_first_failures(self, failed: Run, reason: str) -> None:
        """Raise SettingsError if the first trials fail before any run has completed a round."""
        self._failed_first.add(failed.trial.name)
        runs = (run for trial in self.plan.trials for run in self.folder.runs(trial))
        enough = min(FIRST_FAILURES, len(self.plan.trials))
        if len(self._failed_first) >= enough and not any(run.newest("rollout/step")[0] for run in runs):
            raise SettingsError(
                f"{failed.path}: {reason.removesuffix('.')}. No trial has completed a round, so the sweep stops. Fix"
                f" it, and repeat the command with --retry-failed."
            )

    def _pass_signals_on(self) -> None:
        """Send the runs each signal that has arrived since the last call, and kill them at the third."""
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            for _, command in self._jobs.values():
                command.send_signal(signal.SIGKILL if self._passed_on >= KILLED_AT else number)
