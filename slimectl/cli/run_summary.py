"""Summarizes a run on one screen: state, changed settings, curves, time by phase, worst warnings, next commands."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimectl.cli.options import shown
from slimectl.cli.terminal import one_line, shortened, sparkline, visible, width
from slimectl.cli.viewer.library import RunSource, read_settings
from slimectl.cli.viewer.run_table import findings
from slimectl.data.metrics_catalogue import is_supervised, progress
from slimectl.data.ownership import read_manifest
from slimectl.errors import SettingsError
from slimectl.system import stdio
from slimectl.system.model_files import linked_step

CURVES = (
    ("reward", ("rollout/raw_reward",)), ("loss", ("train/loss",)), ("length", ("rollout/response_len/mean",)),
    ("entropy", ("rollout/entropy", "train/entropy_loss")),
)  # fmt: skip
"""Metrics of each curve, of which the first that the run has is shown. The loss is for supervised training only."""
PHASES = {
    "generate": ("perf/generate_time",),
    "grade": ("perf/reward_time",),
    "train": ("perf/actor_train_time", "perf/critic_train_time"),
    "log-probs": ("perf/log_probs_time", "perf/ref_log_probs_time", "perf/teacher_log_probs_time", "perf/values_time"),
    "weights": ("perf/update_weights_time", "perf/engine_onload_time", "perf/engine_offload_time"),
    "evaluate": ("perf/eval_time",),
    "save": ("perf/save_model_time", "perf/train_data_time"),
}
"""Time metrics of each phase."""
ELAPSED = ("perf/total_time", "perf/eval_time", "perf/save_model_time")
WARNING = re.compile(r"\[[^\]]*\] (?P<level>WARNING|ERROR|CRITICAL) (?P<place>\S+) - (?P<message>.*)")
RESUMED = re.compile(r"\[[^\]]*\] \S+ - resuming .* after round \d+$")
SHOWN_AS_FINDING = "More: slimectl diagnose "
"""Part of the message about a finding."""
WAY_ON = re.compile(r"(?:\. Continue|; go on) with: slimectl ")
"""Part of the message of an interrupted run. Version 0.1 wrote 'go on'."""
MAX_WARNINGS, MAX_EVALUATIONS = 3, 3
MARGIN = 13
"""Width of the names on the left, in columns."""
LINES = 24
"""Lines of a screen of unknown size, including the shell prompt."""
SKIPPED_SETTINGS = ("run.name", "run.dir")


def run_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a run as JSON: progress, evaluations, curves, times, settings, warnings, checkpoints."""
    run = RunSource("", path, read_settings(path))
    points: list[tuple[Any, tuple[str, float]]] = []
    evaluations: list[dict[str, Any]] = []
    curves: dict[str, list[float]] = {}
    seconds: Counter[str] = Counter()
    for line in run.all_metrics():
        metrics, number = line["metrics"], line.get("rollout_id")
        if (point := progress(metrics)) is not None:
            points.append((number, point))
        evaluations += [
            {"round": number, "name": name.removeprefix("eval/"), "value": value}
            for name, value in metrics.items()
            if name.startswith("eval/") and name.endswith(("_accuracy", "/loss"))
        ]
        for title, value in _points(metrics):
            curves.setdefault(title, []).append(value)
        for name, value in metrics.items():
            if name.startswith("perf/") and name.endswith("_time"):
                seconds[name] += value
    base, differences = changed_settings(path)
    return {
        "state": run.state,
        "rounds": len({number for number, _ in points}),
        "planned": run.settings.get("run.num_rollout"),
        "metric": points[0][1][0] if points else None,
        "points": [[number, value] for number, (_, value) in points],
        "evaluations": evaluations,
        "curves": curves,
        "seconds": {"elapsed": sum(seconds[name] for name in ELAPSED), **_phases(seconds)},
        "settings": {"differ_from": base, "values": differences},
        "findings": findings(path),
        "warnings": warnings(path / "log.txt"),
        "samples_files": len(run.files()),
        "best": _best(path, run.settings.get("run.save_best")),
        "checkpoints": {
            step.name: sorted(file.name for file in step.iterdir()) for step in sorted(path.glob("step_*"))
        },
    }


def _best(path: Path, metric: str | None) -> dict[str, Any] | None:
    """Return the checkpoint with the best evaluation, and the evaluation, or None if there is none."""
    from slimectl.stages.best import Evaluations

    name = linked_step(path, "best")
    state = path / str(name) / "state.json"
    if not metric or not name or not state.is_file():
        return None
    compared = Evaluations(metric, json.loads(state.read_text(encoding="utf-8"))["evaluations"])
    return {"checkpoint": name, "metric": compared.metric, "value": compared.best[1] if compared.best else None}


def _points(metrics: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield (title, value) of each curve to which a line of metrics adds a point."""
    for title, names in CURVES:
        name = next((name for name in names if name in metrics), None)
        if name is not None and (title != "loss" or is_supervised(metrics)):
            yield title, metrics[name]


def _phases(seconds: Counter[str]) -> dict[str, float]:
    """Return the seconds of each phase that took any. "other" is the rest, if phases do not overlap."""
    phases = {phase: sum(seconds[name] for name in names) for phase, names in PHASES.items()}
    if not phases["generate"]:  # recorded by an older version, which did not split rollout_time
        phases["generate"] = seconds["perf/rollout_time"]
    remainder = sum(seconds[name] for name in ELAPSED) - sum(phases.values())
    return {phase: value for phase, value in (phases | {"other": remainder}).items() if value > 0}


def skipped_settings(settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that do not matter for a run: its name, and the interpreters of engines that are not used."""
    from slimectl.settings.keys import unused_interpreters

    return {*SKIPPED_SETTINGS, *unused_interpreters(settings.get("engine.backend"))}


def changed_settings(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Return the name of a run's recipe, or "defaults", and the settings that differ: [value in run, value in recipe].

    The recipe is read in its present state. Without it, the run is compared with the defaults. If this version cannot
    read the run's settings, no differences are returned.
    """
    from slimectl.settings.keys import toml_value
    from slimectl.settings.layers import from_file
    from slimectl.settings.loading import resolve

    try:
        settings = dict(shown(resolve([from_file(path / "run.toml")])))
    except SettingsError:
        return "defaults", {}
    base, values = _recipe_settings((read_manifest(path) or {}).get("recipe"), settings.get("algorithm.name"))
    skipped = skipped_settings(settings)
    differences = {
        name: [toml_value(value), toml_value(values.get(name))]
        for name, value in settings.items()
        if value != values.get(name) and name not in skipped
    }
    return base, differences


def _recipe_settings(name: Any, algorithm: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and settings of a recipe, or the defaults of the algorithm if it cannot be read."""
    from slimectl import recipes
    from slimectl.settings.layers import Layer
    from slimectl.settings.loading import resolve

    if isinstance(name, str):
        try:
            layer = recipes.find(name, instead=False, needed=True).layer
            return Path(name).stem, dict(shown(resolve([layer] if layer else [])))
        except SettingsError:
            pass
    defaults = dict(shown(resolve([Layer("default", {"algorithm": {"name": algorithm}})])))
    return "defaults", defaults | {"algorithm.name": "grpo"}


def warnings(log: Path) -> list[dict[str, Any]]:
    """Return the warnings and errors of a log, counted by place in the code: errors first, then the most frequent.

    Interruptions after which the run was resumed are omitted.
    """
    counts: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], str] = {}
    if log.is_file():
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if RESUMED.match(line):
                    last = {key: message for key, message in last.items() if not WAY_ON.search(message)}
                    counts = Counter({key: counts[key] for key in last})
                elif (match := WARNING.match(line)) and SHOWN_AS_FINDING not in match["message"]:
                    key = match["level"], match["place"]
                    counts[key] += 1
                    last[key] = match["message"]
    ranked = sorted(counts.items(), key=lambda item: (item[0][0] == "WARNING", -item[1]))
    return [
        {"level": level, "place": place, "count": count, "message": last[level, place]}
        for (level, place), count in ranked
    ]


# --- the screen ------------------------------------------------------------------------------------------------------


def show_run(path: Path) -> None:
    """Print the summary of a run, fitted to the size of the terminal."""
    run = run_facts(path)
    columns, height = width(), shutil.get_terminal_size((80, LINES)).lines - 1
    figures = [*_curve_lines(run, columns), *_time_lines(run), *_checkpoint_lines(run)]
    figures += [*_finding_lines(run, columns), *_warning_lines(run)]
    head, commands = _wrapped(_state_line(path, run), columns), list(_next_lines(path, run))
    command_lines = sum(-(-len(line) // columns) for line in commands)
    room = max(1, height - len(head) - len(figures) - command_lines)
    for line in [*head, *_setting_lines(run, columns, room), *figures]:
        print(shortened(line, columns).rstrip())
    for line in commands:  # not shortened, so that they can be copied
        print(line)


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(text, max(20, columns), break_on_hyphens=False, break_long_words=False)


def _named(name: str, text: str) -> str:
    return f"{name:<{MARGIN}}{text}"


def _state_line(path: Path, run: dict[str, Any]) -> str:
    planned, elapsed = run["planned"], run["seconds"]["elapsed"]
    of = f" of {planned}" if planned and planned != run["rounds"] else ""
    parts = [f"{stdio.quantity(run['rounds'], 'round')}{of}", run["state"]]
    if elapsed:
        parts.append(duration(elapsed))
    if run["state"] == "running" and planned and run["rounds"]:
        parts.append(f"{duration(elapsed / run['rounds'] * (planned - run['rounds']))} left")
    return f"{path}: {', '.join(parts)}"


def _setting_lines(run: dict[str, Any], columns: int, room: int) -> list[str]:
    """Return at most `room` lines with the settings that differ, and where to find the rest."""
    base, values = run["settings"]["differ_from"], run["settings"]["values"]
    if not values:
        return [_named("settings", f"same as {base}")] if base != "defaults" else []
    items = [
        f"{name}={one_line(value, 30)} ({one_line(base_value, 16)})" for name, (value, base_value) in values.items()
    ]
    title = (
        f"settings that differ from {base} (its value)"
        if base != "defaults"
        else "settings that differ from the defaults"
    )
    for count in range(len(items), -1, -1):
        more = [f"{len(items) - count} more in run.toml"] if count < len(items) else []
        lines = _wrapped("; ".join(items[:count] + more), columns - 2)
        if len(lines) < room or not count:
            break
    return [title, *(f"  {line}" for line in lines)] if room > 1 else []


def _curve_lines(run: dict[str, Any], columns: int) -> Iterator[str]:
    """Yield a line per curve: first value, blocks, last value, extremes."""
    evaluations: dict[str, list[float]] = {}
    for evaluation in run["evaluations"]:
        evaluations.setdefault(evaluation["name"].removesuffix("_accuracy").replace("/", " "), []).append(
            evaluation["value"]
        )
    curves = [*run["curves"].items(), *list(evaluations.items())[:MAX_EVALUATIONS]]
    for title, values in curves:
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            ends = f"{finite[0]:>7.3g} ", f" {finite[-1]:<7.3g}"
            extremes = f" {min(finite):.3g} to {max(finite):.3g}" if columns >= 72 and len(finite) > 2 else ""
            room = columns - MARGIN - sum(map(len, ends)) - (20 if columns >= 72 else 0)
            blocks = sparkline(finite, max(1, room)) if len(finite) > 1 else ""
            yield _named(one_line(title, MARGIN - 1), f"{ends[0]}{blocks}{ends[1] if blocks else ''}{extremes}")


def _time_lines(run: dict[str, Any]) -> Iterator[str]:
    seconds = dict(run["seconds"])
    elapsed = seconds.pop("elapsed")
    if elapsed:
        shares = sorted(seconds.items(), key=lambda item: -item[1])
        yield _named(
            "time", ", ".join(f"{phase} {value / elapsed:.0%}" for phase, value in shares if value > elapsed / 200)
        )
        if run["rounds"]:
            overlap = ", generation overlaps training" if sum(seconds.values()) > 1.02 * elapsed else ""
            yield _named("", f"{duration(elapsed / run['rounds'])} per round{overlap}")


def _checkpoint_lines(run: dict[str, Any]) -> Iterator[str]:
    names = list(run["checkpoints"])
    saved = [name for name in names if "policy" in run["checkpoints"][name]]
    with_samples = [name for name in names if "samples.jsonl" in run["checkpoints"][name]]
    for title, rounds in (("checkpoints", saved), ("samples of", with_samples)):
        if rounds:
            first = f"{rounds[0]} to " if len(rounds) > 1 else ""
            yield _named(title, f"{first}{rounds[-1]}" + (f" ({len(rounds)})" if len(rounds) > 2 else ""))
    if best := run["best"]:
        yield _named("best", f"{best['checkpoint']}: {best['metric']} {best['value']:.4g}")


def _finding_lines(run: dict[str, Any], columns: int) -> Iterator[str]:
    worst = run["findings"][:MAX_WARNINGS]
    for number, finding in enumerate(worst):
        last = finding["last_round"]
        rounds = f"since round {finding['first_round']}" if last is None else f"until round {last}"
        more = len(run["findings"]) - len(worst)
        remainder = f", and {more} more" if more and number == len(worst) - 1 else ""
        text = f"{visible(finding['title'], 300)} ({finding['severity']} {rounds}){remainder}"
        for place, line in enumerate(_wrapped(text, columns - MARGIN)):
            yield _named("" if place else "finding", line)


def _warning_lines(run: dict[str, Any]) -> Iterator[str]:
    worst = run["warnings"][:MAX_WARNINGS]
    for number, warning in enumerate(worst):
        count = f"{warning['count']}x " if warning["count"] > 1 else ""
        more = len(run["warnings"]) - len(worst)
        kinds = f" (and {more} more kinds in log.txt)" if more and number == len(worst) - 1 else ""
        title = "error" if warning["level"] != "WARNING" else "warning"
        yield _named(title, f"{count}{visible(warning['message'], 300)}{kinds}")


def _next_lines(path: Path, run: dict[str, Any]) -> Iterator[str]:
    name = shlex.quote(str(path))
    yield _named("next", f"slimectl view {name}")
    if run["findings"]:
        yield _named("", f"slimectl diagnose {name}")
    if run["state"] == "running":
        yield _named("", f"slimectl inspect {name} --follow")
    elif run["state"] == "stopped" and run["rounds"]:
        yield _named("", f"slimectl run --resume {name}")
    if run["samples_files"]:
        yield _named("", f"slimectl inspect {name} --sort reward --explain")


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that shows two digits or more.

    >>> duration(0.25), duration(95), duration(5000), duration(20_000), duration(300_000)
    ('0.25 s', '95 s', '83 min', '5.6 h', '83 h')
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36_000 else f"{seconds / 3600:.0f} h"
