"""slimectl metrics"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from slimectl.cli.options import AsJson
from slimectl.errors import SettingsError

if TYPE_CHECKING:
    from slimectl.data.metrics_catalogue import Metric


def metrics(
    pattern: Annotated[str | None, typer.Argument(help="Part of a metric's name")] = None,
    naming: Annotated[str | None, typer.Option("--naming", help="Metric names of slime or roll. Default: both")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table")] = False,
    as_json: AsJson = False,
) -> None:
    """List every metric with its unit and definition.

    Example:

        slimectl metrics rollout/ --naming slime
    """
    from slimectl.data.metrics_catalogue import CATALOGUE

    if naming not in (None, "slime", "roll"):
        raise SettingsError(f"--naming {naming}: give slime or roll")
    matches = [
        metric
        for metric in CATALOGUE
        if (pattern is None or pattern in metric.name) and naming in (None, metric.naming)
    ]
    if not matches:
        raise SettingsError(f"{pattern}: no metric name contains this. `slimectl metrics` lists all")
    if markdown and not as_json:
        print(markdown_table(matches))
        return
    for metric in matches:
        print(json.dumps(asdict(metric)) if as_json else _entry(metric))


def _entry(metric: Metric) -> str:
    unit = f" [{metric.unit}]" if metric.unit else ""
    return f"{metric.name}{unit}\n    {metric.definition}"


def markdown_table(metrics: Iterable[Metric]) -> str:
    """Return a Markdown table of metrics."""
    return "\n".join(["| name | unit | axis | definition |", "|---|---|---|---|", *map(_row, metrics)])


def _row(metric: Metric) -> str:
    """Return a row of a Markdown table, with bars escaped."""
    definition = metric.definition.replace("|", r"\|")
    return f"| `{metric.name}` | {metric.unit} | `{metric.axis}` | {definition} |"
