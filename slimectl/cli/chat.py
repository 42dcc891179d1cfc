"""slimectl chat"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

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
from slimectl.errors import SettingsError, SlimectlError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.runtime.model_functions import ChatModel
    from slimectl.types import Chat, SamplingParams

COMMANDS = "/reset starts over, /retry regenerates the response, /exit or Ctrl-D quits, Ctrl-C stops a response"


@with_options("model system max_tokens temperature seed engine_url", SETTINGS, "dry_run")
def chat(
    options: CommonOptions,
    system: SystemMessage = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: SamplingSeed = None,
) -> None:
    """Chat with a model. /reset starts over, /exit quits, Ctrl-C stops a response.

    Example:

        slimectl chat --model models/smollm2 --system "You are brief."
    """
    from slimectl.data.lent_settings import ROLLOUT

    resolution = options.resolve(lent=ROLLOUT)
    if options.dry_run:
        print_settings(resolution, only_changed=True)
        return
    if sends_plain_text(resolution):
        raise SettingsError(
            f"{resolution.settings.model.path}: was trained without its chat template. Use `slimectl ask`, or add "
            f"-s rollout.apply_chat_template=true"
        )
    lines = _lines()
    from slimectl.runtime.model_functions import ChatModel

    with ChatModel(resolution.settings) as model:
        if not model.has_template:
            raise SettingsError(f"{model.folder}: no chat template. Use `slimectl ask --raw` to continue a text")
        stdio.note(f"{model.folder}: {COMMANDS}")
        params = model.params(max_tokens=answer_tokens(resolution, max_tokens), temperature=temperature, seed=seed)
        conversation = Conversation(model, params, system)
        for line in lines:
            if line.strip() in ("/exit", "/quit"):
                break
            conversation.take(line)


class Conversation:
    """The turns of a chat so far."""

    def __init__(self, model: ChatModel, params: SamplingParams, system: str | None) -> None:
        self._model = model
        self._params = params
        self._head: Chat = [] if system is None else [{"role": "system", "content": system}]
        self._turns: Chat = []
        self._answers = 0

    def take(self, line: str) -> None:
        """Respond to a line, or run it if it is a command."""
        command = line.strip()
        if not command:
            return
        if command == "/reset":
            self._turns = []
            stdio.note("the conversation starts over")
        elif command == "/retry" and self._turns:
            self._answer(self._turns[:-1])
        elif command.startswith("/"):
            stdio.say(COMMANDS)
        else:
            self._answer([*self._turns, {"role": "user", "content": line}])

    def _answer(self, turns: Chat) -> None:
        """Respond to the last turn. If that fails, the turn is dropped from the conversation."""
        from slimectl.cli.output import TextOutput

        output, params = TextOutput(), self._params
        if params.seed is not None:  # each response has its own seed
            params = dataclasses.replace(params, seed=params.seed + self._answers)
        self._answers += 1
        try:
            completion = self._model.answer([*self._head, *turns], params, show=output.write, stoppable=True)
        except SlimectlError as error:
            output.end()
            stdio.say(f"{error}. Type /reset to start over")
            return
        output.end()
        self._turns = [*turns, {"role": "assistant", "content": completion.text}]
        if completion.finish_reason != "stop":
            stopped = completion.finish_reason == "abort"
            stdio.note("stopped" if stopped else f"stopped after {stdio.quantity(len(completion.tokens), 'token')}")


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, with line editing on a terminal, or the lines of a pipe."""
    if not sys.stdin.isatty():
        for raw in stdio.input_bytes():
            yield raw.decode("utf-8", "replace").rstrip("\n")
        return
    with suppress(ImportError):  # line editing is optional
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            stdio.say("")
            return
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:  # SIGTERM or SIGHUP
                raise
            stdio.say("\nType /exit or press Ctrl-D to quit")
