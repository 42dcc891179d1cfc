"""The client side of SGLang's HTTP API for generation and scoring, which `slimectl serve` implements too."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimectl.data.routed_experts import Routing, encoded
from slimectl.engines.http.api import GetJson, PostJson, ScoredToken, StreamError, UnexpectedAnswer
from slimectl.engines.http.request import PendingRequest, shared_fields
from slimectl.types import SamplingParams, TopTokens

EXTRAS = {
    "spec_verify_ct": "spec_verify_ct",
    "spec_num_correct_drafts": "spec_accept_token_num",
    "spec_num_proposed_drafts": "spec_draft_token_num",
    "num_retractions": "num_retractions",
    "dp_rank": "dp_rank",
}
"""Extra metadata of a response, copied if present: SGLang's name to ours."""

PAUSED = "engine_paused"
"""Error type of `slimectl serve` for a request that has waited too long for a paused engine."""


@dataclass(frozen=True)
class SglangApi:
    """engines.http.api.ServerApi of SGLang 0.5.18 to 0.5.21 and of `slimectl serve`."""

    routed_experts: tuple[int, int] | None = None
    """(layers of the model, experts per token) if responses should include the experts of every token."""

    name = "SGLang or `slimectl serve`"
    generate_path = "/generate"

    def generate_body(self, request: PendingRequest) -> dict[str, Any]:
        options: dict[str, Any] = {} if self.routed_experts is None else {"return_routed_experts": True}
        if request.params.top_log_probs:
            options["top_logprobs_num"] = request.params.top_log_probs
        return {
            "input_ids": request.prompt,
            "sampling_params": sampling_body(request.params, limit=request.limit),
            "return_logprob": True,
            "stream": True,
            "rid": request.request_id,
            **options,
        }

    def add_event(self, event: Mapping[str, Any], request: PendingRequest) -> None:
        """Add one event, which has only the new tokens or, from some servers, all tokens so far."""
        _check_event(event)
        meta = event["meta_info"]
        spans = meta.get("weight_versions") or ([meta["weight_version"]] if "weight_version" in meta else [])
        request.add_versions(spans)
        ids, text = event.get("output_ids") or [], event.get("text", "")
        scored = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        tops = list(map(_top_tokens, meta.get("output_top_logprobs") or []))
        count_before = len(request.tokens)
        total = meta.get("completion_tokens", count_before + len(ids))
        is_cumulative = count_before > 0 and len(ids) == total and count_before + len(ids) != total
        request.text = text if is_cumulative or not count_before else request.text + text
        if is_cumulative:
            ids, scored, tops = ids[count_before:], scored[count_before:], tops[count_before:]
        request.cached_tokens = meta.get("cached_tokens") or request.cached_tokens
        request.queue_s = meta.get("queue_time") or 0.0  # SGLang reports it with --enable-metrics
        request.extras |= {ours: meta[name] for name, ours in EXTRAS.items() if meta.get(name) is not None}
        reason = meta.get("finish_reason")
        if reason is not None:
            request.finish = reason["type"] if isinstance(reason, dict) else str(reason)
            request.text_is_cut = isinstance(reason, dict) and isinstance(reason.get("matched"), str)
        request.add(ids, scored, tops)
        if self.routed_experts is not None and reason is not None and request.tokens:
            request.extras["routed_experts"] = _routing(meta.get("routed_experts"), self.routed_experts)

    def is_paused(self, status: int, body: Any) -> bool:
        error = body.get("error") if isinstance(body, dict) else None
        return status == 503 and isinstance(error, dict) and error.get("type") == PAUSED

    def abort_requests(self, ids: Sequence[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
        bodies = [{"rid": "", "abort_all": True}] if ids is None else [{"rid": name} for name in ids]
        return [("/abort_request", body) for body in bodies]

    async def model_info(self, get: GetJson) -> Mapping[str, Any] | None:
        model, server = await get("/model_info"), await get("/server_info")
        if not isinstance(model, dict):
            return None
        length = server.get("context_length") if isinstance(server, dict) else None
        return {**model, "context_length": length}

    async def prompt_log_probs(
        self, post: PostJson, rows: Sequence[Sequence[int]], starts: Sequence[int], *, top: int = 0
    ) -> list[list[ScoredToken]]:
        query: dict[str, Any] = {"input_ids": [list(row) for row in rows], "logprob_start_len": list(starts)}
        if top:
            query["top_logprobs_num"] = top
        return [scores[1:] for scores in await _score(post, query, count=len(rows))]

    async def tokenize(self, post: PostJson, text: str) -> list[int]:
        (scores,) = await _score(post, {"text": [text], "logprob_start_len": 0}, count=1)
        return [score.token for score in scores]


def sampling_body(params: SamplingParams, *, limit: int) -> dict[str, Any]:
    """Convert sampling parameters to SGLang's names, always with a seed.

    In deterministic mode, SGLang uses the same seed for all requests without one. As in the embedded engine,
    log-probabilities are untempered for greedy sampling. Otherwise they are from the tempered, unfiltered distribution.
    """
    return {
        **shared_fields(params),
        "max_new_tokens": limit,
        "min_new_tokens": min(params.min_tokens, limit),
        "sampling_seed": (secrets.randbits(63) if params.seed is None else params.seed) % 2**63,
    }


def _check_event(event: Mapping[str, Any]) -> None:
    """Raise StreamError for an error in the stream: an error event, or an "abort" with a status code."""
    if "error" in event:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        raise StreamError(int(code or 400), event)
    reason = event["meta_info"].get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        raise StreamError(int(reason["status_code"]), reason)


def _routing(text: Any, size: tuple[int, int]) -> Routing:
    """Decode a response's experts from base64 of int32 [tokens, layers, experts per token]. Raises StreamError."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
        return encoded(flat.reshape(-1, *size))
    except (TypeError, ValueError):
        shown = "none" if text is None else "another form"
        message = f"routed_experts: {shown}. Start SGLang with --enable-return-routed-experts and this model."
        raise StreamError(400, {"error": {"message": message}}) from None


async def _score(post: PostJson, query: Mapping[str, Any], *, count: int) -> list[list[ScoredToken]]:
    """Score prompts' tokens from `logprob_start_len` on. The first token has no log-probability."""
    params = {"max_new_tokens": 0, "temperature": 1.0}
    reply = await post("/generate", {**query, "return_logprob": True, "sampling_params": params})
    if not isinstance(reply, list) or len(reply) != count:
        raise UnexpectedAnswer(f"{str(reply)[:60]!r} to {count} prompts")
    try:
        return [_scored_tokens(answer["meta_info"], "top_logprobs_num" in query) for answer in reply]
    except (KeyError, TypeError, ValueError):
        raise UnexpectedAnswer(f"{str(reply)[:60]!r}") from None


def _scored_tokens(meta: Mapping[str, Any], with_top: bool) -> list[ScoredToken]:
    entries = meta["input_token_logprobs"]
    tops = meta["input_top_logprobs"] if with_top else [None] * len(entries)
    return [
        ScoredToken(token, log_prob, _top_tokens(top)) for (log_prob, token, *_), top in zip(entries, tops, strict=True)
    ]


def _top_tokens(entries: Sequence[Sequence[Any]] | None) -> TopTokens:
    """Return the likeliest tokens of a position. The first of a prompt has none."""
    return [(token, log_prob) for log_prob, token, *_ in entries or []]
