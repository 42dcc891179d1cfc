"""Formats responses for OpenAI's API, as a whole or as the delta since the last chunk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.chats.requests import ChatRequest
from slimectl.data.answers import AnswerParser, ParsedAnswer
from slimectl.data.chat_responses import OPENING, ApiKind, assistant_message, call_ids, message_delta, token_usage
from slimectl.data.token_bytes import TokenBytes
from slimectl.data.token_log_probs import (
    TokenLogProb,
    chat_scores,
    completion_log_probs,
    ranked_tokens,
    token_by_id,
)
from slimectl.engines.server.log_probs import answer_log_probs
from slimectl.engines.server.requests import RunningAnswer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt shown before its responses: its text, and log-probabilities if requested."""

    text: str
    log_probs: Sequence[TokenLogProb] = ()


@dataclass(frozen=True, slots=True)
class Shown:
    """What a response shows in addition to the parts that every server has."""

    token_ids: bool = False
    tokens_by_id: bool = False
    """Whether log-probabilities identify tokens by id."""
    prompt_tops: int | None = None
    """Number of likeliest tokens at each prompt position, in `prompt_logprobs`."""
    running_usage: bool = False
    """Whether every chunk of a stream has the token counts so far."""


NO_PARTS = ParsedAnswer("")
UNFINISHED_CHOICE: Mapping[str, Any] = {"logprobs": None, "finish_reason": None}


class ResponseFormatter:
    """Formats the response to one request, with `n` completions per prompt.

    `echoes` are the prompts to show. `prompt_scores` are the log-probabilities of the prompts, if `shown` includes
    them.
    """

    def __init__(
        self,
        kind: ApiKind,
        ask: ChatRequest,
        shown: Shown,
        vocabulary: TokenBytes,
        *,
        echoes: Sequence[Echo] = (),
        prompt_scores: Sequence[Sequence[TokenLogProb]] = (),
        parser: AnswerParser | None = None,
    ) -> None:
        self.rid = f"{kind.prefix}-{ask.identity}"
        self._kind = kind
        self.ask = ask
        self.model = ask.model
        self._created = int(time.time())
        self._shown = shown
        self._vocabulary = vocabulary
        self._name = token_by_id if shown.tokens_by_id else vocabulary.text
        self._echoes = echoes
        self._prompt_scores = prompt_scores
        self._parser = parser
        self._sent_parts: dict[int, ParsedAnswer] = {}
        """The parts of each response that have been streamed."""
        self._offsets: dict[int, int] = {}
        """Number of characters so far in the tokens of each response."""

    def frame(self, choices: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
        return self._kind.frame(self.ask.identity, self._created, self.model, choices, complete=complete)

    def whole(self, answers: list[RunningAnswer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            echo = self._echo(answer)
            content = self._message(answer) if self._kind.chat else {"text": echo.text + answer.text()}
            choices.append(self._choice(answer, content, 0, answer.count, echo=echo))
        spans = answers[0].spans()
        versions = {"weight_version": spans[-1]["version"]} if spans else {}
        response = self.frame(choices, complete=True) | {"usage": self.usage(answers), "metadata": versions}
        if self._kind.chat and self._shown.prompt_tops is not None:
            response["prompt_logprobs"] = self._prompt_log_probs(answers[0])
        return response

    def _prompt_log_probs(self, answer: RunningAnswer) -> list[Any]:
        scores = self._prompt_scores[answer.index // self.ask.n]
        return ranked_tokens(scores, self._vocabulary, self._shown.prompt_tops or 0)

    def _message(self, answer: RunningAnswer) -> dict[str, Any]:
        parts = self._parts(answer)
        return {"message": assistant_message(parts, call_ids(parts.tool_calls))}

    def _parts(self, answer: RunningAnswer) -> ParsedAnswer:
        parser = self._parser
        return ParsedAnswer(answer.text()) if parser is None else parser.parse(answer.text(), complete=answer.done)

    def openings(self, answers: list[RunningAnswer]) -> list[dict[str, Any]]:
        """Return the first chunks of a stream: the role in a chat, or the prompt in a completion with echo."""
        chunks: list[dict[str, Any]] = []
        for answer in answers:
            end: dict[str, Any] = dict(UNFINISHED_CHOICE)
            if self._kind.chat:
                chunks.append(self._chunk({"index": answer.index, "delta": OPENING, **end}, answer))
            elif self._echoes:
                echo = self._echo(answer)
                end["logprobs"] = self._log_probs_of(answer, 0, 0, echo=echo)
                chunks.append(self._chunk({"index": answer.index, "text": echo.text, **end}, answer))
        return chunks

    def last_chunk(self, answers: list[RunningAnswer]) -> dict[str, Any]:
        """Return the final chunk, with token counts and no choices."""
        return self.frame([], complete=False) | {"usage": self.usage(answers)}

    def _chunk(self, choice: dict[str, Any], answer: RunningAnswer) -> dict[str, Any]:
        """Return a chunk with the token counts so far, or null if only the last chunk has them."""
        chunk = self.frame([choice], complete=False)
        if self.ask.stream_usage or self._shown.running_usage:
            chunk["usage"] = self.usage([answer]) if self._shown.running_usage else None
        return chunk

    def _echo(self, answer: RunningAnswer) -> Echo:
        return self._echoes[answer.index // self.ask.n] if self._echoes else Echo("")

    def deltas(self, answer: RunningAnswer) -> list[dict[str, Any]]:
        """Return the chunks with the new parts of a response: none while its new tokens have no text yet.

        Tool calls come before the chunk with the finish reason. The openai client 3.54 ends only calls that it has
        seen before that chunk.
        """
        count, chunks = answer.count, []
        if self._kind.chat:
            new = self._message_delta(answer)
            if "tool_calls" in new and answer.done:
                chunks.append(self._chunk({"index": answer.index, "delta": new, **UNFINISHED_CHOICE}, answer))
                new = {}
            content: dict[str, Any] = {"delta": new or {"content": ""}}
        else:
            text = answer.text()
            new = content = {"text": text[answer.told_text :]}
            answer.told_text = max(answer.told_text, len(text))
        if not any(new.values()) and not answer.done and not (self.ask.log_probs or self._shown.token_ids):
            return []
        choice = self._choice(answer, content, answer.told, count)
        answer.told = count
        return [*chunks, self._chunk(choice, answer)]

    def _message_delta(self, answer: RunningAnswer) -> dict[str, Any]:
        """Return the new parts of the assistant's message. A tool call is streamed when it is complete."""
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
        """Count tokens. A prompt with n completions counts once."""
        first = [answer.sequence for answer in answers[:: self.ask.n]]
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
            choice |= {"matched_stop": finish.get("matched"), "weight_versions": answer.spans()}
            if not self._kind.chat and self._shown.prompt_tops is not None:
                choice["prompt_logprobs"] = self._prompt_log_probs(answer)
        if self._shown.token_ids:
            choice["prompt_token_ids"] = list(answer.sequence.prompt)
            choice["response_token_ids" if self._kind.chat else "token_ids"] = answer.sequence.tokens[start:end]
            if answer.sequence.grammar is not None:
                choice["loss_mask"] = answer.sequence.loss_mask[start:end]
        return choice

    def _log_probs_of(
        self, answer: RunningAnswer, start: int, end: int, *, echo: Echo | None = None
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of a response's tokens, preceded by the prompt's if the prompt is shown.

        Returns None without tokens, because clients read the first entry of every list.
        """
        scores = answer_log_probs(answer, start, end) if self.ask.log_probs else []
        if self._kind.chat:
            return chat_scores(scores, self._vocabulary, name=self._name) if scores else None
        scores = [*(echo.log_probs if echo else []), *scores]
        if not scores:
            return None
        offset = self._offsets.get(answer.index, 0)
        log_probs = completion_log_probs(scores, self._vocabulary, offset=offset, name=self._name)
        self._offsets[answer.index] = log_probs["text_offset"][-1] + len(self._vocabulary.text(scores[-1].token))
        return log_probs
