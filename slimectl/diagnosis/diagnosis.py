"""Finds the troubles of a run from its records, line by line while it runs or afterwards from its folder."""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimectl.data.ownership import read_manifest
from slimectl.diagnosis.catalogue import DETECTORS, OUT_OF_MEMORY, STOPPED
from slimectl.diagnosis.detector import Detector, Observation
from slimectl.diagnosis.finding import SEVERITIES, Finding
from slimectl.diagnosis.history import TOTAL, History
from slimectl.errors import SettingsError

Line = Mapping[str, Any]
"""A line of metrics.jsonl or perf.jsonl."""


@dataclass
class _Trace:
    """What is known of one kind of finding: rounds with and without it in a row, and the finding that lasts."""

    first: int = 0
    times_seen: int = 0
    times_absent: int = 0
    last: int = 0
    finding: Finding | None = None


class Diagnosis:
    """Reads the records of a run and keeps its findings.

    `observe` takes every line of metrics.jsonl and perf.jsonl in the order in which the run writes them. The same lines
    give the same findings, whether the run still writes them or has ended. `settings` are the values of run.toml by
    dotted key. `folder` is the run's folder, for commands.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, *, is_recorded: bool = False) -> None:
        self.history = History(settings, folder)
        self.history.is_recorded = is_recorded
        self.ended: list[Finding] = []
        self._traces = {detector.kind: _Trace() for detector in DETECTORS}
        self._number = 0
        self._is_open = False
        """Whether steps of the round have been read, but not its end."""
        self._has_times = False
        """Whether records have times, which tell where a round ends."""

    @property
    def findings(self) -> list[Finding]:
        """All findings so far: lasting ones first, then by severity and first round."""
        lasting = [trace.finding for trace in self._traces.values() if trace.finding is not None]
        return sorted(
            [*lasting, *self.ended],
            key=lambda finding: (not finding.lasts, SEVERITIES.index(finding.severity), finding.first_round),
        )

    def observe(self, line: Line) -> list[Finding]:
        """Take a line of the records. Return the findings that begin or end with it."""
        metrics = finite(line["metrics"])
        if line.get("rollout_id") is None:
            return self._observe_times(metrics)
        number = int(line["rollout_id"])
        if any(name.startswith("eval/") for name, _ in metrics):
            self.history.add_evaluation(number, metrics)
            return self._detect("evaluation", number)
        changes: list[Finding] = []
        if number != self._number and self._is_open and not self._has_times:
            changes = self._close()
        if number == self._number and not self._is_open:  # rows left over after the last round
            return []
        self.history.add_step(metrics)
        self._number, self._is_open = number, True
        return changes

    def close(self) -> list[Finding]:
        """Complete the last round of a run whose records have no times."""
        return self._close() if self._is_open and not self._has_times else []

    def last_words(self) -> Iterator[Finding]:
        """Yield a finding about the error with which the log of the run ends, unless a finding has caused it."""
        error = _last_error(self.history.folder / "log.txt")
        is_known = any(finding.lasts and finding.severity == "error" for finding in self.findings)
        if error is None or (is_known and any(name in error for name in ("run.on_finding", "run.on_no_signal"))):
            return
        detector = OUT_OF_MEMORY if "out of memory" in error.lower() else STOPPED
        title = f"The run ended with an error: {error}"
        yield self._finding(detector, Observation(title))

    def _observe_times(self, metrics: Any) -> list[Finding]:
        self.history.add_step(metrics)
        if all(name != TOTAL for name, _ in metrics):
            return []
        self._has_times = True
        return self._close() if self._is_open else []

    def _close(self) -> list[Finding]:
        self._is_open = False
        self.history.close(self._number)
        return self._detect("round", self._number)

    def _detect(self, after: str, number: int) -> list[Finding]:
        changes: list[Finding] = []
        for detector in DETECTORS:
            if detector.after == after:
                changes += self._follow(detector, detector.find(self.history), number)
        return changes

    def _follow(self, detector: Detector, observation: Observation | None, number: int) -> Iterator[Finding]:
        """Yield the finding of a detector if it begins or ends in this round."""
        trace = self._traces[detector.kind]
        if observation is None:
            trace.times_seen, trace.times_absent = 0, trace.times_absent + 1
            if trace.finding is not None and trace.times_absent >= detector.recovery:
                ended = replace(trace.finding, last_round=trace.last)
                self.ended.append(ended)
                trace.finding = None
                yield ended
            return
        trace.first = trace.first if trace.times_seen else number
        trace.times_seen, trace.times_absent, trace.last = trace.times_seen + 1, 0, number
        if trace.finding is not None:
            trace.finding = replace(self._finding(detector, observation), first_round=trace.finding.first_round)
        elif trace.times_seen >= detector.patience:
            first = trace.first if observation.first is None else observation.first
            trace.finding = replace(self._finding(detector, observation), first_round=first)
            yield trace.finding

    def _finding(self, detector: Detector, observation: Observation) -> Finding:
        run = shlex.quote(str(self.history.folder))

        def filled(*texts: str) -> tuple[str, ...]:
            return tuple(text.replace("{run}", run) for text in dict.fromkeys(texts))

        return Finding(
            kind=detector.kind,
            title=observation.title,
            severity=detector.severity,
            first_round=self._number,
            last_round=None,
            evidence=self.history.evidence(*observation.metrics),
            commands=filled(*observation.commands, *detector.commands),
            causes=filled(*observation.causes, *detector.causes),
            remedies=filled(*observation.remedies, *detector.remedies),
        )


def replayed(settings: Mapping[str, Any], folder: Path) -> Diagnosis:
    """Return the diagnosis of what a run's folder holds so far."""
    is_recorded = (read_manifest(folder) or {}).get("command") == "train"
    diagnosis = Diagnosis(settings, folder, is_recorded=is_recorded)
    for line in read_lines(folder):
        diagnosis.observe(line)
    return diagnosis


def diagnose_run(folder: Path) -> list[Finding]:
    """Return the findings of a run, which may still run, may have been killed, or may be of an older version.

    An error that ended the run is the first one. Raises SettingsError for a folder that is not a run's.
    """
    settings: dict[str, Any] = {}
    try:
        settings = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not (folder / "metrics.jsonl").exists():
            raise SettingsError(f"{folder}: not a run. Give a run's folder (runs/NAME)") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{folder}/run.toml: cannot be read ({error}). Restore it from a copy") from None
    diagnosis = replayed(_by_dotted_key(settings), folder)
    diagnosis.close()
    return [*diagnosis.last_words(), *diagnosis.findings]


def _by_dotted_key(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }


def read_lines(folder: Path) -> Iterator[Line]:
    """Yield the lines of metrics.jsonl and perf.jsonl in the order in which they were written.

    Every step and evaluation has a line in both files. A save has one in perf.jsonl only, a step of the warm-up one in
    metrics.jsonl only.
    """
    times = _objects(folder / "perf.jsonl")
    time = next(times, None)
    for line in _objects(folder / "metrics.jsonl"):
        is_warmup = "rollout_id" not in line
        while time is not None and not is_warmup and (_is_save(time) or time["step"] < line["step"]):
            yield time
            time = next(times, None)
        yield line
        if time is not None and not is_warmup and time["step"] == line["step"]:
            yield time
            time = next(times, None)
    while time is not None:
        yield time
        time = next(times, None)


def finite(metrics: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Return the metrics that are finite numbers."""
    return [
        (name, float(value))
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def _is_save(line: Line) -> bool:
    return "perf/save_model_time" in line["metrics"]


def _objects(path: Path) -> Iterator[Line]:
    """Yield the lines of a file that are records. A killed run may have left half of one."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if (
                    isinstance(line, dict)
                    and isinstance(line.get("metrics"), dict)
                    and isinstance(line.get("step"), int)
                ):
                    yield line


LAST_BYTES = 1 << 16
"""Bytes at the end of a log in which its last message is searched."""
LOGGED = re.compile(r"\[[^\]]*\] (?:(?P<level>[A-Z]+) )?\S+ - (?P<message>.*)")


def _last_error(log: Path) -> str | None:
    """Return the last message of a log if it is an error, else None."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        messages = [match for line in file if (match := LOGGED.match(line.decode(errors="replace")))]
        if messages and messages[-1]["level"] in ("ERROR", "CRITICAL"):
            return messages[-1]["message"].strip()
    return None
