"""A report on runs as Markdown: result, settings, curves, findings, evaluations, samples, versions, how to repeat it.

Everything comes from the run's folder. What a run recorded may contain anything, so it is shown as code.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from slimectl.cli.inspect_samples import Place, compact, explanations, indexed
from slimectl.cli.options import Selection
from slimectl.cli.plot import Chart, charts_of
from slimectl.cli.run_summary import duration, run_facts
from slimectl.cli.score import explanation_text
from slimectl.cli.terminal import sparkline, visible
from slimectl.cli.viewer.conversation import conversation
from slimectl.cli.viewer.library import Library, RunSource, SamplesFile
from slimectl.data.metrics_catalogue import evaluation_results
from slimectl.data.ownership import read_manifest
from slimectl.diagnosis import Finding, diagnose_run
from slimectl.errors import SettingsError, SlimectlError
from slimectl.system.redaction import MASK, redact_text
from slimectl.system.stdio import quantity

MAX_TEXT = 3000
"""Maximum characters shown of a message of a sample."""
MAX_VALUE = 200
"""Maximum characters shown of a value in a table."""
SHOWN = 2
"""Best and worst samples of one run. Several runs show one of each."""
MAX_RUNS_WITH_SAMPLES = 6
MAX_POINTS = 24
"""Blocks of a curve in a table."""
PIPE = r"\|"
TITLES = {"memory_gib": "memory (GiB)", "gpus": "GPUs", "cores": "CPU cores"}

Row = Sequence[str]


def code(text: object, limit: int = MAX_VALUE) -> str:
    """Return a value of any content as Markdown that shows it as code in one line.

    >>> code("a|b"), code("`x`")
    ('`a|b`', '`` `x` ``')
    """
    line = visible(text, limit).replace("\n", "␊").replace("\t", " ")
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") or not line.strip() else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def plain(text: object, limit: int = 1000) -> str:
    """Return a text of any content as Markdown that shows it unchanged in one line.

    >>> plain("2*3 <b>")
    '2\\\\*3 \\\\<b\\\\>'
    """
    line = visible(text, limit).replace("\n", "␊").replace("\t", " ")
    return re.sub(r"([\\`*_\[\]<>#&~$])", r"\\\1", line)


def fence(text: object, language: str = "text", limit: int = MAX_TEXT) -> str:
    """Return a text of any content as a block of code, whose fence is longer than any in the text."""
    shown = visible(text, limit)
    ticks = "`" * max(3, max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    return f"{ticks}{language}\n{shown}\n{ticks}"


def table(head: Row, rows: Sequence[Row]) -> str:
    """Return a table of cells that are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', PIPE) for cell in line)} |" for line in lines)


@dataclass
class Report:
    """The sections of a report on the runs of a library. `pictures` returns the Markdown of drawn charts."""

    library: Library
    pictures: Callable[[Sequence[Chart]], str] = lambda charts: ""
    runs: list[RunSource] = field(init=False)
    summaries: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = list(self.library.runs.values())
        self.summaries = {run.id: run_facts(run.path) for run in self.runs}

    def markdown(self) -> str:
        """Return the report. Secrets are masked."""
        names = ", ".join(code(run.name, 60) for run in self.runs[:4]) + (", …" if len(self.runs) > 4 else "")
        parts = [f"# {'Report on' if len(self.runs) == 1 else f'Report on {len(self.runs)} runs:'} {names}"]
        for title, section in (
            ("Result", self._result), ("Settings", self._settings), ("Curves", self._curves),
            ("Findings", self._findings), ("Evaluations", self._evaluations), ("Samples", self._samples),
            ("Versions, hardware and data", self._origin), ("Run it again", self._commands),
        ):  # fmt: skip
            if body := [part for part in section() if part]:
                parts += [f"## {title}", *body]
        return redact_text("\n\n".join(parts) + "\n")

    def _each(self, section: Callable[[RunSource, dict[str, Any]], Iterator[str]]) -> Iterator[str]:
        """Yield the section of each run, under its name if there are several."""
        for run in self.runs:
            body = list(section(run, self.summaries[run.id]))
            if body and len(self.runs) > 1:
                yield f"### {code(run.name, 60)}"
            yield from body

    def _result(self) -> Iterator[str]:
        for run in self.runs:
            start = "- " if len(self.runs) > 1 else ""
            yield start + " ".join(_sentences(run, self.summaries[run.id]))

    def _settings(self) -> Iterator[str]:
        if len(self.runs) > 1:
            rows = [
                [code(row["name"]), *(code(_toml(value)) for value in row["values"])]
                for row in self.library.settings_table()["rows"]
                if row["name"] not in ("run.name", "run.dir")
            ]
            yield "The settings that differ between the runs:" if rows else "The runs have the same settings."
            if rows:
                yield table(["setting", *(code(run.name, 60) for run in self.runs)], rows)
            return
        settings = self.summaries[self.runs[0].id]["settings"]
        base, values = settings["differ_from"], settings["values"]
        if not values:  # a run needs at least a model and data, which the defaults lack
            yield (
                f"The same as the recipe {code(base)}." if base != "defaults" else "This version cannot read run.toml."
            )
            return
        of = "default" if base == "defaults" else code(base)
        rows = [[code(name), code(value), code(default)] for name, (value, default) in values.items()]
        yield f"The settings that differ from {f'the recipe {of}' if base != 'defaults' else 'the defaults'}:"
        yield table(["setting", "value", of], rows)

    def _curves(self) -> Iterator[str]:
        try:
            charts = charts_of(self.runs, axis="round")
        except SettingsError:
            yield "No metrics yet."
            return
        yield self.pictures(charts)
        compared = len({line.label for chart in charts for line in chart.lines}) > 1
        rows = []
        for chart in charts:
            for line in chart.lines:
                values = [value for _, value in line.points]
                blocks = sparkline(values, MAX_POINTS) if len(values) > 1 else ""
                rows.append([
                    code(chart.title), *([code(line.label)] if compared else []), _number(values[0]), blocks,
                    _number(values[-1]), f"{_number(min(values))} to {_number(max(values))}",
                ])  # fmt: skip
        yield table(["metric", *(["run"] if compared else []), "first", "curve", "last", "range"], rows)

    def _findings(self) -> Iterator[str]:
        def of_run(run: RunSource, summary: dict[str, Any]) -> Iterator[str]:
            findings = diagnose_run(run.path)
            yield from map(_finding, findings)
            if warnings := summary["warnings"][:3]:
                yield "From its log:\n\n" + "\n".join(map(_warning, warnings))
            elif not findings:
                yield "None."

        yield from self._each(of_run)

    def _evaluations(self) -> Iterator[str]:
        compared = len(self.runs) > 1
        rows: list[Row] = []
        for run in self.runs:
            rows += [[*([code(run.name, 60)] if compared else []), *row] for row in _evaluation_rows(run)]
        if rows:
            head = ["evaluation", "measure", "before", "after", "change", "best"]
            yield table([*(["run"] if compared else []), *head], rows)
            yield "± is the standard error of the mean over prompts."

    def _samples(self) -> Iterator[str]:
        if len(self.runs) > MAX_RUNS_WITH_SAMPLES:
            yield f"See them with {code(f'slimectl view {shlex.join(str(run.path) for run in self.runs)}', 2000)}."
            return

        def of_run(run: RunSource, _: dict[str, Any]) -> Iterator[str]:
            yield from _sample_blocks(self.library, run, count=SHOWN if len(self.runs) == 1 else 1)

        yield from self._each(of_run)

    def _origin(self) -> Iterator[str]:
        yield from self._each(lambda run, _: _origin(run))

    def _commands(self) -> Iterator[str]:
        yield from self._each(_command)


def _sentences(run: RunSource, summary: dict[str, Any]) -> Iterator[str]:
    """Yield what was trained on what for how long, and how the reward or loss and the evaluations changed."""
    settings, rounds, planned = run.settings, summary["rounds"], summary["planned"]
    model = settings.get("model.path") or settings.get("model.card")
    start = " from random weights" if settings.get("model.card") and not settings.get("model.path") else ""
    data = settings.get("rollout.data") or settings.get("rollout.env") or []
    sources = data if isinstance(data, list) else [data]
    on = f" on {', '.join(code(source, 80) for source in sources[:3])}{', …' if len(sources) > 3 else ''}"
    of = f" of {planned}" if planned and planned != rounds else ""
    elapsed = f" in {duration(summary['seconds']['elapsed'])}" if summary["seconds"]["elapsed"] else ""
    stopped = "stopped after training" if rounds else "stopped before it trained"
    verb = {"running": "is training", "finished": "trained"}.get(run.state, stopped)
    yield (
        f"{code(run.name, 60)} {verb} {code(model, 80) if model else 'a model'}{start}"
        f" with {code(settings.get('algorithm.name', 'grpo'))}{on if sources else ''}:"
        f" {quantity(rounds, 'round')}{of}{elapsed}."
    )
    changes = []
    if points := [value for _, value in summary["points"] if math.isfinite(value)]:
        changes.append(_change(f"the {summary['metric']}", points[0], points[-1]))
    for name in dict.fromkeys(evaluation["name"] for evaluation in summary["evaluations"]):
        values = [item["value"] for item in summary["evaluations"] if item["name"] == name]
        if len(values) > 1:
            dataset, _, kind = name.rpartition("/" if name.endswith("/loss") else "_")
            changes.append(_change(f"the {kind} of {code(dataset, 60)}", values[0], values[-1]))
    if changes:
        text = ", ".join(changes[:3])
        yield text[0].upper() + text[1:] + "."


def _change(name: str, first: float, last: float) -> str:
    if _number(first) == _number(last):
        return f"{name} stayed at {_number(last)}"
    return f"{name} {'rose' if last > first else 'fell'} from {_number(first)} to {_number(last)}"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _toml(value: Any) -> str:
    from slimectl.settings.keys import toml_value

    return toml_value(value)


def _finding(finding: Finding) -> str:
    """Return a finding with its causes, remedies and commands."""
    lines = [f"**{plain(finding.severity)}: {plain(finding.title)}** ({plain(finding.place)}, {code(finding.kind)})"]
    for name, texts in (("Likely causes", finding.causes), ("What to try", finding.remedies)):
        if texts:
            lines.append(f"{name}:\n\n" + "\n".join(f"{number}. {plain(text)}" for number, text in enumerate(texts, 1)))
    if finding.commands:
        lines.append(fence("\n".join(finding.commands), "sh"))
    lines.append(f"See {code(finding.link)}.")
    return "\n\n".join(lines)


def _warning(warning: dict[str, Any]) -> str:
    times = f" ({warning['count']} times)" if warning["count"] > 1 else ""
    return f"- {plain(warning['level'].lower())}{times}: {plain(warning['message'], 300)}"


def _evaluation_rows(run: RunSource) -> Iterator[Row]:
    """Yield a row for each measure of each evaluation: before, after, change and best, with standard errors."""
    values: dict[tuple[str, str], list[tuple[int, float, float | None]]] = {}
    for line in run.all_metrics():
        for key, (value, error) in evaluation_results(line["metrics"]).items():
            values.setdefault(key, []).append((line.get("rollout_id", line["step"]), value, error))
    for (dataset, measure), points in sorted(values.items(), key=lambda item: item[0][0]):
        first, last = points[0], points[-1]
        best = (min if measure == "loss" else max)(points, key=lambda point: point[1])
        change = f"{last[1] - first[1]:+.3g}" if len(points) > 1 else ""
        yield [code(dataset, 60), measure, _measured(first), _measured(last) if len(points) > 1 else "", change,
               _measured(best)]  # fmt: skip


def _measured(point: tuple[int, float, float | None]) -> str:
    number, value, error = point
    return f"{_number(value)}{f' ± {error:.2g}' if error is not None else ''} (round {number})"


def _sample_blocks(library: Library, run: RunSource, *, count: int) -> Iterator[str]:
    """Yield the best and the worst samples of the last evaluation with rewards, or else of the last round."""
    import numpy as np

    files = run.files()
    for file in [*(file for file in files[::-1] if file.kind == "evaluation"), *files[::-1]]:
        ((_, index),) = indexed(library, [file])
        rewards = index.columns()["reward"]
        order = [row for row in np.argsort(-rewards, kind="stable").tolist() if math.isfinite(rewards[row])]
        if not order:
            continue
        best, worst = order[:count], [row for row in order[::-1] if row not in order[:count]][:count]
        names = ["best"] * len(best) + ["worst"] * len(worst)
        if rewards[order[0]] == rewards[order[-1]]:  # none is better than another one
            worst, names = [], ["sample"] * len(best)
        places = [Place(file, index, row) for row in (*best, *worst)]
        samples, mean = quantity(len(order), "sample"), float(np.nanmean(rewards[order]))
        yield f"From {plain(file.title)}, {samples} with a mean reward of {_number(mean)}."
        for place, reason, name in zip(places, _reasons(library, places), names, strict=True):
            yield _sample(place, reason, name)
        return


def _reasons(library: Library, places: Sequence[Place]) -> list[str]:
    """Return why each sample has its reward: from its record, or else graded again, if that asks no server."""
    selection = Selection()
    reasons = explanations(library, places, selection)
    if any(reason is None for reason in reasons) and places and not _asks_servers(library, places[0].file):
        selection.explain = True
        with suppress(SlimectlError):
            reasons = explanations(library, places, selection)
    return [explanation_text(reason) if reason is not None else "" for reason in reasons]


def _asks_servers(library: Library, file: SamplesFile) -> bool:
    """Return whether the verifier of a file's run may call a server or a judge model."""
    settings = library.run(file.run or "").settings
    texts = json.dumps([value for name, value in settings.items() if re.match(r"(score|eval)\.", name)])
    return any(word in texts for word in ("judge", "rubric", "remote_rm", "://"))


def _sample(place: Place, reason: str, name: str) -> str:
    record = place.record()
    reward, label = (code(compact(record.get(name)), 400) for name in ("reward", "label"))
    status = code(record.get("status", "completed"), 20)
    parts = [f"**{name}** {int(record['index'])}: reward {reward}, label {label}, {status}"]
    for message in conversation(record, None):
        parts += [f"{plain(message.role, 40)}:", fence(message.text)]
    return "\n\n".join([*parts, *([f"Why: {code(reason, 400)}"] if reason else [])])


def _origin(run: RunSource) -> Iterator[str]:
    """Yield the versions, the hardware and the data of a run, from its manifest."""
    manifest = read_manifest(run.path) or {}
    recorded, inputs = (manifest.get(name) for name in ("environment", "inputs"))
    summary = {"slimectl": manifest.get("slimectl")} | (recorded if isinstance(recorded, dict) else {})
    packages = summary.pop("packages", None)
    summary |= packages if isinstance(packages, dict) else {}
    summary = {
        TITLES.get(name, name): ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in summary.items()
    }
    summary["settings"] = f"SHA-256 {digest}" if (digest := manifest.get("settings_sha256")) else None
    rows = [[code(name), code(value)] for name, value in summary.items() if value]
    for name, digest in (inputs if isinstance(inputs, dict) else {}).items():
        rows.append([f"data {code(name)}", code(f"SHA-256 {digest}")])
    if rows:
        yield table(["what", "value"], rows)


def _command(run: RunSource, summary: dict[str, Any]) -> Iterator[str]:
    """Yield the command that starts the run again."""
    manifest, (base, values) = read_manifest(run.path) or {}, summary["settings"].values()
    recipe, command = manifest.get("recipe"), manifest.get("command", "run")
    if not values and base == "defaults":
        return
    arguments = ["slimectl", str(command)]
    if command == "train":
        data = run.settings.get("rollout.data", [])
        arguments += map(str, data if isinstance(data, list) else [data])
    elif isinstance(recipe, str) and base != "defaults":
        arguments.append(recipe)
    secrets = [name for name, (value, _) in values.items() if MASK in value]
    assignments = {name: value for name, (value, _) in values.items() if name not in secrets}
    lines = [shlex.join([*arguments, "--name", "again"])]
    lines += [
        f"-s {shlex.quote(f'{name}={value}')}"
        for name, value in assignments.items()
        if not (command == "train" and name == "rollout.data")
    ]
    yield fence(" \\\n  ".join(lines), "sh", limit=20_000)
    if secrets:
        yield f"Set these secrets first: {', '.join(map(code, secrets))}."
