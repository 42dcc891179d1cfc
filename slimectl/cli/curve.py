"""Terminal summary at the end of a run: reward curve, accuracies, next commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimectl import stdio
from slimectl.recipes import Recipe

if TYPE_CHECKING:
    from slimectl.runtime.run import TrainingRun


def closing_words(job: TrainingRun, recipe: Recipe) -> None:
    """Print the reward curve, accuracies before and after, and next commands."""
    journal = job.journal
    if job.settings.track.plot and len(journal.scores) > 1:
        stdio.say(curve(journal.scores, title="mean reward of each round"))
    before_after = journal.evaluations
    for name in job.settings.eval.data:
        key = f"eval/{name}_accuracy"
        if len(before_after) > 1:
            first, last = before_after[0][1][key], before_after[-1][1][key]
            stdio.say(f"{name}: accuracy {first:.3f} before, {last:.3f} after ({last - first:+.3f})")
    commands = [line.format(run=job.folder.path) for line in recipe.words.get("next", [])]
    if commands:
        stdio.say("try next:\n" + "\n".join(f"  {line}" for line in commands))


def curve(points: Sequence[tuple[int, float]], *, title: str) -> str:
    """Plot (round, value) points as text, as wide as the terminal up to 80 columns."""
    import shutil

    import plotext

    width = min(80, shutil.get_terminal_size().columns)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, 14)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    plotext.title(title)
    plotext.xlabel("round")
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines())
