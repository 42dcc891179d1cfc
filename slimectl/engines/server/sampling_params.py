"""Parses the sampling parameters and output options of SGLang's and OpenAI's APIs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slimectl.chats.request_body import RequestBody
from slimectl.chats.request_options import ANY_OBJECT, read_schema, schema_text, stop_strings
from slimectl.engines.server.request_keys import SAMPLING_PARAMS, STRUCTURED_OUTPUTS
from slimectl.types import AllowedTokens, ChoiceGrammar, Grammar, JsonGrammar, RegexGrammar, SamplingParams

GREEDY_BELOW = 1e-6
"""Lower temperatures count as 0, as in SGLang, because dividing logits by them overflows."""
MOST_CHOICES = 4096
MOST_BIASES = 16384
MOST_BIAS = 1e4
MOST_ANSWERS = 4096
"""Maximum responses per request: prompts times n."""


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
    """Number of tokens per chunk of a stream."""
    top_log_probs: int = 0
    """Number of likeliest tokens to return at each position, with their log-probabilities."""
    routed_experts: bool = False
    """Whether the response includes the experts of every token."""
    restricted_by: str = ""
    """The key that requests the grammar."""

    def seeded(self, i: int) -> SamplingParams:
        """Return the params of response i. Seeds count up from the given one, which response 0 keeps."""
        seed = self.params.seed
        return self.params if i == 0 or seed is None else replace(self.params, seed=seed + i)


def from_sglang(fields: RequestBody, *, interval: int = 1) -> GenerationRequest:
    """Parse the `sampling_params` of /generate. `interval` is the default stream_interval."""
    fields.check(SAMPLING_PARAMS)
    params = SamplingParams(
        max_tokens=fields.whole("max_new_tokens", 128),
        min_tokens=fields.whole("min_new_tokens", 0),
        seed=fields.seed("sampling_seed"),
        **_shared_params(fields),
    )
    return _generation_request(fields, params, interval, _restrictions(fields, schema="json_schema", regex="regex"))


def from_openai(
    fields: RequestBody, *, default_max: int, lowest_max: int = 1, interval: int = 1, top_log_probs: int = 0
) -> GenerationRequest:
    """Parse the parameters of a completion, with SGLang's extra fields. `lowest_max` is the minimum of max_tokens."""
    params = SamplingParams(
        max_tokens=fields.max_tokens(default_max, low=lowest_max),
        min_tokens=fields.whole("min_tokens", 0),
        seed=fields.seed("seed"),
        **_shared_params(fields),
    )
    generation = _generation_request(fields, params, interval, _openai_restrictions(fields))
    return replace(generation, top_log_probs=top_log_probs)


Restrictions = dict[str, Grammar]
"""Grammars of a response by the key that requests them."""


def _openai_restrictions(fields: RequestBody) -> Restrictions:
    outputs = fields.inner("structured_outputs")
    outputs.check(STRUCTURED_OUTPUTS)
    schema = read_schema(fields.inner("response_format"), is_nested=True)
    restrictions: Restrictions = {
        **({} if schema is None else {"response_format": JsonGrammar(schema)}),
        **_restrictions(fields, schema="json_schema", regex="regex"),
        **_restrictions(fields, schema="guided_json", regex="guided_regex", choice="guided_choice"),
        **{f"structured_outputs.{name}": grammar for name, grammar in _restrictions(outputs, choice="choice").items()},
    }
    if outputs.flag("json_object"):
        restrictions["structured_outputs.json_object"] = JsonGrammar(ANY_OBJECT)
    if "allowed_token_ids" in fields:
        tokens = fields.tokens("allowed_token_ids", fields.raw("allowed_token_ids"))
        if not tokens:
            raise fields.refuse("allowed_token_ids", "is empty, so no token can be sampled")
        restrictions["allowed_token_ids"] = AllowedTokens(tuple(tokens))
    return restrictions


def _restrictions(fields: RequestBody, *, schema: str = "json", regex: str = "regex", choice: str = "") -> Restrictions:
    """Return the grammars that the keys with these names request."""
    restrictions: Restrictions = {}
    if (text := schema_text(fields, schema)) is not None:
        restrictions[schema] = JsonGrammar(text)
    if pattern := fields.text(regex):
        restrictions[regex] = RegexGrammar(pattern)
    if choices := fields.texts(choice, max_count=MOST_CHOICES):
        restrictions[choice] = ChoiceGrammar(tuple(choices))
    return restrictions


def _shared_params(fields: RequestBody) -> dict[str, Any]:
    temperature = fields.number("temperature", 1.0, low=0.0, high=1e4)
    stop_tokens = fields.tokens("stop_token_ids", fields.raw("stop_token_ids") or [])
    if len(stop_tokens) > 1024:
        raise fields.refuse("stop_token_ids", "has more than 1024 token ids")
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "top_p": fields.number("top_p", 1.0, low=1e-6, high=1.0),
        "top_k": fields.whole("top_k", -1, low=-1),
        "min_p": fields.number("min_p", 0.0, low=0.0, high=1.0),
        "stop": stop_strings(fields),
        "stop_token_ids": tuple(stop_tokens),
        "ignore_eos": fields.flag("ignore_eos"),
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
        "repetition_penalty": fields.number("repetition_penalty", 1.0, low=1e-3, high=2.0),
        "presence_penalty": fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        "logit_bias": _logit_bias(fields),
    }


def _logit_bias(fields: RequestBody) -> tuple[tuple[int, float], ...]:
    """Parse {"token id": bias}. JSON keys are always strings."""
    raw = fields.object("logit_bias")
    if len(raw) > MOST_BIASES:
        raise fields.refuse("logit_bias", f"has {len(raw)} tokens. The maximum is {MOST_BIASES}.")
    biases = fields.inner("logit_bias")
    for token in raw:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise fields.refuse("logit_bias", f"{token[:60]!a} is not a token id")
    return tuple((int(token), biases.number(token, 0.0, low=-MOST_BIAS, high=MOST_BIAS)) for token in raw)


def _generation_request(
    fields: RequestBody, params: SamplingParams, interval: int, restrictions: Restrictions
) -> GenerationRequest:
    if len(restrictions) > 1:
        first, second, *_ = restrictions
        raise fields.refuse(second, f"cannot be combined with {first}. Set only one.")
    name, grammar = next(iter(restrictions.items()), ("", None))
    low, high = ("min_tokens", "max_tokens") if "min_tokens" in fields else ("min_new_tokens", "max_new_tokens")
    if grammar is not None and params.min_tokens:
        raise fields.refuse(low, f"cannot be combined with {name}, which decides where a response may end")
    if params.min_tokens > params.max_tokens:
        raise fields.refuse(low, f"{params.min_tokens} is more than {high}, {params.max_tokens}")
    return GenerationRequest(
        replace(params, grammar=grammar),
        n=fields.whole("n", 1, low=1, high=MOST_ANSWERS),
        keep_special=not params.skip_special_tokens,
        keep_stop=fields.flag("no_stop_trim") or fields.flag("include_stop_str_in_output"),
        interval=fields.whole("stream_interval", interval, low=1),
        restricted_by=name,
    )
