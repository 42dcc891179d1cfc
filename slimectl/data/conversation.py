"""Multi-turn conversations on tokens: sampled tokens are never decoded and tokenised again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slimectl.data.chat import following
from slimectl.types import Chat, Completion, Sample, SamplingParams, Status

Generate = Callable[[list[int], SamplingParams], Awaitable[Completion]]

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}

BROKEN_OFF = "broken_off"
"""Metadata key of an interrupted turn: [number of turns before it, its text so far]."""


class Conversation:
    """One sample as a multi-turn conversation of the policy with tools, a user or an environment.

    `ask` generates the policy's turn, `tell` adds messages of other roles. The policy's tokens are kept as sampled and
    trained on (mask 1), all others get mask 0. `sampling_params.max_tokens` bounds the whole response, other messages
    included: when it is used up, or generation is aborted, `over` is true and `ask` returns None.

    An interrupted turn (rollout.partial_rollout) resumes where it stopped, and `ask` then returns its complete text.
    """

    def __init__(
        self,
        sample: Sample,
        tokenizer: Any,
        generate: Generate,
        sampling_params: SamplingParams,
        *,
        max_turns: int = 8,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.sample = sample
        self.max_turns = max_turns
        # Progress of an interrupted sample: number of turns, and the text of its last turn so far.
        turns, text = sample.metadata.pop(BROKEN_OFF, (0, ""))
        self.turns: int = turns
        self._turn_text: str = text
        self.over = False
        self._tokenizer = tokenizer
        self._generate = generate
        self._params = sampling_params
        self._template_kwargs = template_kwargs

    async def ask(self) -> str | None:
        """Generate the policy's next turn; its text without the end token, None if tokens or turns are used up."""
        remaining = self._params.max_tokens - self.sample.response_length
        if self.over or remaining <= 0 or self.turns == self.max_turns:
            self._end(Status.TRUNCATED)
            return None
        min_tokens = min(self._params.min_tokens, remaining)
        params = dataclasses.replace(self._params, max_tokens=remaining, min_tokens=min_tokens)
        if self.turns and params.seed is not None:
            params = dataclasses.replace(params, seed=(params.seed + self.turns) % (1 << 63))
        answer = await self._generate(self.sample.tokens, params)
        self.sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        self.sample.status = FINISHED[answer.finish]
        self.over = answer.finish != "stop"
        text, self._turn_text = self._turn_text + answer.text, ""
        if answer.finish == "abort":
            self.sample.metadata[BROKEN_OFF] = [self.turns, text]
            return None
        self.turns += 1
        return text

    def tell(self, *messages: dict[str, Any]) -> None:
        """Add chat messages of other roles, rendered by the template, with the header of the next turn."""
        cleaned = [{name: _replace_surrogates(value) for name, value in message.items()} for message in messages]
        self._add(following(self._tokenizer, cleaned, self._template_kwargs), strip_end=True)

    def tell_text(self, text: str) -> None:
        """Add plain text, for models without a chat template."""
        self._add(list(self._tokenizer.encode(_replace_surrogates(text), add_special_tokens=False)), strip_end=False)

    def _add(self, tokens: list[int], *, strip_end: bool) -> None:
        if self.over:
            return
        previous_tokens = self.sample.tokens
        # The template ends the policy's turn; if the policy sampled the end token itself, that one stays.
        if strip_end and tokens and self.sample.response_length and previous_tokens[-1] == tokens[0]:
            tokens = tokens[1:]
        if self.sample.response_length + len(tokens) >= self._params.max_tokens:
            self._end(Status.TRUNCATED)
            return
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        self.sample.append_response_tokens(tokens, trainable=False, text=text)

    @contextmanager
    def tool(self) -> Iterator[None]:
        """Add the time spent inside to `sample.non_generation_time`, in seconds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.sample.non_generation_time += time.perf_counter() - started

    def _end(self, status: Status) -> None:
        if not self.over:
            self.sample.status = status
        self.over = True


def _replace_surrogates(value: Any) -> Any:
    """Replace halves of surrogate pairs in a text, which tokenizers reject."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def chat_of(sample: Sample) -> Chat:
    """The prompt of a sample as a chat."""
    return [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
