"""Generation request to a server, and its answer so far."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from slimectl.engines.http.transport import parsed, words_of
from slimectl.engines.sglang.launch import NO_WEIGHTS
from slimectl.errors import BackendError, SettingsError
from slimectl.types import Completion, SamplingParams

KEPT = {
    "routed_experts": "routed_experts",
    "spec_verify_ct": "spec_verify_ct",
    "spec_num_correct_drafts": "spec_accept_token_num",
    "spec_num_proposed_drafts": "spec_draft_token_num",
    "num_retractions": "num_retractions",
    "dp_rank": "dp_rank",
}
"""Extra metadata of an answer: SGLang's name and ours; copied if present."""


class Unavailable(Exception):
    """Error: the server could not answer now; it, or another, may later."""


class Paused(Unavailable):
    """Error: the server is alive but paused, and reported so after a while."""


def sampling_body(params: SamplingParams, *, limit: int) -> dict[str, Any]:
    """Convert sampling parameters to SGLang's names, always with a seed.

    In deterministic mode SGLang uses the same seed for all requests without one. Greedy log-probabilities are
    untempered in SGLang too, and all others are of the tempered, unfiltered distribution.
    """
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_new_tokens": limit,
        "min_new_tokens": min(params.min_tokens, limit),
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": (secrets.randbits(63) if params.seed is None else params.seed) % 2**63,
    }


@dataclass(slots=True)
class PendingRequest:
    """Request in flight, retried on other servers if needed; its answer comes from the last server alone."""

    body: dict[str, Any]
    key: int
    """Affinity key: equal prompts have equal keys, and go to the same server, whose prefix cache has them."""

    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer on the client, because SGLang ignores them under ignore_eos."""

    min_tokens: int = 0
    decode: Callable[[list[int]], str] | None = None
    aborted: bool = False
    asking: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    versions: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None

    def restart(self) -> None:
        """Drop the answer of a failed server, and draw a new request id: the old one may still be running there."""
        self.tokens, self.log_probs, self.text, self.versions, self.meta, self.finish = [], [], "", [], {}, None
        self.body["rid"] = f"slimectl-{uuid.uuid4().hex}"

    def take(self, chunk: dict[str, Any]) -> None:
        """Add one event of the stream, which has the new tokens, or (other servers) all tokens so far.

        Raises Unavailable if they were not sampled with pushed weights.
        """
        meta = chunk["meta_info"]
        self._add_versions(meta)
        ids = chunk.get("output_ids") or []
        count_before, total = len(self.tokens), meta.get("completion_tokens", len(self.tokens) + len(ids))
        is_cumulative = count_before > 0 and len(ids) == total and count_before + len(ids) != total
        scored = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        self.text = chunk.get("text", "") if is_cumulative or not count_before else self.text + chunk.get("text", "")
        self.tokens += ids[count_before:] if is_cumulative else ids
        self.log_probs += scored[count_before:] if is_cumulative else scored
        self.meta |= meta
        reason = meta.get("finish_reason")
        if reason is not None:
            self.finish = reason["type"] if isinstance(reason, dict) else str(reason)
        self._apply_stop_tokens(count_before)

    def _add_versions(self, meta: dict[str, Any]) -> None:
        spans = meta.get("weight_versions") or ([meta["weight_version"]] if "weight_version" in meta else [])
        versions = [span["version"] if isinstance(span, dict) else span for span in spans]
        if NO_WEIGHTS in versions:
            raise Unavailable("it has no weights yet")
        if len(versions) > 1:
            self.versions = versions
        elif versions and self.versions[-1:] != versions:
            self.versions += versions

    def _apply_stop_tokens(self, count_before: int) -> None:
        for position in range(max(count_before, self.min_tokens - 1), len(self.tokens)) if self.stop_tokens else ():
            if self.tokens[position] in self.stop_tokens:
                del self.tokens[position + 1 :], self.log_probs[position + 1 :]
                self.finish = "stop"
                self.meta["finish_reason"] = None
                return

    def completion(self, finish: str | None = None) -> Completion:
        length = min(len(self.tokens), len(self.log_probs))
        reason = self.meta.get("finish_reason")
        cut = isinstance(reason, dict) and isinstance(reason.get("matched"), str)
        tokens = self.tokens[:length]
        return Completion(
            tokens=tokens,
            log_probs=self.log_probs[:length],
            text=self.text if cut or self.decode is None else self.decode(tokens),
            finish=finish or self.finish or "abort",
            weight_versions=self.versions,
            cached_tokens=self.meta.get("cached_tokens") or 0,
            extras={ours: self.meta[name] for name, ours in KEPT.items() if self.meta.get(name) is not None},
        )


PAUSED = "engine_paused"
"""Type of the error of `slimectl serve` for a request that has waited long for a paused engine."""
RETRIED = {429, 500, 502, 503, 504}
MENDED_BY_ASKING_OTHERWISE = {400, 413, 422}


async def generate(
    session: aiohttp.ClientSession, url: str, flight: PendingRequest, *, headers: Mapping[str, str] | None = None
) -> None:
    """Stream an answer into `flight`.

    Raises Unavailable or aiohttp's errors if a retry may succeed, SettingsError or BackendError if none will.
    """
    async with session.post(f"{url}/generate", json=flight.body, headers=headers) as reply:
        if reply.status != 200:
            _refuse(url, reply.status, parsed(await reply.text()))
        async for event in _events(reply.content):
            _check_event(url, event)
            flight.take(event)
            if flight.finish is not None:
                return
    raise Unavailable("it broke off in the middle of an answer")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of every server-sent event, across packet boundaries."""
    buffer = b""
    async for packet in stream.iter_any():
        *lines, buffer = (buffer + packet).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)


def _check_event(url: str, event: Mapping[str, Any]) -> None:
    """Raise for refusals within the stream: an error event, or an "abort" that has a status."""
    if "error" in event:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        _refuse(url, int(code or 400), event)
    reason = event["meta_info"].get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        _refuse(url, int(reason["status_code"]), reason)


def _refuse(url: str, status: int, body: Any) -> None:
    error = body.get("error") if isinstance(body, dict) else None
    if status == 503 and isinstance(error, dict) and error.get("type") == PAUSED:
        raise Paused(words_of(body))
    if status in RETRIED:
        raise Unavailable(f"{status} {words_of(body)}")
    if status in MENDED_BY_ASKING_OTHERWISE:
        raise SettingsError(f"engine at {url} refuses the request: {words_of(body)}")
    hint = "; give its key by engine.api_key" if status == 401 else ""
    raise BackendError(f"engine at {url} answers {status}: {words_of(body)}{hint}")
