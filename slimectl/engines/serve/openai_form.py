"""Formats answers for OpenAI's API: whole, or as the delta since the last chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimectl.engines.serve.answers import Answer


@dataclass(frozen=True, slots=True)
class Kind:
    """Response fields that differ between the two endpoints."""

    prefix: str
    complete: str
    chunk: str
    chat: bool


COMPLETION = Kind("cmpl", "text_completion", "text_completion", chat=False)
CHAT = Kind("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)


class Form:
    """Formats the response of one request, with `n` answers per prompt."""

    def __init__(
        self,
        kind: Kind,
        *,
        model: str,
        n: int,
        log_probs: bool,
        with_tokens: bool,
        token_text: Callable[[int], str],
    ) -> None:
        self.rid = f"{kind.prefix}-{uuid.uuid4().hex}"
        self._kind = kind
        self._n = n
        self._created = int(time.time())
        self._model = model
        self._log_probs = log_probs
        self._with_tokens = with_tokens
        self._token_text = token_text

    def frame(self, choices: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
        return {
            "id": self.rid,
            "object": self._kind.complete if complete else self._kind.chunk,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            text = answer.text()
            content = {"message": {"role": "assistant", "content": text}} if self._kind.chat else {"text": text}
            choices.append(self._choice(answer, content, 0, answer.count))
        spans = answers[0].spans()
        versions = {"weight_version": spans[-1]["version"], "weight_versions": spans} if spans else {}
        return self.frame(choices, complete=True) | {"usage": self.usage(answers), "metadata": versions}

    def openings(self, answers: list[Answer]) -> list[dict[str, Any]]:
        """Return the first chunks of a chat's stream, which name the role."""
        if not self._kind.chat:
            return []
        choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self.frame([{"index": answer.index, **choice}], complete=False) for answer in answers]

    def delta(self, answer: Answer) -> dict[str, Any] | None:
        """Return the delta of an answer; None while its new tokens have no text yet."""
        count, text = answer.count, answer.text()
        new = text[answer.told_text :]
        if not new and not answer.done and not (self._log_probs or self._with_tokens):
            return None
        content = {"delta": {"content": new}} if self._kind.chat else {"text": new}
        choice = self._choice(answer, content, answer.told, count)
        answer.told, answer.told_text = count, max(answer.told_text, len(text))
        return self.frame([choice], complete=False)

    def usage(self, answers: list[Answer]) -> dict[str, Any]:
        """Count tokens; a prompt with n answers counts once."""
        prompt_tokens = sum(len(answer.sequence.prompt) for answer in answers[:: self._n])
        completion_tokens = sum(answer.count for answer in answers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(answer.sequence.cached_tokens for answer in answers)},
        }

    def _choice(self, answer: Answer, content: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        finish = answer.finish_reason()
        choice = {"index": answer.index, **content, "logprobs": self._log_probs_of(answer, start, end)}
        choice["finish_reason"] = finish["type"] if finish else None
        if finish:
            choice["matched_stop"] = finish.get("matched")
        if self._with_tokens:
            choice["prompt_token_ids"] = list(answer.sequence.prompt)
            choice["response_token_ids" if self._kind.chat else "token_ids"] = answer.sequence.tokens[start:end]
        return choice

    def _log_probs_of(self, answer: Answer, start: int, end: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the sampled tokens; those of other tokens are not available."""
        if not self._log_probs:
            return None
        tokens, log_probs = answer.sequence.tokens[start:end], answer.sequence.log_probs[start:end]
        texts = [self._token_text(token) for token in tokens]
        if not self._kind.chat:
            return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, log_prob in zip(texts, log_probs, strict=True)
            ]
        }
