"""The client side of vLLM's HTTP API for generation and scoring from tokens (/inference/v1/generate, vLLM 0.32.0)."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimectl.data.routed_experts import Routing, encoded
from slimectl.engines.http.api import GetJson, PostJson, ScoredToken, StreamError, UnexpectedAnswer
from slimectl.engines.http.request import PendingRequest, shared_fields
from slimectl.errors import SettingsError
from slimectl.types import TopTokens

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to the request ids of `GENERATE`."""


@dataclass(frozen=True)
class VllmApi:
    """engines.http.api.ServerApi of vLLM in development mode, with --enable-scale-out."""

    routed_experts: bool = False
    """Whether responses include the experts of every token. Servers need --enable-return-routed-experts."""

    name = "vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
    generate_path = GENERATE

    def generate_body(self, request: PendingRequest) -> dict[str, Any]:
        params = request.params
        if params.top_log_probs and params.stop:
            raise SettingsError(
                "engine.backend: vLLM names the likeliest tokens only without stop strings. Drop "
                "rollout.top_log_probs or rollout.stop, or use embedded or sglang"
            )
        body = {
            **shared_fields(params),
            "max_tokens": max(1, request.limit),
            "min_tokens": min(params.min_tokens, request.limit),
            "seed": params.seed,
            # 0 is only the sampled token. The likeliest ones come after it, as many as asked for together.
            "logprobs": params.top_log_probs and params.top_log_probs + 1,
            "detokenize": bool(params.stop),  # else the text is not used
        }
        return {
            "request_id": request.request_id,
            "token_ids": request.prompt,
            "sampling_params": body,
            "output_mode": "text" if params.stop else "tokens",
            "stream": True,
        }

    def add_event(self, event: Mapping[str, Any], request: PendingRequest) -> None:
        """Add one event with new tokens. The last event lists the weight versions of all tokens."""
        if "error" in event:
            raise StreamError(int(event["error"].get("code") or 400), event)
        for choice in event["choices"]:
            space = request.limit - len(request.tokens)
            tokens = (choice.get("token_ids") or [])[:space]
            scored = (choice.get("logprobs") or {}).get("content") or []
            request.add_versions(choice.get("weight_versions") or [])
            request.text += choice.get("text") or ""
            request.finish = choice.get("finish_reason")
            request.text_is_cut = isinstance(choice.get("stop_reason"), str)
            top = request.params.top_log_probs
            tops = [_likeliest(entry["top_logprobs"], top) for entry in scored[:space]] if top else []
            request.add(tokens, [entry["logprob"] for entry in scored[:space]], tops)
            if self.routed_experts and request.finish is not None and request.tokens:
                request.extras["routed_experts"] = _routing(choice.get("routed_experts"))

    def is_paused(self, status: int, body: Any) -> bool:
        return False  # a paused vLLM keeps its requests waiting

    def abort_requests(self, ids: Sequence[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
        if ids is None:
            return [("/abort_requests", {})]
        return [("/abort_requests", {"request_ids": [ID_PREFIX + name for name in ids]})] if ids else []

    async def model_info(self, get: GetJson) -> Mapping[str, Any] | None:
        models = await get("/v1/models")
        if not isinstance(models, dict) or not models.get("data"):
            return None
        return {"context_length": models["data"][0].get("max_model_len")}

    async def prompt_log_probs(
        self, post: PostJson, rows: Sequence[Sequence[int]], starts: Sequence[int], *, top: int = 0
    ) -> list[list[ScoredToken]]:
        answers = await asyncio.gather(*(self._score(post, list(row), top) for row in rows))
        return [scores[start:] for scores, start in zip(answers, starts, strict=True)]

    async def tokenize(self, post: PostJson, text: str) -> list[int]:
        reply = await post("/tokenize", {"prompt": text})
        if not isinstance(reply, dict) or not isinstance(reply.get("tokens"), list):
            raise UnexpectedAnswer(f"{str(reply)[:60]!r}")
        return list(reply["tokens"])

    async def _score(self, post: PostJson, tokens: list[int], top: int) -> list[ScoredToken]:
        """Score all tokens except the first."""
        params = {"max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
        reply = await post(GENERATE, {"token_ids": tokens, "sampling_params": params})
        try:
            by_position = reply["prompt_logprobs"][1:]
            return [
                ScoredToken(token, entries[str(token)]["logprob"], _prompt_top(entries, top))
                for token, entries in zip(tokens[1:], by_position, strict=True)
            ]
        except (KeyError, TypeError, ValueError):
            raise UnexpectedAnswer(f"{str(reply)[:60]!r}") from None


def _prompt_top(entries: Mapping[str, Any], count: int) -> TopTokens:
    return _likeliest([{"token_id": int(token), **score} for token, score in entries.items()], count)


def _likeliest(entries: Sequence[Mapping[str, Any]], count: int) -> TopTokens:
    """Return the `count` likeliest tokens of a position, whose entries have its own token in addition."""
    ranked = sorted(entries, key=lambda entry: (-entry["logprob"], entry.get("rank") or 0))
    return [(entry["token_id"], entry["logprob"]) for entry in ranked[:count]]


def _routing(text: Any) -> Routing:
    """Decode the experts of a response, base64 of .npy [tokens, layers, experts per token]. Raises StreamError."""
    try:
        return encoded(np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False))
    except (TypeError, ValueError, EOFError):
        shown = "none" if text is None else "another form"
        message = f"routed_experts: {shown}. Start vLLM with --enable-return-routed-experts."
        raise StreamError(400, {"error": {"message": message}}) from None
