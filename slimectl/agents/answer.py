"""Divides an answer of the policy into its parts, for any API that sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimectl.agents.chat_request import EndpointError
from slimectl.chats.requests import ChatRequest
from slimectl.data.answers import AnswerParser, ParsedAnswer, format_of
from slimectl.data.growing_text import GrowingText, before_stop, marked_text
from slimectl.data.token_bytes import TokenBytes
from slimectl.data.token_log_probs import TokenLogProb
from slimectl.data.tool_calls import schema_or_call
from slimectl.rewards.thoughts import THINK
from slimectl.types import AnyGrammar, Completion, JsonGrammar, TopTokens


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Parts of one completion. `call_ids` are the ids of its tool calls. `stop` is the stop string that ended it."""

    completion: Completion
    parts: ParsedAnswer
    call_ids: tuple[str, ...]
    stop: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it ended at the token limit."""
        return self.completion.finish_reason == "length"

    @property
    def matched(self) -> str | int | None:
        """Stop string or token that ended it, in SGLang's form."""
        ended = self.completion.finish_reason == "stop" and self.completion.tokens
        return self.stop if self.stop is not None or not ended else self.completion.tokens[-1]

    @property
    def log_probs(self) -> list[TokenLogProb]:
        """Log-probabilities of all tokens, with the likeliest alternatives if they were requested."""
        completion = self.completion
        tops: Sequence[TopTokens | None] = completion.top_log_probs or [None] * len(completion.tokens)
        return list(map(TokenLogProb, completion.log_probs, completion.tokens, tops))


@dataclass(frozen=True, slots=True)
class AgentReply:
    """The reply to one request. Its answer is missing while it is being sampled."""

    request: ChatRequest
    model: str
    created: int
    prompt_tokens: int
    vocabulary: TokenBytes
    sampled: AgentAnswer | None = None
    echo: str = ""
    """Text of the prompt, if the response starts with it."""
    echo_log_probs: Sequence[TokenLogProb] = ()

    @property
    def identity(self) -> str:
        return self.request.identity

    @property
    def answer(self) -> AgentAnswer:
        assert self.sampled is not None, "it is still being sampled"
        return self.sampled

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were in the engine's cache, if known."""
        return 0 if self.sampled is None else min(self.prompt_tokens, self.sampled.completion.cached_tokens)

    @property
    def completion_tokens(self) -> int:
        return 0 if self.sampled is None else len(self.sampled.completion.tokens)


class AnswerReader:
    """Divides completions into reasoning, content and calls, by the format of one model's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = TokenBytes(tokenizer)
        self._format = format_of(tokenizer.chat_template)
        special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
        self._marks_are_special = bool(special & set(self._format.marks))
        self._unmarked = tuple(token for token in special if token and token not in self._format.marks)

    def read(
        self, completion: Completion, request: ChatRequest, prompt: Sequence[int], stop: Sequence[str]
    ) -> ParsedAnswer:
        """Divide a completion of these prompt tokens. Look for calls only if the request has tools."""
        if request.prompt is not None:
            return ParsedAnswer(completion.text)
        return self._parser(request, prompt).parse(self._text(completion, stop))

    def stop_string(self, completion: Completion, stop: Sequence[str]) -> str | None:
        """Return the stop string that ended a completion, or None if it ended otherwise."""
        if completion.finish_reason != "stop":
            return None
        text = str(self.tokenizer.decode(completion.tokens, skip_special_tokens=True))
        return next((string for string in stop if text.startswith(completion.text + string)), None)

    def growing(self, request: ChatRequest, prompt: Sequence[int], stop: Sequence[str]) -> GrowingAnswer:
        """Return the growing answer to a request that is about to be sampled, and ends at a stop string."""
        backend = self.tokenizer.backend_tokenizer
        if request.prompt is not None:
            return GrowingAnswer(GrowingText(backend), stop, ParsedAnswer)
        parse = partial(self._parser(request, prompt).parse, complete=False)
        return GrowingAnswer(GrowingText(backend, keep_special=self._marks_are_special), stop, parse)

    def _parser(self, request: ChatRequest, prompt: Sequence[int]) -> AnswerParser:
        ends = self._unmarked if self._marks_are_special else ()
        return AnswerParser(self._format, request.tools, self._prompt_end(prompt), ends, request.single_call)

    def _prompt_end(self, prompt: Sequence[int]) -> str:
        """Return the end of the prompt, in which a template may have opened the reasoning."""
        return str(self.tokenizer.decode(prompt[-16:], skip_special_tokens=False))

    def grammar(self, request: ChatRequest, prompt: Sequence[int]) -> AnyGrammar | JsonGrammar | None:
        """Return the grammar of the answer that a request asks for, or None.

        A call is forced only if the model writes calls as JSON objects. Nothing is forced if the template has opened
        the reasoning. A schema applies to the content, so a forced call takes precedence. Raises EndpointError or
        MessageError for a schema that cannot be followed.
        """
        opened, notation = self._prompt_end(prompt).rstrip().endswith(THINK), self._format.notation
        call, name = None, request.forced_tool
        if name is not None and notation is not None and not opened:
            call = notation.call_grammar(request.tools, name)
        if call is not None or request.json_schema is None:
            return call
        if opened:
            raise EndpointError(
                "a schema excludes reasoning, but the chat template has opened it. The template may have a switch, "
                'e.g. "chat_template_kwargs": {"enable_thinking": false}'
            )
        schema = JsonGrammar(request.json_schema)
        return schema_or_call(schema, notation, request.tools) if request.tools else schema

    def _text(self, completion: Completion, stop: Sequence[str]) -> str:
        """Return the text of a completion, with the special tokens that its format needs."""
        if not self._marks_are_special:
            return completion.text
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        return marked_text(decode, completion.tokens, completion.text, stop)


@dataclass(frozen=True, slots=True)
class GrowingAnswer:
    """An answer that is still being sampled."""

    text: GrowingText
    stop: Sequence[str]
    parse: Callable[[str], ParsedAnswer]

    def parts(self, tokens: Sequence[int]) -> ParsedAnswer:
        """Return the parts of the tokens so far that can no longer change. More tokens can only extend them."""
        return self.parse(before_stop(self.text.read(tokens), self.stop))
