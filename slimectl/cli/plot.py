"""Draws curves of runs as PNG or SVG, with matplotlib: a chart per metric, a line per run or group of seeds."""

from __future__ import annotations

import io
import math
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.cli.terminal import visible
from slimectl.cli.viewer.library import Library, RunSource
from slimectl.cli.viewer.run_table import seed_groups
from slimectl.data.atomic_replace import storage_errors
from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.errors import MissingExtraError, SettingsError
from slimectl.system.stdio import quantity

FORMATS = {".png": "png", ".svg": "svg"}
AXES = {"step": "optimizer step", "round": "round", "time": "seconds"}
"""Label of the x axis by its name."""
FIRST = (
    "rollout/raw_reward", "train/loss", "train/pair_accuracy", "eval/*_accuracy", "eval/*/loss", "rollout/entropy",
    "train/entropy_loss", "train/ppo_kl", "train/kl_loss", "rollout/response_len/mean", "train/grad_norm",
)  # fmt: skip
"""Metrics that are drawn without --metric, unless they are always 0. `*` is the name of an evaluation."""
HUES = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c92a2a", "#0c8599", "#b08900", "#e64980", "#a0694b", "#6b7785")
"""Colours of the lines, as in `slimectl view`."""
MAX_CHARTS = 24
STYLE = {
    "svg.hashsalt": "slimectl", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9, "axes.grid": True,
    "grid.color": "#e6e6e6", "axes.edgecolor": "#888888", "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.formatter.useoffset": False,
}  # fmt: skip
"""A fixed salt makes the identifiers in an SVG the same every time. Names of runs may contain $."""
WIDTH, HEIGHT, COLUMNS = 4.2, 2.5, 3
"""Size of a chart in inches, and charts per row."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """The values of a metric in one run, or the mean over seeds with one standard deviation below and above."""

    label: str
    colour: str
    points: Points
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Chart:
    """The lines of one metric."""

    metric: str
    lines: list[Line]

    @property
    def title(self) -> str:
        """The metric with its unit."""
        unit = next((metric.unit for metric in CATALOGUE if metric.matches(self.metric)), "")
        return f"{self.metric} ({unit})" if unit else self.metric


def draw_runs(paths: Sequence[Path], file: Path, *, metrics: Sequence[str] = (), axis: str = "step") -> str:
    """Draw metrics of runs into a PNG or SVG file. Return a line about it.

    Raises SettingsError for paths without runs, unknown metrics and another suffix, and MissingExtraError.
    """
    if file.suffix.lower() not in FORMATS:
        raise SettingsError(f"--plot {shlex.quote(str(file))}: give a file that ends in {' or '.join(FORMATS)}")
    if axis not in AXES:
        raise SettingsError(f"--axis: {axis!r:.40} is unknown. Choose one of {', '.join(AXES)}")
    library = Library(paths)
    if library.named_files or not library.runs:
        stranger = next(iter(library.named_files.values())).path if library.named_files else paths[0]
        raise SettingsError(
            f"{stranger}: not a run. --plot draws runs: slimectl inspect runs/NAME --plot {shlex.quote(str(file))}"
        )
    charts = charts_of(list(library.runs.values()), metrics=metrics, axis=axis)
    drawn = drawing(charts[:MAX_CHARTS], kind=FORMATS[file.suffix.lower()], axis=axis)
    with storage_errors(file):
        file.write_bytes(drawn)
    omitted = f", {len(charts) - MAX_CHARTS} omitted (choose with --metric)" if len(charts) > MAX_CHARTS else ""
    number = quantity(min(len(charts), MAX_CHARTS), "chart")
    return f"{file}: {number} of {quantity(len(library.runs), 'run')}{omitted}"


def charts_of(runs: Sequence[RunSource], *, metrics: Sequence[str] = (), axis: str = "step") -> list[Chart]:
    """Return a chart for each of FIRST that a run has, or for each metric whose name contains one of `metrics`.

    Raises SettingsError if there is none.
    """
    series = {run.id: _series(run, axis) for run in runs}
    names = sorted({name for values in series.values() for name in values})
    changing = {name for values in series.values() for name, points in values.items() if any(y for _, y in points)}
    if unknown := [text for text in metrics if not any(text in name for name in names)]:
        some = ", ".join(names[:8]) or "none yet"
        raise SettingsError(f"--metric: no metric of these runs contains {unknown[0]!r:.60}. They have {some}")
    selection = _matching(metrics, names) if metrics else _first([name for name in names if name in changing])
    if not selection:
        raise SettingsError(f"{runs[0].path}: has no metrics to draw yet. Wait for the end of its first round")
    entries = list(_entries(runs))
    return [Chart(name, list(_lines(name, entries, series))) for name in selection]


def drawing(charts: Sequence[Chart], *, kind: str, axis: str = "step") -> bytes:
    """Return charts as a PNG or SVG picture, the same bytes for the same values. Raises MissingExtraError."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise MissingExtraError("matplotlib", extra="plot", wanted_by="drawing curves") from None
    columns = min(COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    with style.context(["default", STYLE]), warnings.catch_warnings(action="ignore"):  # a name in an unknown script
        labels = {line.label: line for chart in charts for line in chart.lines}
        has_legend = len(labels) > 1 or any(line.low for line in labels.values())
        extra = 0.25 * -(-len(labels) // (2 * columns)) if has_legend else 0.0
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + extra), layout="constrained")
        for number, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, number + 1), chart, axis)
        if has_legend:
            lines = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
            figure.legend(list(lines.values()), list(lines), loc="outside lower left", ncols=2 * columns, frameon=False)
        output = io.BytesIO()
        figure.savefig(output, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return output.getvalue()


def _draw(axes: Any, chart: Chart, axis: str) -> None:
    """Draw a chart. Evaluations have a dot for each value."""
    axes.set_title(chart.title)
    axes.set_xlabel(AXES[axis])
    for line in chart.lines:
        xs, ys = zip(*line.points, strict=True)
        dots = "o" if chart.metric.startswith("eval/") or len(xs) == 1 else None
        # matplotlib leaves a label that begins with _ out of the legend.
        axes.plot(xs, ys, color=line.colour, linewidth=1.4, marker=dots, markersize=3.5, label=f" {line.label}")
        if line.low is not None:
            axes.fill_between(xs, line.low, line.high, color=line.colour, alpha=0.18, linewidth=0)


def _series(run: RunSource, axis: str) -> dict[str, Points]:
    """Return the finite values of each metric of a run over steps, rounds or seconds."""
    points: dict[str, list[tuple[int, int, float]]] = {}
    seconds: dict[int, float] = {}
    for line in run.all_metrics():
        step, metrics = line["step"], line["metrics"]
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value) and not name.endswith("/step"):
                points.setdefault(name, []).append((step, line.get("rollout_id", step), value))
        if not any(name.startswith("warmup/") for name in metrics):
            time = metrics.get("perf/total_time", 0.0) + metrics.get("perf/eval_time", 0.0)
            seconds[step] = seconds.get(step, 0.0) + time
    elapsed, total = dict[int, float](), 0.0
    for step in sorted(seconds):
        total += seconds[step]
        elapsed[step] = total
    return {
        name: [
            (number if axis == "round" else elapsed[step] if axis == "time" else step, value)
            for step, number, value in values
            if axis != "time" or step in elapsed
        ]
        for name, values in points.items()
    }


def _matching(metrics: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that are one of `metrics`, or else contain it, in the order of `metrics`."""
    matches = [name for text in metrics for name in ([text] if text in names else names) if text in name]
    return list(dict.fromkeys(matches))


def _first(names: Sequence[str]) -> list[str]:
    selection: list[str] = []
    for pattern in FIRST:
        start, star, end = pattern.partition("*")
        matches = [name for name in names if name.startswith(start) and name.endswith(end)] if star else [pattern]
        selection += [name for name in matches if name in names]
    skipped = {"train/entropy_loss"} if "rollout/entropy" in selection else set()
    if "train/pair_accuracy" in names:  # preferences, whose samples have fixed rewards
        skipped |= {"rollout/raw_reward"}
    elif "rollout/raw_reward" in selection:
        skipped |= {"train/loss"}
    return [name for name in selection if name not in skipped]


def _entries(runs: Sequence[RunSource]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (label, colour, runs) of each group of seeds and each other run, in the order of the first run."""
    group_of = {run: group for group in seed_groups(runs) for run in group["runs"]}
    done: set[str] = set()
    number = 0
    for run in runs:
        if run.id in done:
            continue
        group = group_of.get(run.id)
        members = group["runs"] if group else [run.id]
        label = f"{group['name']} ({len(members)} seeds)" if group else run.name
        yield visible(label, 60), HUES[number % len(HUES)], members
        done |= set(members)
        number += 1


def _lines(
    name: str, entries: Sequence[tuple[str, str, list[str]]], series: dict[str, dict[str, Points]]
) -> Iterator[Line]:
    for label, colour, members in entries:
        lines = [series[run][name] for run in members if name in series[run]]
        if len(lines) > 1:
            yield Line(label, colour, *mean_and_band(lines))
        elif lines:
            yield Line(label, colour, lines[0])


def mean_and_band(lines: Sequence[Points]) -> tuple[Points, list[float], list[float]]:
    """Return the mean of lines at each x of the longest, and the mean minus and plus one standard deviation (n - 1).

    Lines are interpolated, and end at their last point. Values of one line at the same x are averaged.
    """
    tables = [np.array(line, dtype=float).T for line in lines]
    xs = np.unique(max(tables, key=lambda table: len(table[0]))[0])
    values = []
    for table_x, table_y in tables:
        at, rows = np.unique(table_x, return_inverse=True)
        means = np.bincount(rows, weights=table_y) / np.bincount(rows)
        values.append(np.interp(xs, at, means, left=np.nan, right=np.nan))
    stacked = np.array(values)
    mean, counts = np.nanmean(stacked, axis=0), np.isfinite(stacked).sum(axis=0)
    squares = np.nansum((stacked - mean) ** 2, axis=0)
    deviation = np.sqrt(squares / np.maximum(counts - 1, 1))
    return list(zip(xs.tolist(), mean.tolist(), strict=True)), (mean - deviation).tolist(), (mean + deviation).tolist()
