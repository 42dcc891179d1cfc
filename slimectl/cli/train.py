"""slimectl train"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl import stdio
from slimectl.cli.options import CLUSTER, SETTINGS, CommonOptions, print_settings, with_options
from slimectl.errors import RecordError, SettingsError

if TYPE_CHECKING:
    from slimectl.settings import Settings
    from slimectl.types import Prompt, Sample


@with_options("samples model save load algorithm backend lr on_error", CLUSTER, SETTINGS, "force dry_run")
def train(
    options: CommonOptions,
    save: Annotated[Path | None, typer.Option("--save", metavar="DIR", help="Where the new weights go")] = None,
    load: Annotated[Path | None, typer.Option("--load", metavar="DIR", help="A run's checkpoint to go on from")] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", help="grpo, dapo, rloo, …, sft")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate")] = None,
) -> None:
    """Learn from scored samples, demonstrations (sft) or preferences (dpo, reward_model); one report a step on stdout.

    Example:

        slimectl train scored.jsonl --model models/smollm2 --save models/better --lr 1e-5
    """
    if options.model and load:
        raise SettingsError("--model starts from weights alone, --load goes on from a checkpoint; give one of them")
    flags = {"model.path": str(load) if load else options.model, "algorithm.name": algorithm, "train.lr": lr}
    resolution = options.resolve(flags)
    if options.dry_run:
        print_settings(resolution)
        return
    from slimectl import builders
    from slimectl.cli.output import up_to_date
    from slimectl.data.atomic_replace import refuse_existing, writing
    from slimectl.data.jsonl import name_of
    from slimectl.data.skip_counts import SkippedLines
    from slimectl.types import Prompt

    settings, samples, force = resolution.settings, options.samples, options.force
    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    inputs = [*([samples] if samples != "-" else []), str(folder)]
    manifest = up_to_date("train", settings, inputs, str(save or "-"), force or samples == "-")
    if manifest is None:
        return
    tokenizer = builders.tokenizer(folder)
    skipped, too_long = SkippedLines(name_of(samples), stdio.say), list[Prompt]()
    stream = builders.training_samples(
        settings,
        samples,
        tokenizer,
        on_error="skip" if options.on_error == "skip" else "stop",
        report=skipped.add_bad_line,
        on_line=skipped.add_line,
        context=builders.context_length(settings, folder),
        left_out=too_long.append,
    )
    signed = partial(manifest.signed, parents=inputs)
    if save is not None:
        refuse_existing(save, force=force)
    try:
        # Locked during training: another writer of the same folder is refused before its work, not after it.
        with writing(save) if save is not None else nullcontext():
            steps = _train_steps(stream, settings, folder, load=load, save=save, signed=signed, too_long=too_long)
    finally:
        skipped.report()
    if steps == 0:
        raise RecordError(f"{samples}: no samples came; look at what the stage before said")
    dropped = f", {len(too_long)} left out as too long" if too_long else ""
    stdio.say(f"{steps} steps{dropped}" + (f"; weights in {save}" if save else "; nothing saved (no --save)"))


def _train_steps(
    stream: Iterator[Sample],
    settings: Settings,
    folder: Path,
    *,
    load: Path | None,
    save: Path | None,
    signed: Callable[[dict[str, int]], Any],
    too_long: list[Prompt],
) -> int:
    """Train with one line per step on stdout, and write the weights to `save`; return the number of steps."""
    import json

    from slimectl.api.models import Trainer

    steps, counted = 0, 0
    with Trainer(settings, folder, load=load) as trainer:
        for report in trainer.train(stream):
            if len(too_long) > counted:
                report.metrics["rollout/prompts_too_long"] = float(len(too_long) - counted)
                counted = len(too_long)
            stdio.emit(json.dumps(report.to_json()))
            steps += 1
        if steps and save is not None:
            trainer.save(save, force=True, manifest_fields=signed({"steps": steps}))
    return steps
