"""slimectl metrics"""

from __future__ import annotations

from typing import Annotated

import typer


def metrics(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name")] = None,
) -> None:
    """List every metric with its unit and definition.

    Example:

        slimectl metrics rollout/
    """
    from slimectl.metrics import CATALOGUE

    for metric in CATALOGUE:
        if pattern is None or pattern in metric.name:
            unit = f" [{metric.unit}]" if metric.unit else ""
            print(f"{metric.name}{unit}\n    {metric.definition}")
