"""Reads requests of all APIs: typed fields, chats, completions, sampling parameters and grammars."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimectl.chats.messages import MessageError, checked_text, normalized_chat, normalized_tools
from slimectl.chats.request_keys import ObjectKeys, names
from slimectl.chats.shared_keys import SAMPLING_PARAMS, STREAM_OPTIONS, STRUCTURED_OUTPUTS
from slimectl.types import AllowedTokens, ChoiceGrammar, Grammar, JsonGrammar, RegexGrammar, SamplingParams

LARGEST = 2**31
"""Upper bound of counts."""
ANY_OBJECT = '{"type": "object"}'
LONGEST_SCHEMA = 1 << 18
MOST_STOPS = 256
LONGEST_STOP = 1024
MOST_TOP = 20
"""Maximum number of the likeliest tokens that a request may ask for, as in OpenAI's API."""
MOST_TEACHER_TOP = 1024
"""The same for /generate, whose clients distil from the server's model."""
SCHEMA_LABELS = names("name description strict")
"""`strict` has no effect, because the grammar always follows the schema."""
DEFAULT_COMPLETION = 16
"""Default max_tokens of a completion, as in OpenAI's API. A chat's default is the whole context."""
GREEDY_BELOW = 1e-6
"""Lower temperatures count as 0, as in SGLang, because dividing logits by them overflows."""
MOST_CHOICES = 4096
MOST_BIASES = 16384
MOST_BIAS = 1e4
MOST_ANSWERS = 4096
"""Maximum responses per request of `slimectl serve`: prompts times n."""


class RequestBody:
    """JSON object with typed access to its fields. Absent and null mean the default."""

    def __init__(self, values: dict[str, Any], *, at: str = "") -> None:
        self._values = values
        self._at = at

    @classmethod
    def of(cls, values: Any) -> RequestBody:
        """Return the fields of a parsed body. Raises MessageError if it is not an object."""
        if not isinstance(values, dict):
            raise MessageError("body", "is not a JSON object")
        return cls(values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def refuse(self, name: str, reason: str) -> MessageError:
        """Return the error to raise for a field."""
        return MessageError(self._at + name, reason)

    def check(self, keys: ObjectKeys) -> None:
        """Raise MessageError for a key that would be ignored."""
        keys.check(self._values, self._at)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"{_short(value)} is not a number")
        if not low <= value <= high:  # also for NaN
            raise self.refuse(name, f"{_short(value)} is not between {low:g} and {high:g}")
        return float(value)

    def whole(self, name: str, default: int, *, low: int = 0, high: int = LARGEST) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"{_short(value)} is not a whole number")
        if not low <= value <= high:
            raise self.refuse(name, f"{_short(value)} is not between {low} and {high}")
        return value

    def count(self, name: str) -> int | None:
        """Return a field that is at least 1, or None if it is absent."""
        return self.whole(name, 1, low=1) if name in self else None

    def max_tokens(self, default: int, *, low: int = 1) -> int:
        """Return the limit of a chat, which has two names. Raises MessageError if they differ."""
        longest = "max_completion_tokens" if "max_completion_tokens" in self else "max_tokens"
        if "max_tokens" in self and self.raw(longest) != self.raw("max_tokens"):
            raise self.refuse("max_tokens", "is not equal to max_completion_tokens. Send one of the two.")
        return self.whole(longest, default, low=low)

    def seed(self, name: str) -> int | None:
        return self.whole(name, 0, low=-(2**63), high=2**64) if name in self else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"{_short(value)} is not true or false")
        return value

    def text(self, name: str, default: str | None = None, *, longest: int | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"{_short(value)} is not a string")
        return self.checked(name, value, longest=longest)

    def needed(self, name: str) -> str:
        value = self.text(name, longest=4096)
        if not value:
            raise self.refuse(name, "is missing")
        return value

    def checked(self, name: str, value: str, *, longest: int | None = None) -> str:
        """Return the string, if it can be encoded as UTF-8."""
        if longest is not None and len(value) > longest:
            raise self.refuse(name, f"is longer than {longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.refuse(name, "has half of a surrogate pair, which no tokenizer accepts") from None
        return value

    def texts(self, name: str, *, max_count: int) -> list[str]:
        """Return one string or a list of them as a list."""
        value = self._values.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise self.refuse(name, "is neither a string nor a list of strings")
        if len(values) > max_count:
            raise self.refuse(name, f"are {len(values)} strings, and {max_count} are the most")
        return [self.checked(name, text) for text in values]

    def tokens(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise self.refuse(name, "is not a list of token ids")
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        value = self._values.get(name)
        if value is not None and (not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value)):
            raise self.refuse(name, "is not a list of objects")
        return value

    def inner(self, name: str) -> RequestBody:
        """Return the fields of an object within this one."""
        return RequestBody(self.object(name), at=f"{self._at}{name}.")

    def object(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "is not an object")
        return value or {}

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self.refuse(name, f"{_short(value)} is not one of {', '.join(choices)}")
        return str(value)


def _short(value: Any) -> str:
    """Return a short form of a value for a message. Lists and very long numbers are not printed."""
    if isinstance(value, str):
        return ascii(value[:60])
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "the number"
    return str(value)[:60] if isinstance(value, int | float) else f"the {type(value).__name__}"


def refuse_empty(messages: list[dict[str, Any]], name: str = "messages") -> list[dict[str, Any]]:
    """Return messages of a request. Raises MessageError if there are none."""
    if not messages:
        raise MessageError(name, "is missing or empty")
    return messages


def stop_strings(body: RequestBody, name: str = "stop") -> tuple[str, ...]:
    stops = body.texts(name, max_count=MOST_STOPS)
    if not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise body.refuse(name, f"a stop string has 1 to {LONGEST_STOP} characters")
    return tuple(stops)


def forced_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that tool_choice forces: "" is any, None is none.

    Raises MessageError for other values, and for a tool that is not among `tools`.
    """
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise MessageError("tool_choice", "forces a call, but the request has no tools")
    if choice == "required":
        return ""
    is_function = isinstance(choice, dict) and choice.get("type", "function") == "function"
    function = choice.get("function", choice) if is_function else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise MessageError("tool_choice", 'is not "auto", "none", "required" or a function with a name')
    if name not in {tool["function"]["name"] for tool in tools}:
        raise MessageError("tool_choice", f"{name[:60]!a} is not one of the tools")
    return name


def read_schema(form: RequestBody, *, is_nested: bool) -> str | None:
    """Return the JSON Schema of a response format, as JSON, or None for text.

    In OpenAI's chats it is nested one object deeper than in its responses and in Anthropic's messages.
    """
    kind = form.choice("type", "text", ("text", "json_object", "json_schema"))
    is_flat = kind == "json_schema" and not is_nested
    form.check(ObjectKeys(names("type schema"), SCHEMA_LABELS) if is_flat else ObjectKeys(names("type json_schema")))
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    fields = form
    if is_nested:
        fields = form.inner("json_schema")
        fields.check(ObjectKeys(names("schema"), SCHEMA_LABELS))
    text = schema_text(fields, "schema")
    if text is None:
        raise fields.refuse("schema", "is missing")
    return text


def schema_text(fields: RequestBody, name: str) -> str | None:
    """Return a schema as JSON, the form that SGLang's clients send, or None."""
    schema = fields.raw(name)
    if schema is None or schema == "":
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > LONGEST_SCHEMA:
        raise fields.refuse(name, f"is longer than {LONGEST_SCHEMA >> 10} KiB")
    return fields.checked(name, text)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages and tools of one turn, with the client's limits. `prompt` replaces them in a completion."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The request's temperature, top_p, top_k, min_p and seed, if given."""
    n: int = 1
    index: int = 0
    """Index of the response within one HTTP request."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of OpenAI's chats or completions ends with the token counts."""
    log_probs: bool = False
    top_log_probs: int = 0
    echo: bool = False
    """Whether a completion starts with its prompt."""
    single_call: bool = False
    """Whether the client uses only the first call of a response."""
    forced_tool: str | None = None
    """Name of the tool that must be called, "" for any of them, or None if the policy decides."""
    json_schema: str | None = None
    """JSON Schema that the answer must follow, as JSON."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    unapplied: tuple[str, ...] = ()
    """Keys of the request that cannot be applied. They are counted."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the request that its response repeats."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)


def shared_fields(body: RequestBody) -> dict[str, Any]:
    """Return the fields with the same name in all APIs: the model, the sampling parameters, and whether to stream."""
    return {
        "model": body.text("model", "", longest=4096),
        "sampling": {name: value for name, value in _distribution(body).items() if name in body},
        "stream": body.flag("stream"),
        "template_kwargs": body.object("chat_template_kwargs"),
    }


def _openai_fields(body: RequestBody) -> dict[str, Any]:
    """Return the fields that chats and completions of OpenAI's API share."""
    options = body.inner("stream_options")
    options.check(STREAM_OPTIONS)
    if body.raw("stream_options") and not body.flag("stream"):
        raise body.refuse("stream_options", "is for streams only. Add stream: true, or leave it out.")
    return {
        **shared_fields(body),
        "stop": stop_strings(body),
        "n": body.whole("n", 1, low=1, high=MOST_ANSWERS),
        "stream_usage": options.flag("include_usage"),
    }


def read_chat(body: RequestBody) -> ChatRequest:
    """Read the body of /chat/completions. Raises MessageError."""
    choice, messages, tools = body.raw("tool_choice"), body.objects("messages"), body.objects("tools")
    messages, tools = normalized_chat(messages or []), normalized_tools(tools) or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise body.refuse(f"tools[{i}]", "is not a function with a name. Other kinds of tools are not supported.")
    log_probs, top = body.flag("logprobs"), body.whole("top_logprobs", 0, high=MOST_TOP)
    if top and not log_probs:
        raise body.refuse("top_logprobs", "needs logprobs: true")
    return ChatRequest(
        refuse_empty(messages),
        [] if choice == "none" else tools,
        **_openai_fields(body),
        log_probs=log_probs,
        top_log_probs=top,
        max_tokens=body.max_tokens(0) or None,
        single_call=not body.flag("parallel_tool_calls", True),
        forced_tool=forced_tool(choice, tools),
        json_schema=read_schema(body.inner("response_format"), is_nested=True),
    )


def read_completions(body: RequestBody, *, most: int, lowest_max: int = 1) -> list[ChatRequest]:
    """Read the body of /completions: up to `most` prompts, as strings or token ids. Raises MessageError."""
    prompt = body.raw("prompt")
    is_list = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts = prompt if is_list else [prompt]
    if len(prompts) > most:
        raise body.refuse("prompt", f"{len(prompts)} prompts are too many. The maximum is {most}.")
    request = ChatRequest(
        max_tokens=body.max_tokens(DEFAULT_COMPLETION, low=lowest_max),
        **_openai_fields(body),
        log_probs="logprobs" in body,
        top_log_probs=body.whole("logprobs", 0, high=MOST_TOP),
        echo=body.flag("echo"),
    )
    return [replace(request, prompt=_prompt(text)) for text in prompts]


def _prompt(prompt: Any) -> str | list[int]:
    if prompt in (None, "", []):
        raise MessageError("prompt", "is missing or empty")
    if isinstance(prompt, str):
        return checked_text(prompt, "prompt")
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    raise MessageError("prompt", "must be a string, a list of token ids, or a list of either")


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
        **_sampling_params(fields, seed="sampling_seed"),
    )
    return _generation_request(fields, params, interval, _restrictions(fields, schema="json_schema", regex="regex"))


def from_openai(fields: RequestBody, request: ChatRequest, *, default_max: int, interval: int = 1) -> GenerationRequest:
    """Read the parameters of a chat or completion, with SGLang's and vLLM's extra fields."""
    params = SamplingParams(
        max_tokens=default_max if request.max_tokens is None else request.max_tokens,
        min_tokens=fields.whole("min_tokens", 0),
        **_sampling_params(fields),
    )
    generation = _generation_request(fields, params, interval, _openai_restrictions(fields, request))
    return replace(generation, top_log_probs=request.top_log_probs)


Restrictions = dict[str, Grammar]
"""Grammars of a response by the key that requests them."""


def _openai_restrictions(fields: RequestBody, request: ChatRequest) -> Restrictions:
    outputs = fields.inner("structured_outputs")
    outputs.check(STRUCTURED_OUTPUTS)
    schema = request.json_schema
    if schema is None:  # a completion
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


def _distribution(fields: RequestBody, *, seed: str = "seed") -> dict[str, Any]:
    temperature = fields.number("temperature", 1.0, low=0.0, high=1e4)
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "top_p": fields.number("top_p", 1.0, low=1e-6, high=1.0),
        "top_k": fields.whole("top_k", -1, low=-1) or -1,
        "min_p": fields.number("min_p", 0.0, low=0.0, high=1.0),
        "seed": fields.seed(seed),
    }


def _sampling_params(fields: RequestBody, *, seed: str = "seed") -> dict[str, Any]:
    stop_tokens = fields.tokens("stop_token_ids", fields.raw("stop_token_ids") or [])
    if len(stop_tokens) > 1024:
        raise fields.refuse("stop_token_ids", "has more than 1024 token ids")
    return {
        **_distribution(fields, seed=seed),
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
