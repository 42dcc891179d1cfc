"""Formats answers for OpenAI's API: whole, or as the delta since the last chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.data.answers import AnswerFormat, ParsedAnswer
from slimectl.data.chat_responses import OPENING, ApiKind, assistant_message, call_ids, message_delta, token_usage
from slimectl.engines.embedded.detokenizer import TokenBytes
from slimectl.engines.server.log_probs import (
    TokenLogProb,
    answer_log_probs,
    chat_scores,
    completion_log_probs,
)
from slimectl.engines.server.requests import RunningAnswer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands in front of its answers: text, and log-probabilities if they were asked for."""

    text: str
    log_probs: Sequence[TokenLogProb] = ()


@dataclass(frozen=True, slots=True)
class ChatParser:
    """Divides the answers to one chat into content, reasoning and tool calls."""

    format: AnswerFormat
    tools: Sequence[Mapping[str, Any]]
    prompt: str
    """The end of the rendered chat."""
    cut_ends: bool
    """Whether the text has special tokens for the parser alone, so that its end token has to go."""

    def parts(self, answer: RunningAnswer, vocabulary: TokenBytes) -> ParsedAnswer:
        """Return the parts of an answer; while it runs, those that can no longer change."""
        complete, text = answer.done, answer.text()
        for token in answer.sequence.end_tokens if self.cut_ends else ():
            text = text.removesuffix(vocabulary.text(token))
        return self.format.parse(text, self.tools, prompt=self.prompt, complete=complete)


NO_PARTS = ParsedAnswer("")


class ResponseFormatter:
    """Formats the response of one request, with `n` answers per prompt; `echoes` are the prompts to show."""

    def __init__(
        self,
        kind: ApiKind,
        *,
        model: str,
        n: int,
        log_probs: bool,
        with_tokens: bool,
        vocabulary: TokenBytes,
        echoes: Sequence[Echo] = (),
        parser: ChatParser | None = None,
    ) -> None:
        self._identity = uuid.uuid4().hex
        self.rid = f"{kind.prefix}-{self._identity}"
        self._kind = kind
        self._n = n
        self._created = int(time.time())
        self._model = model
        self._log_probs = log_probs
        self._with_tokens = with_tokens
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._parser = parser
        self._sent_parts: dict[int, ParsedAnswer] = {}
        """What of each answer has been streamed."""
        self._offsets: dict[int, int] = {}
        """Characters of the tokens of each answer so far."""

    def frame(self, choices: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
        return self._kind.frame(self._identity, self._created, self._model, choices, complete=complete)

    def whole(self, answers: list[RunningAnswer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            echo = self._echo(answer)
            content = self._message(answer) if self._kind.chat else {"text": echo.text + answer.text()}
            choices.append(self._choice(answer, content, 0, answer.count, echo=echo))
        spans = answers[0].spans()
        versions = {"weight_version": spans[-1]["version"], "weight_versions": spans} if spans else {}
        return self.frame(choices, complete=True) | {"usage": self.usage(answers), "metadata": versions}

    def _message(self, answer: RunningAnswer) -> dict[str, Any]:
        parts = self._parts(answer)
        return {"message": assistant_message(parts, call_ids(parts.tool_calls))}

    def _parts(self, answer: RunningAnswer) -> ParsedAnswer:
        parser = self._parser
        return ParsedAnswer(answer.text()) if parser is None else parser.parts(answer, self._vocabulary)

    def openings(self, answers: list[RunningAnswer]) -> list[dict[str, Any]]:
        """Return the first chunks of a stream: the role of a chat, the prompt of a completion that echoes it."""
        chunks: list[dict[str, Any]] = []
        for answer in answers:
            end: dict[str, Any] = {"logprobs": None, "finish_reason": None}
            if self._kind.chat:
                chunks.append({"index": answer.index, "delta": OPENING, **end})
            elif self._echoes:
                echo = self._echo(answer)
                log_probs = self._log_probs_of(answer, 0, 0, echo=echo)
                chunks.append({"index": answer.index, "text": echo.text, **end, "logprobs": log_probs})
        return [self.frame([choice], complete=False) for choice in chunks]

    def _echo(self, answer: RunningAnswer) -> Echo:
        return self._echoes[answer.index // self._n] if self._echoes else Echo("")

    def delta(self, answer: RunningAnswer) -> dict[str, Any] | None:
        """Return the delta of an answer; None while its new tokens have no text yet."""
        count = answer.count
        if self._kind.chat:
            new = self._message_delta(answer)
            content: dict[str, Any] = {"delta": new or {"content": ""}}
        else:
            text = answer.text()
            new = content = {"text": text[answer.told_text :]}
            answer.told_text = max(answer.told_text, len(text))
        if not any(new.values()) and not answer.done and not (self._log_probs or self._with_tokens):
            return None
        choice = self._choice(answer, content, answer.told, count)
        answer.told = count
        return self.frame([choice], complete=False)

    def _message_delta(self, answer: RunningAnswer) -> dict[str, Any]:
        """Return what is new of the assistant's message; a call is streamed when it is complete."""
        sent, parts = self._sent_parts.get(answer.index, NO_PARTS), self._parts(answer)
        self._sent_parts[answer.index] = parts
        calls = parts.tool_calls[len(sent.tool_calls) :]
        return message_delta(
            (parts.reasoning or "")[len(sent.reasoning or "") :],
            parts.content[len(sent.content) :],
            calls,
            call_ids(calls),
            first_call=len(sent.tool_calls),
        )

    def usage(self, answers: list[RunningAnswer]) -> dict[str, Any]:
        """Count tokens; a prompt with n answers counts once."""
        first = [answer.sequence for answer in answers[:: self._n]]
        return token_usage(
            sum(len(sequence.prompt) for sequence in first),
            sum(answer.count for answer in answers),
            sum(sequence.cached_tokens for sequence in first),
        )

    def _choice(
        self, answer: RunningAnswer, content: dict[str, Any], start: int, end: int, *, echo: Echo | None = None
    ) -> dict[str, Any]:
        finish = answer.finish_reason()
        choice = {"index": answer.index, **content, "logprobs": self._log_probs_of(answer, start, end, echo=echo)}
        choice["finish_reason"] = finish["type"] if finish else None
        if finish and finish["type"] == "stop" and self._parser is not None and self._parts(answer).tool_calls:
            choice["finish_reason"] = "tool_calls"
        if finish:
            choice["matched_stop"] = finish.get("matched")
        if self._with_tokens:
            choice["prompt_token_ids"] = list(answer.sequence.prompt)
            choice["response_token_ids" if self._kind.chat else "token_ids"] = answer.sequence.tokens[start:end]
            if answer.sequence.grammar is not None:
                choice["loss_mask"] = answer.sequence.loss_mask[start:end]
        return choice

    def _log_probs_of(
        self, answer: RunningAnswer, start: int, end: int, *, echo: Echo | None = None
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer's tokens, after those of its prompt if that is shown with them."""
        if not self._log_probs:
            return None
        scores = answer_log_probs(answer, start, end)
        if self._kind.chat:
            return chat_scores(scores, self._vocabulary)
        scores = [*(echo.log_probs if echo else []), *scores]
        log_probs = completion_log_probs(scores, self._vocabulary, offset=self._offsets.get(answer.index, 0))
        if scores:
            self._offsets[answer.index] = log_probs["text_offset"][-1] + len(log_probs["tokens"][-1])
        return log_probs
