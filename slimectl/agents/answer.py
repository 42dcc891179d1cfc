"""An answer of the policy, divided into its parts, for whichever API sends it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slimectl.agents.chat_request import ChatRequest, RequestRefused
from slimectl.data.answers import THINK, ParsedAnswer, format_of
from slimectl.data.chat_messages import call_ids
from slimectl.types import Completion, JsonGrammar


@dataclass(frozen=True, slots=True)
class Answer:
    """Parts of one completion; `call_ids` names its tool calls."""

    completion: Completion
    parts: ParsedAnswer
    call_ids: tuple[str, ...]
    prompt_tokens: int

    @property
    def is_cut(self) -> bool:
        """Whether it ended because there was no room for more."""
        return self.completion.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Reply:
    """All answers to one request; there are several only where a client asked for n."""

    request: ChatRequest
    answers: Sequence[Answer]
    model: str
    created: int
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def prompt_tokens(self) -> int:
        return self.answers[0].prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Number of the prompt's tokens that the engine had computed before."""
        return min(self.prompt_tokens, self.answers[0].completion.cached_tokens)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.completion.tokens) for answer in self.answers)


class AnswerReader:
    """Divides completions into reasoning, content and calls, in the notation of one model's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._format = format_of(template if isinstance(template, str) else "")
        special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
        self._marks_are_special = bool(special & set(self._format.marks))
        self._special = tuple(special)

    def read(self, completion: Completion, request: ChatRequest, prompt: Sequence[int]) -> Answer:
        """Divide a completion of these prompt tokens; calls are looked for if the request has tools."""
        if request.prompt is not None:
            return Answer(completion, ParsedAnswer(completion.text), (), len(prompt))
        ending = self._tokenizer.decode(prompt[-16:], skip_special_tokens=False)
        parts = self._format.parse(self._text(completion, request), request.tools, prompt=ending)
        return Answer(completion, parts, call_ids(parts.tool_calls), len(prompt))

    def grammar(self, request: ChatRequest, prompt: Sequence[int]) -> JsonGrammar | None:
        """Return the grammar of the answer that a request asks for; None without one.

        A call is forced only where it is a JSON object in the model's notation, and no answer where the template has
        opened the reasoning. Raises RequestRefused for a schema there.
        """
        if request.json_schema is None and request.forced_tool is None:
            return None
        opened = self._tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip().endswith(THINK)
        if request.json_schema is None:
            notation = None if opened else self._format.notation
            return None if notation is None else notation.call_grammar(request.tools, request.forced_tool or "")
        if opened:
            raise RequestRefused(
                "a schema excludes reasoning, which the chat template has opened; it may have a switch, as "
                '"chat_template_kwargs": {"enable_thinking": false}'
            )
        return JsonGrammar(request.json_schema)

    def _text(self, completion: Completion, request: ChatRequest) -> str:
        """Return the text of a completion, with the special tokens that its notation needs."""
        if not self._marks_are_special:
            return completion.text
        text = str(self._tokenizer.decode(completion.tokens, skip_special_tokens=False))
        for stop in request.stop:
            text = text.partition(stop)[0]
        unmarked = [token for token in self._special if token not in self._format.marks]
        while end := next((token for token in unmarked if token and text.endswith(token)), ""):
            text = text.removesuffix(end)
        return text
