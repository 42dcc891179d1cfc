"""Typed features of the openai and anthropic clients, unmodified, by URL: on a server, and on one that records.

A case is a function of a client. The sets `refused` name the servers that answer it with 400 and the key's name. The
model is random, so the cases check the forms of responses: schemas, types, events, and sums of streams.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from agents.sessions import CHATML
from anthropic.resources.messages import Messages
from engines.server.conftest import served
from engines.server.test_request_keys import BODIES, DEFAULTS
from openai import OpenAI, pydantic_function_tool
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses
from pydantic import BaseModel
from transformers import AutoTokenizer

from slimectl.agents import request_keys
from slimectl.agents.recorder import SessionRecorder, UnrecordedApis
from slimectl.types import Sample, SamplingParams

CONTEXT = 2048
HI: list[Any] = [{"role": "user", "content": "hi"}]
NAME: dict[str, Any] = {"model": "m"}
SHORT: dict[str, Any] = {"max_tokens": 8, "seed": 1}


class Unit(enum.Enum):
    C = "c"
    F = "f"


class Wind(BaseModel):
    strong: bool


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    unit: Unit
    wind: Wind | None
    days: list[Literal[1, 2]]


class GetWeather(BaseModel):
    city: Literal["Paris", "Rome"]


class GetTime(BaseModel):
    utc: bool


Clients = Mapping[tuple[str, str], Any]
"""Clients by their server and library. To make one takes longer than most cases."""


@pytest.fixture(scope="module")
def clients(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """Clients of a server, and of one that records."""
    folder = tmp_path_factory.mktemp("models") / "with_tools"
    shutil.copytree(model_dir("llama"), folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer, params = AutoTokenizer.from_pretrained(folder), SamplingParams(max_tokens=CONTEXT)
    samples: list[Sample] = []
    extensions = {
        "serve": UnrecordedApis(tokenizer, params, CONTEXT),
        "record": SessionRecorder(tokenizer, params, CONTEXT, write=samples.append),
    }
    made: dict[tuple[str, str], Any] = {}
    with ExitStack() as ending:
        for name, extension in extensions.items():
            address = ending.enter_context(served(folder, extension=extension)).url
            made[name, "openai"] = OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
            made[name, "anthropic"] = anthropic.Anthropic(base_url=address, api_key="k", max_retries=0)
        yield made
        for client in made.values():
            client.close()
    assert samples  # the sessions were closed with the server


# --- OpenAI: chat completions ----------------------------------------------------------------------------------------


def parsed(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.parse(**NAME, messages=HI, **({"seed": 3, "max_tokens": 400} | options))


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**NAME, messages=HI, **(SHORT | options))


def parse_model(client: OpenAI) -> None:
    message = parsed(client, response_format=Weather).choices[0].message
    assert isinstance(message.parsed, Weather)
    assert message.parsed == Weather.model_validate_json(message.content)


def parse_several(client: OpenAI) -> None:
    choices = parsed(client, response_format=Weather, n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.message.content for choice in choices}) > 1
    assert all(isinstance(choice.message.parsed, Weather) for choice in choices)


def parse_cut(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        parsed(client, response_format=Weather, max_tokens=3)


def parse_json_object(client: OpenAI) -> None:
    content = chat(client, response_format={"type": "json_object"}, max_tokens=400, seed=2).choices[0].message.content
    assert isinstance(json.loads(content), dict)


def tools_of_pydantic(client: OpenAI) -> None:
    tools = [pydantic_function_tool(GetWeather), pydantic_function_tool(GetTime)]
    for choice, kinds in (("required", (GetWeather, GetTime)), (named("GetTime"), (GetTime,))):
        found = parsed(client, tools=tools, tool_choice=choice).choices[0]
        [call] = found.message.tool_calls
        assert found.finish_reason == "tool_calls"
        assert isinstance(call.function.parsed_arguments, kinds)
        assert json.loads(call.function.arguments) == call.function.parsed_arguments.model_dump()


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def result_of_a_tool(client: OpenAI) -> None:
    tools = [pydantic_function_tool(GetTime)]
    message = chat(client, tools=tools, tool_choice="required", max_tokens=200).choices[0].message
    call = message.tool_calls[0]
    messages = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "12:00"}]
    response = client.chat.completions.create(**NAME, messages=messages, tools=tools, **SHORT)
    assert response.choices[0].message.role == "assistant"


def log_probs(client: OpenAI) -> None:
    response = chat(client, logprobs=True, top_logprobs=3, temperature=0)
    entries = response.choices[0].logprobs.content
    assert len(entries) == response.usage.completion_tokens
    for entry in entries:
        assert entry.token == bytes(entry.bytes).decode(errors="replace")
        assert len(entry.top_logprobs) == 3
        # Greedy: the likeliest token was sampled.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)


def chat_chunks(client: OpenAI) -> None:
    whole = chat(client, n=2)
    chunks = list(chat(client, n=2, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        deltas = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content or "" for each in deltas) == choice.message.content
        assert [each.finish_reason for each in deltas if each.finish_reason] == [choice.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)


def chat_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(**NAME, messages=HI, logprobs=True, **SHORT) as stream:
        events = list(stream)
    completion = stream.current_completion_snapshot
    content = completion.choices[0].message.content
    assert "".join(event.delta for event in events if event.type == "content.delta") == content
    [done] = [event for event in events if event.type == "content.done"]
    assert done.content == content
    [scores] = [event for event in events if event.type == "logprobs.content.done"]
    assert [each.token for each in scores.content] == [each.token for each in completion.choices[0].logprobs.content]


def chat_stream_parse(client: OpenAI) -> None:
    with client.chat.completions.stream(**NAME, messages=HI, response_format=Weather, max_tokens=400, seed=3) as stream:
        [done] = [event for event in stream if event.type == "content.done"]
    assert isinstance(done.parsed, Weather)
    assert stream.get_final_completion().choices[0].message.parsed == done.parsed


def chat_stream_tools(client: OpenAI, **extra: Any) -> None:
    tools = [pydantic_function_tool(GetWeather)]
    with client.chat.completions.stream(
        **NAME, messages=HI, tools=tools, tool_choice="required", max_tokens=300, seed=3, extra_body=extra
    ) as stream:
        [done] = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert isinstance(done.parsed_arguments, GetWeather)


def tools_beside_a_schema(client: OpenAI) -> None:
    kinds = set()
    for seed in range(12):
        response = client.chat.completions.parse(
            **NAME, messages=HI, tools=[pydantic_function_tool(GetWeather)], response_format=GetTime, seed=seed,
            max_tokens=300,
        )  # fmt: skip
        message = response.choices[0].message
        calls = [call.function.parsed_arguments for call in message.tool_calls or []]
        assert [type(value) for value in (calls or [message.parsed])] == [GetWeather if calls else GetTime]
        kinds.add(bool(calls))
    assert kinds == {True, False}


def forced_tool_beside_a_schema(client: OpenAI) -> None:
    tools = [pydantic_function_tool(GetWeather)]
    for seed in range(3):
        [choice] = client.chat.completions.parse(
            **NAME, messages=HI, tools=tools, tool_choice="required", response_format=GetTime, seed=seed, max_tokens=300
        ).choices
        [call] = choice.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, GetWeather)


def token_beyond_the_vocabulary(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt: token 1000000000 is outside the vocabulary"):
        client.completions.create(**NAME, prompt=[10**9])


def every_default(client: OpenAI) -> None:
    for path, defaults in DEFAULTS.items():
        if path != "/generate":
            client.post(path.removeprefix("/v1"), body=BODIES[path] | defaults, cast_to=object)


def chat_async(client: OpenAI) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="k", max_retries=0) as other:
            stream = await other.chat.completions.create(**NAME, messages=HI, stream=True, **SHORT)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == chat(client).choices[0].message.content


def raw_response(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**NAME, messages=HI, **SHORT)
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.parse().object == "chat.completion"


def neutral_values(client: OpenAI) -> None:
    chat(client, frequency_penalty=0, presence_penalty=0, logit_bias={}, n=1, user="u", metadata={"a": "b"},
         service_tier="auto", store=False, modalities=["text"], parallel_tool_calls=True,
         extra_body={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "functions": None})  # fmt: skip


def bias(client: OpenAI) -> None:
    response = chat(client, logit_bias={"65": 100}, temperature=0, max_tokens=3)
    assert response.choices[0].message.content == "AAA"


# --- OpenAI: completions and models ----------------------------------------------------------------------------------


def completions(client: OpenAI) -> None:
    one = client.completions.create(**NAME, prompt="ab", **SHORT)
    lists = client.completions.create(**NAME, prompt=["ab", "cd"], n=2, **SHORT)
    assert [choice.index for choice in lists.choices] == [0, 1, 2, 3]
    assert lists.choices[0].text == one.choices[0].text
    assert lists.usage.prompt_tokens == 2 * one.usage.prompt_tokens
    tokens = client.completions.create(**NAME, prompt=[97, 98], **SHORT)
    assert tokens.choices[0].text == one.choices[0].text
    chunks = list(client.completions.create(**NAME, prompt=["ab", "cd"], n=2, stream=True, **SHORT))
    for choice in lists.choices:
        texts = [each.text for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(texts) == choice.text


def echo(client: OpenAI) -> None:
    options = {"prompt": "abc", "echo": True, "logprobs": 2, **SHORT}
    [choice] = client.completions.create(**NAME, **options).choices
    scores = choice.logprobs
    assert choice.text.startswith("abc")
    assert scores.tokens[:3] == ["a", "b", "c"]
    assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
    assert all(score < 0 for score in scores.token_logprobs[1:])
    assert scores.text_offset[:4] == [0, 1, 2, 3]
    assert all(2 <= len(top) <= 3 for top in scores.top_logprobs[1:])
    chunks = [chunk.choices[0] for chunk in client.completions.create(**NAME, stream=True, **options)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens] == scores.tokens


def models(client: OpenAI) -> None:
    [listed] = client.models.list().data
    assert client.models.retrieve(listed.id).id == listed.id
    in_a_session = client.with_options(base_url=str(client.base_url).replace("/v1/", "/s/one/v1/"))
    try:
        [listed] = in_a_session.models.list().data
    except openai.NotFoundError:
        return  # only a server that records has sessions
    assert in_a_session.models.retrieve(listed.id).id == listed.id


# --- OpenAI: responses -----------------------------------------------------------------------------------------------


def respond(client: OpenAI, **options: Any) -> Any:
    return client.responses.create(**({**NAME, "input": "hi", "max_output_tokens": 8} | options))


def responses(client: OpenAI) -> None:
    response = respond(client, instructions="be brief", metadata={"a": "b"}, extra_body={"seed": 1})
    assert (response.instructions, response.metadata) == ("be brief", {"a": "b"})
    assert response.output_text == response.output[0].content[0].text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    items = [*HI, *[item.model_dump() for item in response.output], {"role": "user", "content": "more"}]
    assert respond(client, input=items).usage.input_tokens > response.usage.input_tokens


def previous_response(client: OpenAI) -> None:
    first = respond(client)
    second = respond(client, previous_response_id=first.id, input="more")
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.previous_response_id == first.id


def responses_parse(client: OpenAI) -> None:
    options: dict[str, Any] = {"input": "hi", "max_output_tokens": 400, "extra_body": {"seed": 3}}
    assert isinstance(client.responses.parse(**NAME, text_format=Weather, **options).output_parsed, Weather)
    tools = [openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}]
    [call] = client.responses.parse(**NAME, tools=tools, tool_choice="required", **options).output
    assert call.type == "function_call"
    GetWeather.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    respond(client, input=[*HI, {**call.model_dump(exclude={"parsed_arguments"})}, output], tools=tools)


def responses_events(client: OpenAI) -> None:
    events = list(respond(client, stream=True, extra_body={"seed": 1}))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def responses_stream(client: OpenAI) -> None:
    with client.responses.stream(**NAME, input="hi", text_format=Weather, max_output_tokens=400,
                                 extra_body={"seed": 3}) as stream:  # fmt: skip
        [done] = [event for event in stream if event.type == "response.output_text.done"]
    assert isinstance(done.parsed, Weather)
    assert stream.get_final_response().output_parsed == done.parsed


def responses_log_probs(client: OpenAI) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    part = respond(client, **options).output[0].content[0]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode(errors="replace") == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    *_, last = respond(client, stream=True, **options)
    assert last.response.output[0].content[0].logprobs == part.logprobs


# --- Anthropic -------------------------------------------------------------------------------------------------------


def message(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(**({**NAME, "messages": HI, "max_tokens": 8} | options))


def messages(client: anthropic.Anthropic) -> None:
    response = message(
        client, system="be brief", metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 5}
    )
    assert [block.type for block in response.content] == ["text"]
    assert response.stop_reason in ("max_tokens", "end_turn")
    again = [*HI, {"role": "assistant", "content": response.content}, {"role": "user", "content": "more"}]
    assert message(client, messages=again).usage.output_tokens <= 8
    counted = client.messages.count_tokens(**NAME, messages=HI, system="be brief").input_tokens
    assert counted == response.usage.input_tokens + response.usage.cache_read_input_tokens


def messages_stop(client: anthropic.Anthropic) -> None:
    alphabet = [chr(letter) for letter in range(33, 127)]
    response = message(client, stop_sequences=alphabet, max_tokens=100)
    assert response.stop_reason == "stop_sequence"
    assert response.stop_sequence in alphabet


def messages_stream(client: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {**NAME, "messages": HI, "max_tokens": 8}
    with client.messages.stream(**options, extra_body={"seed": 1}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text == message(client, extra_body={"seed": 1}).content[0].text
    kinds = [event.type for event in message(client, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def messages_tools(client: anthropic.Anthropic) -> None:
    tools = [{"name": "weather", "description": "", "input_schema": GetWeather.model_json_schema()}]
    options: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 300}
    response = message(client, **options)
    [call] = response.content
    assert (call.type, response.stop_reason) == ("tool_use", "tool_use")
    GetWeather.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    chat = [*HI, {"role": "assistant", "content": response.content}, {"role": "user", "content": [result]}]
    assert message(client, messages=chat, tools=tools).role == "assistant"
    with client.messages.stream(**NAME, messages=HI, **options) as stream:
        [call] = stream.get_final_message().content
    GetWeather.model_validate(call.input)


def messages_parse(client: anthropic.Anthropic) -> None:
    response = client.messages.parse(**NAME, messages=HI, max_tokens=400, output_format=Weather,
                                     extra_body={"seed": 3})  # fmt: skip
    assert isinstance(response.parsed_output, Weather)


@pytest.mark.parametrize(
    ("create", "keys"),
    [
        (Completions.create, request_keys.COMPLETIONS),
        (ChatCompletions.create, request_keys.CHAT),
        (Responses.create, request_keys.RESPONSES),
        (Messages.create, request_keys.MESSAGES),
        (Messages.count_tokens, request_keys.MESSAGES),
    ],
)
def test_every_parameter_of_a_client_has_its_row(create: Any, keys: request_keys.ApiKeys):
    ours = {"self", "stream", "timeout", "extra_headers", "extra_query", "extra_body"}
    rows = keys.body.acts | keys.body.labels | keys.body.neutral.keys() | keys.counted.keys()
    assert set(inspect.signature(create).parameters) - ours - rows == set()


def test_the_documentation_has_every_counted_key():
    text = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    apis = (request_keys.CHAT, request_keys.COMPLETIONS, request_keys.RESPONSES, request_keys.MESSAGES)
    counted = {key for api in apis for key in api.counted} | set(request_keys.SAMPLING)
    assert [key for key in sorted(counted) if f"`{key}`" not in text] == []


def chat_key(name: str, value: Any) -> Callable[[OpenAI], object]:
    return lambda client: chat(client, extra_body={name: value})


def completion_key(name: str, value: Any) -> Callable[[OpenAI], object]:
    return lambda client: client.completions.create(**NAME, prompt="a", **SHORT, extra_body={name: value})


def response_key(name: str, value: Any) -> Callable[[OpenAI], object]:
    return lambda client: respond(client, extra_body={name: value})


def message_key(name: str, value: Any) -> Callable[[anthropic.Anthropic], object]:
    return lambda client: message(client, extra_body={name: value})


BOTH, SERVE, RECORD = {"serve", "record"}, {"serve"}, {"record"}
WORKING: tuple[Callable[[Any], None], ...] = (
    parse_model, parse_several, parse_cut, parse_json_object, tools_of_pydantic, result_of_a_tool, log_probs,
    chat_chunks, chat_stream, chat_stream_parse, chat_stream_tools, chat_async, raw_response, neutral_values,
    tools_beside_a_schema, forced_tool_beside_a_schema, token_beyond_the_vocabulary,
    every_default,
    completions, echo, models, responses, responses_parse, responses_events, responses_stream, responses_log_probs,
    messages, messages_stop, messages_stream, messages_tools, messages_parse,
)  # fmt: skip
KEYS: tuple[tuple[Callable[..., Callable[[Any], object]], str, Any, set[str]], ...] = (
    (chat_key, "frequency_penalty", 1.0, RECORD),
    (chat_key, "repetition_penalty", 1.5, RECORD),
    (chat_key, "regex", "a+", RECORD),
    (chat_key, "functions", [{"name": "f"}], BOTH),
    (chat_key, "reasoning_effort", "low", SERVE),
    (chat_key, "modalities", ["audio"], BOTH),
    (chat_key, "nonsense", 1, BOTH),
    (chat_key, "tool_choice", "required", BOTH),
    (chat_key, "tool_choice", "any", BOTH),
    (chat_key, "tools", [{"type": "custom", "custom": {"name": "f"}}], BOTH),
    (chat_key, "response_format", {"type": "json_object", "schema": {"type": "object"}}, BOTH),
    (chat_key, "chat_template_kwargs", {"enable_thinking": False}, BOTH),
    (completion_key, "prompt", "", BOTH),
    (response_key, "input", [{"content": "hi"}], BOTH),
    (response_key, "input", [], BOTH),
    (response_key, "tool_choice", {"type": "web_search_preview"}, BOTH),
    (response_key, "stream_options", {"include_obfuscation": False}, set()),
    (message_key, "tool_choice", {"type": "any"}, BOTH),
    (completion_key, "suffix", "x", BOTH),
    (completion_key, "best_of", 3, BOTH),
    (response_key, "background", True, BOTH),
    (response_key, "conversation", "abc", BOTH),
    (response_key, "prompt", {"id": "p"}, BOTH),
    (response_key, "truncation", "auto", BOTH),
    (response_key, "truncation", "disabled", set()),
    (response_key, "include", ["nonsense"], BOTH),
    (response_key, "reasoning", {"effort": "low"}, SERVE),
    (response_key, "text", {"verbosity": "low"}, SERVE),
    (message_key, "container", "c", BOTH),
    (message_key, "mcp_servers", [{"url": "x"}], BOTH),
    (message_key, "output_config", {"effort": "low"}, SERVE),
    (message_key, "thinking", {"type": "enabled", "budget_tokens": 1024}, SERVE),
    (message_key, "thinking", {"type": "disabled"}, set()),
)
CASES: Mapping[str, tuple[Callable[[Any], object], str, set[str]]] = {
    **{case.__name__: (case, "", set()) for case in WORKING},
    "two_limits": (chat_key("max_completion_tokens", 3), "max_tokens", BOTH),
    "bias": (bias, "logit_bias", RECORD),
    # The call is complete in the chunk that would have the finish reason.
    "one_chunk": (lambda client: chat_stream_tools(client, stream_interval=1000), "stream_interval", RECORD),
    "previous_response": (previous_response, "previous_response_id", SERVE),
    **{f"{make.__name__} {name} {value}": (make(name, value), name, refused) for make, name, value, refused in KEYS},
}


@pytest.mark.parametrize("server", ["serve", "record"])
@pytest.mark.parametrize("name", CASES)
def test_a_typed_feature_works_or_is_refused_by_name(clients: Clients, name: str, server: str):
    case, key, refused = CASES[name]
    client = clients[server, "anthropic" if "message" in name else "openai"]
    if server in refused:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=key) as refusal:
            case(client)
        if isinstance(refusal.value, openai.BadRequestError):
            assert (refusal.value.param or "").startswith(key)
    else:
        case(client)
