"""A chat that grows in tokens: what was sampled is never made into text and tokenised again."""

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
"""Key of the metadata under which an unfinished turn waits: [turns before it, its text so far]."""


class Conversation:
    """One sample as a dialogue of the policy with tools, or with anything else that answers.

    `ask` lets the policy write its turn, `tell` adds what others say. Tokens of the policy are taken as sampled and
    trained on (mask 1), all others get mask 0. `sampling_params.max_tokens` bounds the whole response, what others say
    included: when it is used up, or the answer is broken off, `over` is true and `ask` returns None.

    A turn that was broken off (rollout.partial_rollout) goes on where it stopped, and its text is that of the whole.
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
        # Where a sample that was broken off had come to, and what its last turn said so far.
        turns, said = sample.metadata.pop(BROKEN_OFF, (0, ""))
        self.turns: int = turns
        self._said: str = said
        self.over = False
        self._tokenizer = tokenizer
        self._generate = generate
        self._params = sampling_params
        self._template_kwargs = template_kwargs

    async def ask(self) -> str | None:
        """The policy's next turn as text, without its end token; None if there is no room for one, or no turn left."""
        left = self._params.max_tokens - self.sample.response_length
        if self.over or left <= 0 or self.turns == self.max_turns:
            self._end(Status.TRUNCATED)
            return None
        least = min(self._params.min_tokens, left)
        params = dataclasses.replace(self._params, max_tokens=left, min_tokens=least)
        if self.turns and params.seed is not None:
            params = dataclasses.replace(params, seed=(params.seed + self.turns) % (1 << 63))
        answer = await self._generate(self.sample.tokens, params)
        self.sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        self.sample.status = FINISHED[answer.finish]
        self.over = answer.finish != "stop"
        said, self._said = self._said + answer.text, ""
        if answer.finish == "abort":
            self.sample.metadata[BROKEN_OFF] = [self.turns, said]
            return None
        self.turns += 1
        return said

    def tell(self, *messages: dict[str, Any]) -> None:
        """Add what others say: messages of a chat, rendered by its template, with the header of the next turn."""
        whole = [{name: _whole(value) for name, value in message.items()} for message in messages]
        self._add(following(self._tokenizer, whole, self._template_kwargs), strip_end=True)

    def tell_text(self, text: str) -> None:
        """Add plain text, for models without a chat template."""
        self._add(list(self._tokenizer.encode(_whole(text), add_special_tokens=False)), strip_end=False)

    def _add(self, tokens: list[int], *, strip_end: bool) -> None:
        if self.over:
            return
        written = self.sample.tokens
        # The template ends the policy's turn; where the policy has ended it itself, its own token stands.
        if strip_end and tokens and self.sample.response_length and written[-1] == tokens[0]:
            tokens = tokens[1:]
        if self.sample.response_length + len(tokens) >= self._params.max_tokens:
            self._end(Status.TRUNCATED)
            return
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        self.sample.append_response_tokens(tokens, trainable=False, text=text)

    @contextmanager
    def tool(self) -> Iterator[None]:
        """Time spent here is the tool's: `sample.non_generation_time`, in seconds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.sample.non_generation_time += time.perf_counter() - started

    def _end(self, status: Status) -> None:
        if not self.over:
            self.sample.status = status
        self.over = True


def _whole(value: Any) -> Any:
    """A tool's text without halves of surrogate pairs, which no tokenizer takes."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def chat_of(sample: Sample) -> Chat:
    """The prompt of a sample as a chat."""
    return [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
