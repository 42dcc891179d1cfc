"""A generation request in flight, with its response so far."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimectl.protocols import OnTokens
from slimectl.system.liveness import note_progress
from slimectl.types import Completion, EngineTimes, SamplingParams, TopTokens

NO_WEIGHTS = "unpushed"
"""Weight version of a server that waits for its first push. Its responses are never used."""


class Unavailable(Exception):
    """Raised if a server cannot respond now. A retry, perhaps on another server, may succeed."""


class Paused(Unavailable):
    """Raised if the server is alive but has been paused for a while."""


@dataclass(slots=True)
class PendingRequest:
    """A request in flight. It may be retried on other servers, and its response comes only from the last one.

    `key` selects a server. Equal prompts have equal keys, so that they go to the server that has them in its prefix
    cache. `stop_tokens` end the response in the client, because not every server respects them with ignore_eos.
    """

    prompt: list[int]
    params: SamplingParams
    limit: int
    """Maximum number of response tokens: params.max_tokens, or less if the context ends earlier."""

    key: int
    stop_tokens: frozenset[int] = frozenset()
    decode: Callable[..., str] | None = None
    """Decodes tokens (data.growing_text.response_text). If it is None, the server's text is used."""

    on_tokens: OnTokens | None = None
    request_id: str = ""
    aborted: bool = False
    asking: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopTokens] = field(default_factory=list)
    """The likeliest tokens in place of each token, if the parameters ask for them."""

    text: str = ""
    text_is_cut: bool = False
    """Whether the server removed a stop string from the text that is still in the tokens."""

    versions: list[str] = field(default_factory=list)
    version_starts: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    engine: int = 0
    """Number of the server that has the request."""

    sent: float = 0.0
    """When it was sent there (time.perf_counter)."""

    first_token: float = 0.0
    queue_s: float = 0.0
    """Seconds in the queue of the server, if it reports them."""

    def restart(self) -> None:
        """Discard the response and set a new request id, because the old request may still be running."""
        self.tokens, self.log_probs, self.top_log_probs, self.text, self.text_is_cut = [], [], [], "", False
        self.versions, self.version_starts, self.cached_tokens, self.extras, self.finish = [], [], 0, {}, None
        self.sent, self.first_token, self.queue_s = time.perf_counter(), 0.0, 0.0
        self.request_id = f"slimectl-{uuid.uuid4().hex}"

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], tops: Sequence[TopTokens] = ()) -> None:
        """Append new tokens, and end the response at the first stop token among them."""
        note_progress()
        count_before = len(self.tokens)
        if tokens and not count_before:
            self.first_token = time.perf_counter()
        first = max(count_before, self.params.min_tokens - 1)
        self.tokens += tokens
        self.log_probs += log_probs
        self.top_log_probs += tops
        for position in range(first, len(self.tokens)) if self.stop_tokens else ():
            if self.tokens[position] in self.stop_tokens:
                del self.tokens[position + 1 :], self.log_probs[position + 1 :]
                self.finish, self.text_is_cut = "stop", False
                break
        if self.on_tokens is not None:
            self.on_tokens(count_before, self.tokens[count_before:])

    def add_versions(self, spans: Sequence[Mapping[str, Any] | str]) -> None:
        """Record the weight versions of the response, before adding new tokens: all spans, or the current version.

        Raises Unavailable if no weights have been pushed.
        """
        versions = [str(span["version"]) if isinstance(span, Mapping) else span for span in spans]
        if NO_WEIGHTS in versions:
            self.restart()  # or its tokens would count as progress
            raise Unavailable("the server has no weights yet")
        if len(versions) > 1:
            self.versions = versions
            self.version_starts = [
                int(span["start"]) for span in spans if isinstance(span, Mapping) and "start" in span
            ]
        elif versions and self.versions[-1:] != versions:
            self.versions += versions
            self.version_starts.append(len(self.tokens))

    def completion(self, finish: str | None = None) -> Completion:
        length = min(len(self.tokens), len(self.log_probs))
        tokens = self.tokens[:length]
        text = self.text
        if self.decode is not None and not self.text_is_cut:
            keep_special = not self.params.skip_special_tokens
            text = self.decode(tokens, keep_special=keep_special, ended=self.finish == "stop")
        return Completion(
            tokens=tokens,
            log_probs=self.log_probs[:length],
            text=text,
            finish_reason=finish or self.finish or "abort",
            weight_versions=self.versions,
            version_starts=self.version_starts,
            cached_tokens=self.cached_tokens,
            extras=self.extras,
            top_log_probs=self.top_log_probs[:length],
            times=self._times(),
        )

    def _times(self) -> EngineTimes | None:
        """Return when the server worked on the request, by the clock of this process."""
        if not self.first_token:
            return None
        return EngineTimes(min(self.sent + self.queue_s, self.first_token), self.first_token, self.engine)


def shared_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that SGLang and vLLM name alike, with penalties and biases that have an effect."""
    always = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
    neutral, penalties = SamplingParams(), ("repetition_penalty", "presence_penalty", "frequency_penalty")
    names = [*always, *(name for name in penalties if getattr(params, name) != getattr(neutral, name))]
    fields = {name: getattr(params, name) for name in names}
    fields |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if not params.skip_special_tokens:
        fields |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    return fields
