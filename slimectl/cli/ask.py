"""slimectl ask"""

from __future__ import annotations

import stat
import sys
from contextlib import suppress
from os import fstat
from typing import Annotated

import typer

from slimectl.cli.options import (
    SETTINGS,
    CommonOptions,
    MaxTokens,
    SamplingSeed,
    SystemMessage,
    Temperature,
    answer_tokens,
    print_settings,
    sends_plain_text,
    with_options,
)
from slimectl.errors import RecordError, SettingsError
from slimectl.system import stdio


@with_options("text model system raw max_tokens temperature seed engine_url", SETTINGS, "dry_run")
def ask(
    options: CommonOptions,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Question. Text on stdin is appended to it")
    ] = None,
    system: SystemMessage = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without the chat template")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: SamplingSeed = None,
) -> None:
    """Ask a model one question and stream the response to stdout.

    Example:

        slimectl ask "Name three primes." --model models/smollm2 --temperature 0
    """
    from slimectl.data.lent_settings import ROLLOUT

    resolution = options.resolve(lent=ROLLOUT)
    if options.dry_run:
        print_settings(resolution, only_changed=True)
        return
    question, raw = _question(text or []), raw or sends_plain_text(resolution)
    if raw and system is not None:
        raise SettingsError("--system: needs the chat template. Drop --raw, or add -s rollout.apply_chat_template=true")
    from slimectl.cli.output import TextOutput
    from slimectl.runtime.model_functions import ChatModel, messages

    output = TextOutput()
    with ChatModel(resolution.settings) as model:
        prompt = question if raw else messages(question, system=system, chat_model=model)
        if isinstance(prompt, str) and not raw:
            stdio.note(f"{model.folder}: no chat template, so the model continues the text (--raw)")
        params = model.params(max_tokens=answer_tokens(resolution, max_tokens), temperature=temperature, seed=seed)
        try:
            completion = model.answer(prompt, params, show=output.write)
        finally:
            output.end()
    if completion.finish_reason == "length":
        stdio.note(f"stopped after {stdio.quantity(len(completion.tokens), 'token')}. Raise --max-tokens to allow more")


def _question(arguments: list[str]) -> str:
    """Return the arguments, followed by the text of a pipe or file on stdin. Raises RecordError if both are empty."""
    parts = [" ".join(arguments)] if arguments else []
    if not arguments or _has_input():
        try:
            parts.append(stdio.input_bytes().read().decode().rstrip("\n"))
        except UnicodeDecodeError:
            raise RecordError("<stdin>: is not UTF-8 text") from None
    if not any(part.strip() for part in parts):
        raise RecordError('no question given. Pass it as an argument (slimectl ask "…" --model DIR) or on stdin')
    return "\n\n".join(part for part in parts if part)


def _has_input() -> bool:
    """Return whether stdin is a pipe or a file. A terminal or /dev/null is not read in addition to arguments."""
    with suppress(OSError, ValueError):
        mode = fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False
