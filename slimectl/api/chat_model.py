"""A model that answers texts and chats, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimectl import builders
from slimectl.api.models import Sampler
from slimectl.data.chat import encode, render
from slimectl.errors import RecordError, SettingsError
from slimectl.settings import Settings
from slimectl.stages.generation import sampling_params
from slimectl.types import Chat, Completion, Prompt, SamplingParams


class ChatModel(Sampler):
    """The engine of [engine] with a model's weights, for questions of a person."""

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        super().__init__(settings, folder)
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))

    def params(self, *, max_tokens: int, temperature: float | None = None, seed: int | None = None) -> SamplingParams:
        """Return the sampling parameters of [rollout], with these in their place; temperature 0 is greedy."""
        params = dataclasses.replace(sampling_params(self.settings.rollout), max_tokens=max_tokens, seed=seed)
        return params if temperature is None else dataclasses.replace(params, temperature=temperature)

    def tokens(self, prompt: str | Chat) -> list[int]:
        """Render a chat by the model's template; a text is continued as it stands."""
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        kwargs = self.settings.rollout.apply_chat_template_kwargs
        return render(Prompt(text=prompt), self.tokenizer, template_kwargs=kwargs)

    def answer(
        self, prompt: str | Chat, params: SamplingParams, *, show: Callable[[str], Any], stoppable: bool = False
    ) -> Completion:
        """Answer, and `show` each piece of text as it comes; with `stoppable` Ctrl-C ends the answer.

        Raises RecordError for a prompt that is empty or that the template refuses, SettingsError for one that leaves no
        room in the context.
        """
        tokens = self.tokens(prompt)
        if not tokens:
            raise RecordError("the question is empty; write a text, or give it on stdin")
        return builders.stream_answer(self.engine, self.tokenizer, tokens, params, show=show, stoppable=stoppable)


def messages(question: str, *, system: str | None, chat_model: ChatModel) -> str | Chat:
    """Return a question as a chat; as a plain text for a model without a chat template. Raises SettingsError."""
    if not chat_model.has_template:
        if system is not None:
            raise SettingsError(f"--system: {chat_model.folder} has no chat template; put it into the text itself")
        return question
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": question}]
