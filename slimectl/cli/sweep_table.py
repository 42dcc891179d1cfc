"""The table of a sweep: live on a terminal, elsewhere a line for every run, and the result at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slimectl.cli.progress import in_foreground, is_drawn
from slimectl.cli.terminal import one_line, width
from slimectl.settings.keys import toml_value
from slimectl.sweeps.folder import Run
from slimectl.sweeps.scheduler import Observer, Row, Sweeper
from slimectl.system import stdio

REDRAW_S = 1.0
MARGIN = 8
"""Lines of the terminal that the live table leaves free: its head, its frame and the summary."""
MIN_STATE = 20
"""Minimum columns of the state."""
MAX_REASONS = 3
"""Maximum failures that are explained below the table."""
MAX_VALUE = 24
"""Maximum columns of a setting's value."""
STYLES = {"running": "cyan", "failed": "red", "finished": "green"}


def columns(sweeper: Sweeper) -> list[str]:
    """Return the heads of the table. A setting is named by its last part, unless two settings share it."""
    names = list(sweeper.plan.sweep.settings)
    leaves = [name.rpartition(".")[2] for name in names]
    heads = [leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)]
    return ["trial", *heads, "seeds", "rounds", sweeper.plan.sweep.metric, "state"]


def cells(row: Row, sweeper: Sweeper) -> list[str]:
    """Return the cells of a trial."""
    values = [
        f"{value:.6g}" if isinstance(value, float) else one_line(toml_value(value), MAX_VALUE)
        for value in row.trial.values.values()
    ]
    scored = sum(outcome.score is not None for outcome in row.outcomes.values())
    rounds, state, newest = str(row.rounds or ""), row.state, None
    if row.unfinished and not row.reason:
        points = [run.newest(sweeper.plan.sweep.metric) for run in row.unfinished]
        rounds = f"{max(number for number, _ in points)}/{row.rounds or '?'}"
        newest = next((value for _, value in points if value is not None), None)
    if row.state == "failed":
        state = f"failed: {row.reason}"
    elif row.unfinished and newest is not None:
        state = f"{row.state}, {newest:.4g}"
    return [row.trial.name, *values, f"{scored}/{row.seeds}", rounds, score_text(row), state]


def score_text(row: Row) -> str:
    """Return mean ± standard deviation over the seeds, or the score of one."""
    if row.score is None:
        return "-"
    spread = row.score.spread
    return f"{row.score.mean:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")


@contextmanager
def shown(sweeper: Sweeper, slots: int) -> Iterator[None]:
    """Show the sweep while it runs: a live table on a terminal, or a line whenever a run starts or ends."""
    path, plan = sweeper.folder.path, sweeper.plan
    seeds = stdio.quantity(len(plan.sweep.seeds), "seed")
    stdio.note(f"{path}: {stdio.quantity(len(plan.trials), 'trial')}, {seeds}, {stdio.quantity(slots, 'slot')}")
    if not is_drawn(of_pipe=False):
        sweeper.observer = Observer(
            started=lambda run: stdio.note(f"{_name(run)}: started, {run.trial.assignment}".removesuffix(", ")),
            ended=lambda run, text: stdio.note(f"{_name(run)}: {text}{_value(sweeper, run)}"),
        )
        yield
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        drawn = 0.0

        def tick() -> None:
            nonlocal drawn
            if time.monotonic() - drawn > REDRAW_S and in_foreground():
                drawn = time.monotonic()
                live.update(live_table(sweeper, shutil.get_terminal_size().lines - MARGIN), refresh=True)

        sweeper.observer = Observer(tick=tick)
        yield


def _name(run: Run) -> str:
    return f"{run.trial.name}/seed_{run.seed}"


def _value(sweeper: Sweeper, run: Run) -> str:
    row = next(row for row in sweeper.rows() if row.trial is run.trial)
    outcome = row.outcomes.get(run.seed)
    score = outcome and outcome.score
    return "" if score is None else f", {sweeper.plan.sweep.metric} {score:.4g}"


def live_table(sweeper: Sweeper, limit: int) -> Any:
    """Return the table for rich, with at most `limit` trials: the running and the best ones."""
    from rich.table import Table

    rows = sweeper.rows()
    running = [row for row in rows if row.running]
    top_rows = [*running, *(row for row in rows if not row.running)][: max(limit, len(running))]
    table = Table(title=_title(rows), title_justify="left", box=None, pad_edge=False, header_style="bold")
    shown_rows = [row for row in rows if row in top_rows]
    heads, *lines = fitted([columns(sweeper), *(cells(row, sweeper) for row in shown_rows)], width())
    for head in heads:
        table.add_column(head, justify="left" if head in ("trial", "state") else "right", no_wrap=True)
    for row, line in zip(shown_rows, lines, strict=True):
        table.add_row(*line, style=STYLES.get(row.state, ""))
    if len(top_rows) < len(rows):
        table.caption = f"{len(rows) - len(top_rows)} more"
    return table


def fitted(lines: list[list[str]], limit: int) -> list[list[str]]:
    """Shorten the last column, so that the table has at most `limit` columns of text if the others leave room."""
    used_columns = sum(2 + max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1])
    return [[*line[:-1], one_line(line[-1], max(MIN_STATE, limit - used_columns))] for line in lines]


def _title(rows: Sequence[Row]) -> str:
    states = [row.state for row in rows]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{stdio.quantity(len(rows), 'trial')}: {', '.join(counts)}"


def finished(sweeper: Sweeper, *, is_done: bool, as_json: bool) -> Row | None:
    """Print the table, and which trial is best. Return that trial if the sweep is done."""
    rows = sweeper.rows()
    table = fitted([columns(sweeper), *(cells(row, sweeper) for row in rows)], width())
    column_widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        padded = [text.ljust(size) for text, size in zip(line, column_widths, strict=True)]
        (stdio.note if as_json else stdio.emit)("  ".join(padded).rstrip())
    for row in [row for row in rows if row.reason][:MAX_REASONS]:
        log = sweeper.folder.path / row.trial.name
        stdio.note(f"{row.trial} failed: {row.reason} ({log}/seed_*.log)")
    best = rows[0] if rows[0].is_complete and rows[0].is_last else None
    if best is not None and is_done:
        stdio.note(verdict(best, rows, sweeper))
    return best if is_done else None


def verdict(best: Row, rows: Sequence[Row], sweeper: Sweeper) -> str:
    """Return which trial is best, and whether the second is clearly worse."""
    text = f"best: {best.trial}, {sweeper.plan.sweep.metric} {score_text(best)}"
    if best.score is None:
        return text
    count = len(best.score.values)
    if count > 1:
        text += f" (mean ± standard deviation over {count} seeds)"
    second = next((row for row in rows[1:] if row.is_complete and row.rung == best.rung), None)
    if second is None or second.score is None:
        return text
    runner_up = f"{second.trial.name} ({score_text(second)})"
    if count == 1:
        return f"{text}. One seed has no spread, so the lead over {runner_up} may be chance. Add seeds to sweep.seeds"
    if best.score.is_separate(second.score):
        return f"{text}. {runner_up} is worse by more than both standard errors"
    return f"{text}. It is not separated from {runner_up}: their standard errors overlap. More seeds may separate them"
