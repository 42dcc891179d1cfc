"""slimectl inspect"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slimectl.cli import tokens
from slimectl.cli.options import SETTINGS, CommonOptions, Selection, with_options
from slimectl.errors import SettingsError
from slimectl.system import stdio
from slimectl.system.model_files import follow_links


@dataclass
class OutputFiles:
    """Files that `slimectl inspect` writes about runs instead of printing: curves, or a trace of the timeline."""

    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves of runs as FILE.png or FILE.svg")
    ] = None
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Metric to draw, or part of its name (repeatable)"),
    ] = None
    axis: Annotated[str, typer.Option("--axis", help="x axis of --plot: step, round or time")] = "step"
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="FILE", help="Write a run's timeline as JSON for ui.perfetto.dev"),
    ] = None

    def write(self, paths: list[Path], *, force: bool) -> bool:
        """Write the file that was asked for, and print a line about it. Return whether there was one."""
        if self.plot is None and self.metric:
            raise SettingsError("--metric: chooses what --plot draws. Add --plot FILE.png")
        file = self.plot or self.perfetto
        if file is None:
            return False
        if file.exists() and not force:
            raise SettingsError(f"{file}: already exists. Add --force to replace it")
        if self.plot is not None:
            from slimectl.cli.plot import draw_runs

            stdio.note(draw_runs(paths, self.plot, metrics=self.metric or [], axis=self.axis))
        else:
            from slimectl.cli.perfetto import write_trace

            stdio.note(write_trace(paths[0], file))
        return True


@with_options(
    "paths rows condition sort prompt follow diff explain color_by mask plot metric axis perfetto model",
    SETTINGS,
    "as_json force",
)
def inspect(
    options: CommonOptions,
    selection: Selection,
    output: OutputFiles,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH…", help="A run, a round's folder, a samples file, or a folder with a manifest"),
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="Show one prompt over all rounds: part of its text, or its group number"
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new samples as they arrive")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Compare two files, rounds or runs on the same prompts")] = False,
    mask: Annotated[
        bool, typer.Option("--mask", help="Show trained tokens in green, or in [[ ]] without colours")
    ] = False,
) -> None:
    """Summarize a run, samples file or model directory, and show samples.

    Given two paths, compares them like `slimectl diff`.

    For a run, shows the samples that it kept of its rounds and evaluations. With --mask, shows token by token what is
    trained on in a file of samples, demonstrations or preferences (with -s algorithm.name=dpo). The model comes from
    the file's manifest or from --model. Rows are read as by `slimectl train` with the same -c and -s. With --plot,
    runs that differ only in seeds are one line with a band of one standard deviation.

    Example:

        slimectl inspect runs/quickstart
    """
    from slimectl.cli import inspect_samples, inspect_views

    modes = {
        "--mask": mask,
        "--diff": diff,
        "--prompt": prompt is not None,
        "--follow": follow,
        "--plot": output.plot is not None,
        "--perfetto": output.perfetto is not None,
    }
    _check(paths, [name for name, is_set in modes.items() if is_set], selection)
    if mask and selection.as_json:
        raise SettingsError("--mask and --json cannot be combined. With --json, a sample's mask is its loss_mask")
    paths = [follow_links(path) for path in paths]
    path = paths[0]
    selection.model = options.model
    if output.write(paths, force=options.force):
        return
    if mask:
        inspect_views.show_masks(path, selection.rows, options.resolve().settings)
    elif diff:
        from slimectl.cli import comparison

        comparison.show_difference(path, paths[1], selection)
    elif len(paths) == 2:
        from slimectl.cli import comparison

        comparison.show_comparison(path, paths[1], selection)
    elif prompt is not None:
        inspect_samples.show_prompt(path, prompt, selection)
    elif follow:
        from slimectl.cli.follow import follow_samples

        follow_samples(path, selection)
    elif selection.condition or selection.sort or selection.color_by or selection.explain:
        inspect_samples.show_selection(path, selection)
    else:
        inspect_views.show(path, selection)


def _check(paths: list[Path], modes: list[str], selection: Selection) -> None:
    """Raise SettingsError for a missing path, or for options that cannot be combined."""
    color_by, explain = selection.color_by, selection.explain
    if color_by and color_by not in tokens.NAMES:
        raise SettingsError(f"--color-by: {color_by!r:.40} is unknown. Choose one of {', '.join(tokens.NAMES)}")
    if len(modes) > 1:
        raise SettingsError(f"{modes[0]} and {modes[1]} cannot be combined. Choose one")
    refused = {
        "--where": selection.condition and modes and modes not in (["--follow"], ["--diff"]),
        "--sort": selection.sort and modes and modes != ["--diff"],
        "--color-by": color_by and modes in (["--mask"], ["--diff"]),
        "--explain": explain and modes,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise SettingsError(f"{modes[0]} and {name} cannot be combined. Choose one")
    if modes == ["--diff"] and len(paths) != 2:
        raise SettingsError("--diff: needs two paths: slimectl inspect --diff A B")
    compares = not modes and len(paths) == 2 and not (color_by or explain)
    if modes not in (["--diff"], ["--plot"]) and len(paths) != 1 and not compares:
        raise SettingsError(f"{paths[1]}: only one path can be shown at a time. To compare two, drop the other options")
    for path in paths:
        if not path.exists() and modes != ["--follow"]:
            raise SettingsError(f"{path}: no such file or folder")
