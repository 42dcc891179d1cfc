"""slimectl run"""

from __future__ import annotations

import shlex
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import CLUSTER, ENGINES, SETTINGS, CommonOptions, print_preflight, shown, with_options
from slimectl.cli.resume import Resumed, resumable
from slimectl.errors import SettingsError, StorageError
from slimectl.plugins.garbage import frozen_objects
from slimectl.system import stdio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from slimectl.recipes import Recipe
    from slimectl.runtime.rounds import RecordedRounds
    from slimectl.runtime.run import TrainingRun
    from slimectl.settings import Resolved


@with_options(
    "recipe model data input_key label_key agent env n backend lr name seed resume",
    CLUSTER,
    ENGINES,
    "eval_config custom_config",
    SETTINGS,
    "force smoke dry_run",
)
def run(
    options: CommonOptions,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Recipe name or TOML file")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run's folder in run.dir")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Random seed for new weights, sampling and shuffling")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Folder of the run to resume")] = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Try the settings on this machine: two short rounds with a tiny random model"),
    ] = False,
) -> None:
    """Run the RL loop: roll out, score and train in every round, with evaluations.

    Without a recipe, ./slimectl.toml is used. Ctrl-C finishes the round and saves. Press it again to stop at once.
    SIGTERM and SIGHUP do the same, but the round has at most run.grace_s seconds. --smoke tries the settings of a
    cluster on this machine. It uses your reward and data, a tiny random model of the same family, the embedded engine,
    one process and two rounds.

    Example:

        slimectl run quickstart
    """
    from slimectl import recipes

    has_input = bool(options.config or options.assign or options.model or options.data or resume)
    selected = recipes.find(recipe, instead=bool(options.config or resume), needed=not has_input)

    def say_settings() -> None:
        if recipe is None and selected.layer is not None:
            stdio.note(f"reading settings from {selected.layer.origin} in this folder")

    flags: dict[str, Any] = {"run.name": name, "run.seed": seed, "rollout.seed": seed}
    if smoke and resume:
        raise SettingsError("--smoke and --resume cannot be combined. A smoke run starts a new run.")
    with resumable("run", options, flags, resume) as resumed:
        result = options.resolve(flags, recipe=selected.layer)
        if smoke:
            result = _smoke_settings(options, flags, selected, result)
        if options.dry_run:
            from slimectl.runtime.preflight import OF_RUN

            say_settings()
            print_preflight(result, *OF_RUN, new_run=resume is None and not options.force, resumed=resumed is not None)
            return
        run_to_end(result, options, selected, resumed, on_start=say_settings)


def _smoke_settings(options: CommonOptions, flags: dict[str, Any], recipe: Recipe, whole: Resolved) -> Resolved:
    """Return settings for a smoke run on this machine, write its tiny model, and print the changes from `whole`."""
    from slimectl.runtime import smoke
    from slimectl.settings.keys import toml_value

    own = {key: value for key, value in flags.items() if key != "run.name"}
    options.force = True
    for name in ("model", "backend", "executor", "ray_address", "engine", "engines", "engine_url"):
        setattr(options, name, None)
    result = options.resolve(own, recipe=recipe.layer, smoke=smoke.reduced(whole.settings))
    stdio.note(f"smoke run with {smoke.create_model(whole.settings)}. Changed settings:")
    before = dict(shown(whole))
    for key, value in shown(result):
        if key in before and value != before[key] and not key.endswith(".python"):
            stdio.note(f"  {key} = {toml_value(value)} (was {toml_value(before[key])})")
    return result


def run_to_end(
    result: Resolved,
    options: CommonOptions,
    recipe: Recipe,
    resumed: Resumed | None,
    *,
    rounds: RecordedRounds | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Execute a run in its folder and print the folder to stdout. `rounds` come from a samples file, if given.

    Raises typer.Exit if a signal ended it.
    """
    from slimectl.cli.progress import ProgressBar, is_drawn
    from slimectl.cli.signals import RoundInterrupt
    from slimectl.runtime.grace import GracePeriod
    from slimectl.settings.secret import check_complete

    with frozen_objects():
        from slimectl.runtime.run import TrainingRun

    check_complete(result.settings.model_dump(by_alias=True))
    grace = GracePeriod()
    stop = RoundInterrupt(grace, result.settings.run.grace_s)
    bar = ProgressBar("rounds", each="round", lines=False, drawn=is_drawn(of_pipe=False))
    job = TrainingRun(
        result.settings, interrupted=stop.asked, grace=grace, rounds=rounds, recipe=recipe.name, progress=bar
    )
    with stop, bar:
        finished = job.execute(
            resume=resumed is not None,
            force=options.force,
            lock=resumed.lock if resumed else None,
            on_start=on_start,
        )
    # Nothing can be printed if the terminal was closed.
    with nullcontext() if finished else suppress(StorageError):
        closing_words(job, recipe)
        stdio.emit(str(job.folder.path))
    if not finished:
        raise typer.Exit(stop.exit_code)


INDEX_S = 2.0
"""Maximum seconds for indexing the samples of the last evaluation when a run ends."""
MAX_PROMPT = 40
"""Maximum characters of a prompt in a suggested command. A longer one is identified by its group."""


def closing_words(job: TrainingRun, recipe: Recipe) -> None:
    """Print the curve of rewards or losses, accuracies before and after, and commands to try next."""
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
    samples = _sample_commands(path, is_verified=not job.settings.score.own_functions)
    commands = [f"slimectl view {shlex.quote(str(path))}", *samples]
    if count := len(recorder.diagnosis.findings) if recorder.diagnosis else 0:
        commands.insert(0, f"slimectl diagnose {shlex.quote(str(path))}    # {stdio.quantity(count, 'finding')}")
    commands += [line.format(run=shlex.quote(str(path))) for line in recipe.table.get("next", [])]
    stdio.note("try next:\n" + "\n".join(f"  {line}" for line in commands))


def _sample_commands(run: Path, *, is_verified: bool) -> Iterator[str]:
    """Yield commands that show the worst responses of the last evaluation, and how the worst one changed over rounds.

    If a verifier graded them, the reasons are shown too.
    """
    import numpy as np

    from slimectl.cli.viewer.library import Library
    from slimectl.cli.viewer.queries import prompt_text

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
    yield f"slimectl inspect {shlex.quote(str(file.path))} --sort reward{explain}    # the worst responses{reason}"
    yield f"slimectl inspect {shlex.quote(str(run))} --prompt {shlex.quote(name)}    # how this one changed"


FEW_POINTS = 3
"""Maximum points of a curve that is printed as values instead of a plot."""


def curve(points: Sequence[tuple[int, float]], *, title: str) -> str:
    """Plot (round, value) points as text, as wide as the terminal but at most 160 columns.

    A few points, or equal ones, are printed as a line of text.
    """
    values = [f"{value:.3g}" for _, value in points]
    if len(points) <= FEW_POINTS:
        return f"{title}: {', '.join(values)}"
    if len(set(values)) == 1:
        return f"{title}: {values[0]} in all {len(points)}"
    import plotext

    width = min(160, shutil.get_terminal_size().columns)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, 14)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    plotext.title(title)
    plotext.xlabel("round")
    return "\n".join(line.rstrip() for line in plotext.uncolorize(plotext.build()).splitlines())
