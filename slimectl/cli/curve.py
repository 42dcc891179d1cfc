"""Terminal summary at the end of a run: reward curve, accuracies, next commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimectl import stdio
from slimectl.recipes import Recipe

if TYPE_CHECKING:
    from slimectl.runtime.run import TrainingRun


INDEX_S = 2.0
"""Seconds that the end of a run spends on the samples of its last evaluation."""
MAX_PROMPT = 40
"""Longest prompt that stands in a command; a longer one is named by its group."""


def closing_words(job: TrainingRun, recipe: Recipe) -> None:
    """Print the curve of rewards or losses, accuracies before and after, and next commands."""
    recorder = job.recorder
    if job.settings.track.plot and len(recorder.scores) > 1:
        value = "mean reward" if job.settings.algorithm.trains_on == "rollouts" else "loss"
        stdio.note(curve(recorder.scores, title=f"{value} of each round"))
    for name in job.settings.eval.data:
        for result, key in (("accuracy", f"eval/{name}_accuracy"), ("loss", f"eval/{name}/loss")):
            values = [metrics[key] for _, metrics in recorder.evaluations if key in metrics]
            if len(values) > 1:
                change = f"{values[0]:.3f} before, {values[-1]:.3f} after ({values[-1] - values[0]:+.3f})"
                stdio.note(f"{name}: {result} {change}")
    path = job.folder.path
    commands = [f"slimectl view {path}", *_sample_commands(path, is_verified=job.settings.score.custom_rm_path is None)]
    commands += [line.format(run=path) for line in recipe.words.get("next", [])]
    stdio.note("try next:\n" + "\n".join(f"  {line}" for line in commands))


def _sample_commands(run: Path, *, is_verified: bool) -> Iterator[str]:
    """Yield the commands that show the worst answers of the last evaluation, and how the worst one changed over rounds.

    Those that a verifier graded are shown with the reason.
    """
    import numpy as np

    from slimectl.viewer.library import Library
    from slimectl.viewer.queries import prompt_text

    library = Library([run])
    file = next((file for file in list(library.files().values())[::-1] if file.kind == "evaluation"), None)
    if file is None:
        return
    index = library.index(file)
    index.extend(INDEX_S)
    rewards = index.columns()["reward"]
    if not np.isfinite(rewards).any():
        return
    record = index.record(int(np.nanargmin(rewards)))
    text = prompt_text(record.get("prompt", ""))
    name = text if text.isprintable() and 0 < len(text) <= MAX_PROMPT else str(record.get("group_index", 0))
    explain, reason = (" --explain", ", and why") if is_verified else ("", "")
    yield f"slimectl inspect {shlex.quote(str(file.path))} --sort reward{explain}    # the worst answers{reason}"
    yield f"slimectl inspect {shlex.quote(str(run))} --prompt {shlex.quote(name)}    # how this one changed"


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
