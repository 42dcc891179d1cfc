"""Streams of the endpoint: chunks leave while the answer is sampled, and add up to the answer without a stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agents.sessions import TEMPLATES, ScriptedEngine, call_text, merging_tokenizer, session_of
from transformers import AutoConfig, AutoTokenizer

from slimectl.agents.answer import AnswerReader
from slimectl.agents.endpoint import SessionServer
from slimectl.agents.session import Session, SessionLimits
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.errors import BackendError
from slimectl.protocols import OnTokens
from slimectl.types import Completion, Sample, SamplingParams

USER = {"role": "user", "content": "numbers?"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": PARAMETERS}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": ["END"],
    },
    "/v1/completions": {"prompt": "numbers: ", "stop": ["END"], "max_tokens": 200},
    "/v1/responses": {"input": "numbers?", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 200,
        "stop_sequences": ["END"],
        "tools": [{"name": "add", "input_schema": PARAMETERS}],
    },
}
REASONING, CALL = "the sum\n of é\n</think>\n\n", call_text(a=3)
ANSWERS = {
    "text": "seven €😀 \n",
    "reasoning": REASONING + "is seven ",
    "reasoning alone": "the sum",
    "call": REASONING + CALL,
    "text and calls": "let me add" + CALL + "\n" + CALL,
    "text behind a call": CALL + "\nis seven",
    "no call": "add <tool_call>{broken</tool_call> it",
    "stop string": REASONING + "more EN or ENENDless",
    "nothing": "",
}


@asynccontextmanager
async def served(session: Session) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client, and the address of a session."""
    server = SessionServer()
    await server.start()
    try:
        async with server.open(session) as address, aiohttp.ClientSession() as client:
            yield client, address
    finally:
        await server.stop()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON values of a stream as they come."""
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


OF_OPENAI = {"stream": True, "stream_options": {"include_usage": True}}


def streamed(path: str) -> dict[str, Any]:
    """What asks for a stream, which in OpenAI's older APIs ends with the usage."""
    return OF_OPENAI if path.endswith("completions") else {"stream": True}


def of_chat(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of a streamed chat, put together."""
    *chunks, last = stream
    assert last["choices"] == []
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    joined = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    finish = chunks[-1]["choices"][0]["finish_reason"]
    return joined | {"calls": [call["function"] for call in calls], "finish": finish, "usage": last["usage"]}


def of_whole_chat(body: dict[str, Any]) -> dict[str, Any]:
    [choice] = body["choices"]
    message = choice["message"]
    joined = {name: message.get(name) or "" for name in ("reasoning_content", "content")}
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return joined | {"calls": calls, "finish": choice["finish_reason"], "usage": body["usage"]}


def of_completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return {"text": text, "finish": choices[-1]["finish_reason"], "usage": chunks[-1]["usage"]}


def without_ids(value: Any) -> Any:
    """A response without what each request has its own of."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    ids = ("id", "call_id", "created_at", "created", "item_id")
    return {name: without_ids(item) for name, item in value.items() if name not in ids}


def of_response(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of a stream, whose items are those that its deltas add up to."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    items: dict[int, dict[str, Any]] = {}
    for event in stream:
        kind, index = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert index == len(items)
            items[index] = event["item"]
        elif kind == "response.content_part.added":
            items[index]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[index]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            finished = items[index] | ({"status": "completed"} if "status" in items[index] else {})
            assert finished == event["item"]
    response: dict[str, Any] = stream[-1]["response"]
    assert [item["id"] for item in items.values()] == [item["id"] for item in response["output"]]
    return without_ids(response)


def of_message(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as its client puts it together."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in stream:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            assert block is message["content"][-1]  # a client may read one block at a time
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return without_ids(message)


JOIN: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], Callable[[dict[str, Any]], Any]]] = {
    "/v1/chat/completions": (of_chat, of_whole_chat),
    "/v1/completions": (of_completion, lambda body: of_completion([body])),
    "/v1/responses": (of_response, without_ids),
    "/v1/messages": (of_message, without_ids),
}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.mark.parametrize("special", [(), MARKS], ids=["text", "special tokens"])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_adds_up_to_the_answer_without_one(path: str, special: tuple[str, ...]):
    tokenizer = merging_tokenizer(TEMPLATES["forgetful"], special=special)
    rng = random.Random(3)

    async def check(text: str, *, ends: bool) -> None:
        tokens: list[int] = []
        for piece in [text] if special else [text[i : i + 2] for i in range(0, len(text), 2)]:
            tokens += tokenizer.encode(piece, add_special_tokens=False)
        if ends:
            tokens.append(tokenizer.eos_token_id)
        session = session_of(ScriptedEngine([tokens], tokenizer), tokenizer)
        session.stream_interval = rng.randint(1, 3)
        async with served(session) as (client, address):
            async with client.post(address + path, json=BODIES[path]) as response:
                whole = await response.json()
            async with client.post(address + path, json=BODIES[path] | streamed(path)) as response:
                assert response.content_type == "text/event-stream"
                stream = [event async for event in events(response)]
        joined, expected = JOIN[path]
        assert joined(stream) == expected(whole), text
        first, second = session.tree.turns
        assert first.completion.tokens == second.completion.tokens == tokens
        assert first.messages == without_call_ids(second.messages, first.messages)

    async def all_answers() -> None:
        for text in ANSWERS.values():
            await check(text, ends=True)
        await check(REASONING + "cut", ends=False)

    asyncio.run(all_answers())


def without_call_ids(messages: list[dict[str, Any]], like: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have the ids of others, which are drawn anew for each answer."""
    result = json.loads(json.dumps(messages))
    for message, other in zip(result, like, strict=True):
        for call, same in zip(message.get("tool_calls", []), other.get("tool_calls", []), strict=True):
            call["id"] = same["id"]
    return result


class GatedEngine:
    """Samples some tokens, and the others only when the gate is opened."""

    def __init__(self, tokens: list[int], tokenizer: Any, *, first: int) -> None:
        self.gate, self.cancelled = asyncio.Event(), asyncio.Event()
        self._tokens, self._tokenizer, self._first = tokens, tokenizer, first
        self.error: Exception | None = None

    async def generate(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Completion:
        assert on_tokens is not None
        try:
            on_tokens(0, self._tokens[: self._first])
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        on_tokens(self._first, self._tokens[self._first :])
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return Completion(self._tokens, [-0.5] * len(self._tokens), text, "stop")


def gated(text: str = "the sum of numbers", *, first: int = 2) -> tuple[GatedEngine, Session]:
    tokenizer = merging_tokenizer()
    engine = GatedEngine([*tokenizer.encode(text), tokenizer.eos_token_id], tokenizer, first=first)
    limits = SessionLimits(64, 1000)
    return engine, Session(tokenizer, AnswerReader(tokenizer), engine.generate, SamplingParams(), limits)


def has_text(event: dict[str, Any]) -> bool:
    """Whether an event of any API brings text."""
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta", event.get("delta"))
    text = choices[0].get("text") or (delta.get("content") or delta.get("text") if isinstance(delta, dict) else delta)
    return bool(text)


@pytest.mark.parametrize("path", BODIES)
def test_text_is_sent_before_the_answer_is_complete(path: str):
    async def ask() -> list[dict[str, Any]]:
        engine, session = gated()
        stream = []
        async with served(session) as (client, address):
            body = BODIES[path] | {"stream": True}
            async with asyncio.timeout(60), client.post(address + path, json=body) as response:
                async for event in events(response):
                    stream.append(event)
                    if has_text(event) and not engine.gate.is_set():
                        # The engine ends only now: it waits for what the client does with the first text.
                        assert session.tree.turns == []
                        engine.gate.set()
        assert len(session.tree.turns) == 1
        return stream

    stream = asyncio.run(ask())
    assert sum(map(has_text, stream)) == 2


def test_a_client_that_leaves_in_the_middle_ends_the_answer_and_leaves_no_turn():
    async def leave() -> Session:
        engine, session = gated()
        async with served(session) as (client, address), asyncio.timeout(60):
            async with client.post(
                address + "/v1/messages", json=BODIES["/v1/messages"] | {"stream": True}
            ) as response:
                await anext(events(response))
                response.close()
            await engine.cancelled.wait()
        return session

    assert asyncio.run(leave()).tree.turns == []


GONE = {"message": "engine is gone"}


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", {"error": GONE | {"type": "server_error", "param": None, "code": None}}),
        ("/v1/completions", {"error": GONE | {"type": "server_error", "param": None, "code": None}}),
        ("/v1/responses", {"type": "error", "sequence_number": 5, "code": None, "param": None} | GONE),
        ("/v1/messages", {"type": "error", "error": GONE | {"type": "api_error"}}),
    ],
)
def test_an_error_has_a_status_before_the_first_token_and_is_an_event_behind_it(path: str, error: dict[str, Any]):
    async def ask(first: int) -> tuple[int, list[dict[str, Any]], Session]:
        engine, session = gated(first=first)
        engine.error = BackendError("engine is gone")
        if not first:
            engine.gate.set()
        body = BODIES[path] | {"stream": True}
        async with (
            served(session) as (client, address),
            asyncio.timeout(60),
            client.post(address + path, json=body) as response,
        ):
            if response.status != 200:
                return response.status, [await response.json()], session
            stream = []
            async for event in events(response):
                stream.append(event)
                if has_text(event):
                    engine.gate.set()
            return response.status, stream, session

    status, [body], session = asyncio.run(ask(0))
    assert (status, "engine is gone" in json.dumps(body), session.tree.turns) == (500, True, [])
    status, stream, session = asyncio.run(ask(2))
    assert (status, stream[-1], session.tree.turns) == (200, error, [])


@pytest.mark.parametrize("same", [True, False])
def test_an_engine_that_begins_anew_goes_on_with_the_same_text_or_ends_the_stream(same: bool):
    tokenizer = merging_tokenizer()
    lost, tokens = tokenizer.encode("the sum of"), tokenizer.encode("the sum of seven" if same else "the result")

    async def generate(prompt: list[int], params: SamplingParams, *, on_tokens: OnTokens) -> Completion:
        on_tokens(0, lost)
        await sent.wait()
        on_tokens(0, tokens[:1])
        on_tokens(1, tokens[1:])
        return Completion(tokens, [-0.5] * len(tokens), tokenizer.decode(tokens), "stop")

    async def ask() -> list[dict[str, Any]]:
        stream = []
        async with served(session) as (client, address), asyncio.timeout(60):
            body = BODIES["/v1/chat/completions"] | OF_OPENAI
            async with client.post(address + "/v1/chat/completions", json=body) as response:
                async for event in events(response):
                    stream.append(event)
                    if has_text(event):
                        sent.set()
        return stream

    sent = asyncio.Event()
    limits = SessionLimits(64, 1000)
    session = Session(tokenizer, AnswerReader(tokenizer), generate, SamplingParams(), limits)  # type: ignore[arg-type]
    stream = asyncio.run(ask())
    if same:
        assert of_chat(stream)["content"] == "the sum of seven"
        assert session.tree.turns[0].completion.tokens == tokens
    else:
        assert stream[-1]["error"]["code"] == "answer_lost"
        assert session.tree.turns == []


def test_the_embedded_engine_streams_its_tokens_and_ends_with_the_client(model_dir: Callable[[str], Path]):
    folder = model_dir("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), tokenizer)
    engine.load_weights(HFCheckpoint().read(folder), version="0")
    log: list[Completion] = []
    params = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)

    async def generate(tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None) -> Completion:
        def pausing(report: OnTokens, start: int, new: list[int]) -> None:
            report(start, new)
            if start == 0:
                engine.pause("test")  # until the client has the first chunk

        report = None if on_tokens is None else partial(pausing, on_tokens)
        log.append(await engine.generate(tokens, params=params, on_tokens=report))
        return log[-1]

    async def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        async with served(session) as (client, address), asyncio.timeout(60):
            url, body = address + "/v1/chat/completions", {"messages": [USER], "max_tokens": 24}
            async with client.post(url, json=body) as response:
                whole = await response.json()
            chunks = []
            async with client.post(url, json=body | OF_OPENAI) as response:
                async for chunk in events(response):
                    chunks.append(chunk)
                    if engine.paused:
                        assert engine.running == 1
                        engine.resume("test")
            async with client.post(url, json=body | {"stream": True}) as response:
                await anext(events(response))
                response.close()
            engine.resume("test")
            while engine.running:
                await asyncio.sleep(0.001)
        return of_whole_chat(whole), of_chat(chunks)

    limits = SessionLimits(64, 1000)
    session = Session(tokenizer, AnswerReader(tokenizer), generate, params, limits)
    whole, joined = asyncio.run(ask())
    assert joined["content"] == whole["content"]
    assert len(log) == 2  # the third was ended by its client
    assert [turn.completion for turn in session.tree.turns] == log
    assert log[0].tokens == log[1].tokens
    [first, second] = session.samples(Sample())
    assert first.tokens == second.tokens
