"""slimectl train"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import CLUSTER, ENGINES, SETTINGS, CommonOptions, print_preflight, with_options
from slimectl.cli.resume import Resumed, resumable
from slimectl.cli.run import run_to_end
from slimectl.data.skip_counts import SkippedLines
from slimectl.errors import RecordError, SettingsError, SlimectlError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.cli.progress import ProgressBar
    from slimectl.runtime.model_functions import Trainer
    from slimectl.settings import Resolved, Settings
    from slimectl.settings.run import RunSettings
    from slimectl.stages.recorded_rounds import Numbered, SampleFiles
    from slimectl.stages.signal import SignalCount
    from slimectl.types import Prompt


@with_options(
    "samples input_key label_key model save load algorithm backend name lr on_error resume", CLUSTER, ENGINES,
    "eval_config custom_config", SETTINGS, "force dry_run",
)  # fmt: skip
def train(
    options: CommonOptions,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Output folder for the trained weights")
    ] = None,
    load: Annotated[Path | None, typer.Option("--load", metavar="DIR", help="Checkpoint to continue from")] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", help="Algorithm: grpo, dapo, rloo, …, sft")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run's folder in run.dir")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Folder of the run to resume")] = None,
) -> None:
    """Train on scored samples, demonstrations (sft) or preferences (dpo, reward_model).

    Prints one report per step. With --name, trains as a run in runs/NAME, with epochs, checkpoints, [eval], [track],
    progress and --resume.

    Example:

        slimectl train scored.jsonl --model models/smollm2 --save models/better --lr 1e-5
    """
    if options.model and load:
        raise SettingsError("--model starts from weights only, and --load continues a checkpoint. Use only one.")
    flags: dict[str, Any] = {"algorithm.name": algorithm, "run.name": name}
    if load:
        flags["model.path"] = str(load)
    with resumable("train", options, flags, resume) as resumed:
        resolution = options.resolve(flags)
        in_folder = resume is not None or _is_run(resolution)
        if in_folder and options.samples:
            resolution = options.resolve(flags | {"rollout.data": options.sample_paths})
        if options.dry_run:
            if save is not None:
                from slimectl.data.atomic_replace import refuse_existing

                refuse_existing(save, force=options.force)
            checks = ["model", "trainer", "hooks", "training memory", *(["trackers", "disk"] if in_folder else [])]
            samples = resolution.settings.rollout.data if resumed and not options.samples else options.sample_paths
            new_run = in_folder and resumed is None and not options.force
            print_preflight(resolution, *checks, samples=samples, new_run=new_run, resumed=resumed is not None)
        elif in_folder:
            _train_in_folder(options, resolution, save=save, load=load, resumed=resumed)
        else:
            _train_once(options, resolution.settings, save=save, load=load)
            _say_idle_settings(resolution, options.sample_paths)


OF_RUNS: dict[str, Any] = {"run.num_epoch": None, "run.save_interval": None, "eval.data": {}, "track.with": ["stdout"]}
"""Settings that only have an effect in a run folder, with their defaults."""


def _is_run(resolution: Resolved) -> bool:
    """Return whether to train in a run folder: run.name is given, or set in a file that sets the algorithm.

    A settings file of `slimectl run` can also be used for single stages, which have no run folder. Raises
    SettingsError for settings on the command line that need the folder.
    """
    from slimectl.settings.keys import flat
    from slimectl.settings.loading import COMMAND_LINE

    origins, trains_on = resolution.origins, resolution.settings.algorithm.trains_on
    # A settings file with an algorithm for recorded samples is not meant for `slimectl run`.
    own_layers = (*COMMAND_LINE, origins["algorithm.name"]) if trains_on != "rollouts" else COMMAND_LINE
    values = dict(flat(resolution.settings))
    if values["run.name"] is not None and origins["run.name"] in own_layers:
        return True
    if refused := [name for name in _set_for_runs(values) if origins[name] in own_layers]:
        raise SettingsError(
            f"{refused[0]}: needs a run folder for checkpoints and records. Add --name NAME to train in "
            f"{resolution.settings.run.dir}/NAME"
        )
    return False


def _set_for_runs(values: dict[str, Any]) -> list[str]:
    """Return the settings among OF_RUNS that differ from their defaults."""
    return [name for name, default in OF_RUNS.items() if values[name] not in (default, None, [])]


def _say_idle_settings(resolution: Resolved, paths: list[str]) -> None:
    """Log which settings of a file had no effect because there is no run folder. Nothing is logged for a pipe."""
    from slimectl.settings.keys import flat

    if "-" not in paths and (idle := _set_for_runs(dict(flat(resolution.settings)))):
        origin = resolution.origins[idle[0]]
        stdio.note(f"{', '.join(idle)} of {origin} had no effect: a run folder is needed. Add --name NAME.")


def _train_in_folder(
    options: CommonOptions,
    resolution: Resolved,
    *,
    save: Path | None,
    load: Path | None,
    resumed: Resumed | None,
) -> None:
    """Train as a run in a folder with metrics, checkpoints and evaluations, and print the folder to stdout.

    The run's rollout.data is the samples file.
    """
    from slimectl.data.jsonl import joined_name
    from slimectl.data.ownership import read_manifest
    from slimectl.recipes import Recipe
    from slimectl.runtime.rounds import RecordedRounds
    from slimectl.stages.recorded_rounds import SampleFiles

    settings = resolution.settings
    if load is not None:
        raise SettingsError("--load: to continue a run, give its folder to --resume. To start a new one, use --model.")
    if save is not None:
        raise SettingsError(
            f"--save: a run keeps its weights in {settings.run.dir}/{settings.run.name}/latest. Drop --save or --name."
        )
    paths = options.sample_paths if options.samples or resumed is None else settings.rollout.data
    skipped = SkippedLines(joined_name(paths), stdio.logger.warning)
    before = {} if resumed is None else read_manifest(resumed.folder) or {}
    skips = "skip" in (options.on_error, before.get("on_error"))
    files = SampleFiles(paths, skipped.add_bad_line if skips else None, skipped.count_line)
    try:
        run_to_end(resolution, options, Recipe(None, {}), resumed, rounds=RecordedRounds(settings, files))
    finally:
        skipped.report()


def _train_once(options: CommonOptions, settings: Settings, *, save: Path | None, load: Path | None) -> None:
    """Train as a stage of a pipe: one pass, a record per step on stdout, the final weights in `save`."""
    from slimectl.cli.output import up_to_date
    from slimectl.cli.progress import line_count
    from slimectl.data.atomic_replace import refuse_existing, writing
    from slimectl.data.jsonl import joined_name
    from slimectl.runtime import builders
    from slimectl.runtime.rounds import warn_of_other_model
    from slimectl.stages.recorded_rounds import SampleFiles
    from slimectl.types import Prompt

    paths, force = options.sample_paths, options.force
    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    inputs = [*(path for path in paths if path != "-"), str(folder)]
    output = up_to_date("train", settings, inputs, str(save or "-"), force or "-" in paths)
    if output is None:
        return
    warn_of_other_model(settings.algorithm, paths, folder)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"num_epoch": None})})  # one pass
    skipped, too_long = SkippedLines(joined_name(paths), stdio.logger.warning), list[Prompt]()
    files = SampleFiles(paths, skipped.add_bad_line if options.on_error == "skip" else None, skipped.add_line)
    rollouts = _scheduled_rollouts(settings, files, folder, resumes=load is not None)
    tokenizer, context = builders.tokenizer(folder), builders.context_length(settings.rollout, folder)
    stream = builders.training_samples(settings, files, tokenizer, context=context, on_skipped=too_long.append)

    def make() -> Trainer:
        from slimectl.runtime.model_functions import Trainer

        return Trainer(settings, folder, load=load, rollouts=rollouts)

    def finish(trainer: Trainer, steps: int) -> None:
        if save is not None:
            trainer.save(save, force=True, manifest_fields=output.manifest.signed({"steps": steps}, parents=inputs))

    if save is not None:
        refuse_existing(save, force=force)
    try:
        # Lock the folder during training, so that another writer is refused before it starts its work.
        with writing(save) if save is not None else nullcontext():
            steps, signal = _train_steps(stream, settings, make, finish, too_long, total=line_count(paths))
    finally:
        skipped.report()
    if not signal.rounds:
        raise RecordError(f"{joined_name(paths)}: no samples. Look at the messages of the stage that wrote them.")
    dropped = f", {len(too_long)} skipped" if too_long else ""
    stdio.note(
        f"{stdio.quantity(steps, 'step')}{dropped}, " + (f"weights in {save}" if save else "nothing saved (no --save)")
    )
    _warn_without_signal(signal, settings, "SAMPLES" if "-" in paths else shlex.join(paths))


def _scheduled_rollouts(settings: Settings, files: SampleFiles, folder: Path, *, resumes: bool) -> int | None:
    """Return the number of rollouts in the files if the learning rate depends on it, else None.

    Raises SettingsError for samples that cannot be counted in advance, and if the training `resumes` a checkpoint.
    """
    from slimectl.data.io import is_pipe
    from slimectl.runtime.rounds import RecordedRounds

    setting = settings.train.needs_total_steps
    if not setting or settings.run.num_rollout:
        return None
    pipe = next(filter(is_pipe, files.paths), None)
    if pipe is not None or resumes:
        where = "the steps of a checkpoint (--load)" if resumes else f"the steps of a pipe ({pipe})"
        raise SettingsError(
            f"{setting} depends on the number of steps, but {where} cannot be counted. Set train.lr_decay_iters."
        )
    return RecordedRounds(settings, files).scheduled_rollouts(folder)


def _warn_without_signal(signal: SignalCount, settings: Settings, samples: str) -> None:
    """Warn if most rounds had no learning signal. Raises SlimectlError if run.on_no_signal stopped the training."""
    command = f"slimectl score {samples} --explain"
    remedy = signal.remedy(
        f"To see why, run: {command} (or --check instead of --explain), with the options of your reward"
    )
    if _stops(signal, settings.run):
        raise SlimectlError(f"{signal.message_in_a_row(remedy)}. To train anyway, set run.on_no_signal=warn.")
    if message := signal.closing_message(remedy):
        stdio.logger.warning(message)


def _stops(signal: SignalCount, run: RunSettings) -> bool:
    return run.on_no_signal == "stop" and signal.in_a_row >= run.no_signal_rounds


@contextmanager
def _loaded_trainer(make: Callable[[], Trainer], progress: ProgressBar, total: int | None) -> Iterator[Trainer]:
    """Create a trainer while the bar shows that it is loading, then count `total` samples."""
    with progress.phase("loading"):
        trainer = make()
    with trainer:
        progress.expect(total)
        yield trainer


def _train_steps(
    stream: Iterator[Numbered],
    settings: Settings,
    make: Callable[[], Trainer],
    finish: Callable[[Trainer, int], None],
    too_long: list[Prompt],
    *,
    total: int | None,
) -> tuple[int, SignalCount]:
    """Train with a record per step on stdout (on a terminal a row of a table), then `finish` with the number of steps.

    `total` is the number of samples, if known. Returns the number of steps, and the count of rounds with and without
    signal.
    """
    from slimectl.cli.progress import ProgressBar
    from slimectl.runtime import builders

    steps, counted, read = 0, 0, 0

    def samples() -> Iterator[Any]:
        nonlocal read
        for _, sample in stream:
            read += 1
            yield sample

    rows = builders.step_table() if stdio.is_terminal() else lambda report: [json.dumps(report.to_json())]
    with (
        ProgressBar("samples") as progress,
        _loaded_trainer(make, progress, total) as trainer,
    ):
        for report in trainer.train(samples(), progress=progress):
            if len(too_long) > counted:
                report.metrics["rollout/prompts_too_long"] = float(len(too_long) - counted)
                counted = len(too_long)
            for line in rows(report):
                stdio.emit(line)
            steps += report.is_step
            if report.last_step_of_round:
                progress.reach(read)
            if report.last_step_of_round and _stops(trainer.state.signal, settings.run):
                break
        if trainer.state.rollout_id:
            with progress.phase("saving"):
                finish(trainer, steps)
    return steps, trainer.state.signal
