"""Parses sampling parameters and output options of SGLang's and OpenAI's APIs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slimectl.engines.server.schema import NUMBERS, RequestBody
from slimectl.types import SamplingParams

GREEDY_BELOW = 1e-6
"""Temperatures below count as 0, as in SGLang: logits divided by them overflow."""
MOST_STOPS = 32
MOST_ANSWERS = 4096
"""Maximum answers of one request: prompts times n."""

UNSUPPORTED: dict[str, tuple[float | str, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": (),
    "json_schema": (), "regex": (), "ebnf": (), "structural_tag": (), "stop_regex": (), "custom_params": (),
    "beam_width": (1,),
}  # fmt: skip
"""Fields that the engine does not support, and their values without effect."""

KNOWN = {
    "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids",
    "ignore_eos", "n", "sampling_seed", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", *UNSUPPORTED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Sampling parameters and output options of one prompt."""

    params: SamplingParams
    n: int = 1
    keep_special: bool = False
    """Whether special tokens appear in the text."""
    keep_stop: bool = False
    """Whether the stop string stays in the text."""
    interval: int = 1
    """Tokens between two chunks of a stream."""

    def seeded(self, i: int) -> SamplingParams:
        """Return the params of answer i: seeds count up, so that the first equals the answer of n = 1."""
        seed = self.params.seed
        return self.params if i == 0 or seed is None else replace(self.params, seed=seed + i)


def from_sglang(fields: RequestBody, *, interval: int = 1) -> GenerationRequest:
    """Parse the `sampling_params` of /generate; `interval` is the default stream_interval."""
    fields.check_names(KNOWN)
    fields.refuse_beyond(UNSUPPORTED)
    params = SamplingParams(
        max_tokens=fields.whole("max_new_tokens", 128),
        min_tokens=fields.whole("min_new_tokens", 0),
        seed=fields.seed("sampling_seed"),
        **_shared_params(fields),
    )
    return _build_wish(fields, params, interval)


def from_openai(fields: RequestBody, *, default_max: int, interval: int = 1) -> GenerationRequest:
    """Parse the parameters of a completion, with SGLang's extra fields."""
    fields.refuse_beyond(UNSUPPORTED)
    longest = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    params = SamplingParams(
        max_tokens=fields.whole(longest, default_max, low=1),
        min_tokens=fields.whole("min_tokens", 0),
        seed=fields.seed("seed"),
        **_shared_params(fields),
    )
    return _build_wish(fields, params, interval)


def _shared_params(fields: RequestBody) -> dict[str, Any]:
    temperature = fields.number("temperature", 1.0, low=0.0, high=1e4)
    stops = fields.texts("stop", max_count=MOST_STOPS)
    if not all(0 < len(stop) <= 1024 for stop in stops):
        raise fields.refuse("stop", "a stop string has 1 to 1024 characters")
    stop_tokens = fields.tokens("stop_token_ids", fields.raw("stop_token_ids") or [])
    if any(not 0 <= token < NUMBERS for token in stop_tokens) or len(stop_tokens) > 1024:
        raise fields.refuse("stop_token_ids", "are at most 1024 token ids")
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "top_p": fields.number("top_p", 1.0, low=1e-6, high=1.0),
        "top_k": fields.whole("top_k", -1, low=-1),
        "min_p": fields.number("min_p", 0.0, low=0.0, high=1.0),
        "stop": tuple(stops),
        "stop_token_ids": tuple(stop_tokens),
        "ignore_eos": fields.flag("ignore_eos"),
    }


def _build_wish(fields: RequestBody, params: SamplingParams, interval: int) -> GenerationRequest:
    if params.min_tokens > params.max_tokens:
        raise fields.refuse("min_new_tokens", f"{params.min_tokens} is more than max_new_tokens, {params.max_tokens}")
    return GenerationRequest(
        params,
        n=fields.whole("n", 1, low=1, high=MOST_ANSWERS),
        keep_special=not fields.flag("skip_special_tokens", True),
        keep_stop=fields.flag("no_stop_trim"),
        interval=fields.whole("stream_interval", interval, low=1),
    )
