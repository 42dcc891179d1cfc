"""The endpoint of the policy over HTTP: each API's requests, responses, streams and errors."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from agents.sessions import ScriptedEngine, call_text, merging_tokenizer, session_of

from slimectl.agents.endpoint import SessionServer
from slimectl.agents.session import Session, SessionLimits
from slimectl.errors import SettingsError
from slimectl.system.client import Background
from slimectl.types import Completion, Sample, SamplingParams

TEXTS = ["the sum", "let me add" + call_text(a=3), "seven"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = {"role": "user", "content": "numbers?"}

CHAT = "/v1/chat/completions"


class Endpoint:
    """A session server in a thread, and a client of it."""

    def __init__(self, background: Background) -> None:
        self.background, self.server = background, SessionServer()
        background.submit(self.server.start()).result()
        self.tokenizer = merging_tokenizer()
        answers = [[*self.tokenizer.encode(text), self.tokenizer.eos_token_id] for text in TEXTS]
        self.engine = ScriptedEngine(answers, self.tokenizer)
        self.session: Session = session_of(self.engine, self.tokenizer)
        self.opened = self.server.open(self.session)
        self.address = background.submit(self.opened.__aenter__()).result()

    def close(self) -> None:
        self.background.submit(self.opened.__aexit__(None, None, None)).result()
        self.background.submit(self.server.stop()).result()

    def raw(self, path: str, body: bytes | None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, **values: Any) -> dict[str, Any]:
        status, text = self.raw(path, json.dumps(values).encode())
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def refusal(self, path: str, **values: Any) -> tuple[int, str]:
        status, text = self.raw(path, json.dumps(values).encode())
        return status, json.loads(text)["error"]["message"]

    def events(self, path: str, **values: Any) -> list[dict[str, Any]]:
        status, text = self.raw(path, json.dumps({**values, "stream": True}).encode())
        assert status == 200, text
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in data if line != "[DONE]"]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    background = Background("endpoint")
    served = Endpoint(background)
    yield served
    served.close()
    background.stop()


def test_a_chat_with_tools(endpoint: Endpoint):
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    first = endpoint.post("/v1/chat/completions", model="any", messages=[USER], tools=tools, logprobs=True)
    choice = first["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], first["model"]) == ("the sum", "stop", "any")
    assert len(choice["logprobs"]["content"]) == first["usage"]["completion_tokens"]
    chunks = endpoint.events("/v1/chat/completions", messages=[USER], tools=tools)
    [call] = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": '{"a": 3}'})
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert +endpoint.session.counts == {"requests": 2, "tool_calls": 1}


def test_anthropic_messages_with_tools(endpoint: Endpoint):
    tools = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]
    common = {"model": "claude", "max_tokens": 200, "system": [{"type": "text", "text": "be brief"}], "tools": tools}
    message = endpoint.post("/v1/messages", messages=[USER], **common)
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": "the sum"}], "end_turn")
    chat = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "go on"}]
    events = endpoint.events("/v1/messages", messages=chat, **common)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas[:-1]) == "let me add"
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 3}
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start", *["content_block_start", "content_block_stop"] * 2, "message_delta", "message_stop",
    ]  # fmt: skip
    call = events[-5]["content_block"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    uses = [{"type": "text", "text": "let me add"}, {**call, "input": {"a": 3}}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    chat += [{"role": "assistant", "content": uses}, {"role": "user", "content": [result]}]
    assert endpoint.post("/v1/messages", messages=chat, **common)["content"][0]["text"] == "seven"
    assert [turn.parent for turn in endpoint.session.tree.turns] == [None, *endpoint.session.tree.turns[:2]]
    count = endpoint.post("/v1/messages/count_tokens", messages=[USER], model="claude")["input_tokens"]
    assert 0 < count < len(endpoint.engine.log[0][0])


def test_responses_go_on_from_one_another_and_from_their_items(endpoint: Endpoint):
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
    first = endpoint.post("/v1/responses", input="numbers?", instructions="be brief", tools=tools)
    assert first["output"][0]["content"][0]["text"] == "the sum"
    common = {"instructions": "be brief", "tools": tools, "previous_response_id": first["id"]}
    events = endpoint.events("/v1/responses", input="go on", **common)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    second = events[-1]["response"]
    text, call = second["output"]
    assert (events[-1]["type"], call["type"], json.loads(call["arguments"])) == (
        "response.completed", "function_call", {"a": 3},
    )  # fmt: skip
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    items = [{**USER, "type": "message"}, *first["output"], {"role": "user", "content": "go on"}, text, call, output]
    third = endpoint.post("/v1/responses", input=items, instructions="be brief", tools=tools)
    assert third["output"][0]["content"][0]["text"] == "seven"
    assert [turn.parent for turn in endpoint.session.tree.turns] == [None, *endpoint.session.tree.turns[:2]]


def test_completions_models_and_a_posted_reward(endpoint: Endpoint):
    assert endpoint.post("/v1/completions", prompt="numbers: ")["choices"][0]["text"] == "the sum"
    chunks = endpoint.events("/v1/completions", prompt=[5, 6])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith("let me add")
    assert json.loads(endpoint.raw("/v1/models", None)[1])["data"][0]["id"] == "policy"
    endpoint.post("/reward", reward=0.5)
    assert endpoint.session.reward == 0.5
    assert endpoint.refusal("/reward", reward="high")[0] == 400


def test_responses_are_rewarded_one_by_one_or_together(endpoint: Endpoint):
    assert "no response yet" in str(endpoint.refusal("/reward", turn_reward=1.0))
    endpoint.post("/v1/chat/completions", messages=[USER])
    endpoint.post("/reward", turn_reward=0.5, state="room 3")
    endpoint.post("/v1/chat/completions", messages=[USER, {"role": "user", "content": "more"}])
    [second, first] = endpoint.session.samples(Sample())
    turns = [*(first.turn_rewards or []), *(second.turn_rewards or [])]
    assert [(turn["turn"], turn["reward"], turn.get("state")) for turn in turns] == [(0, 0.5, "room 3"), (1, 0.0, None)]
    endpoint.post("/reward", turn_rewards=[0.25, 1], reward=2.0)
    samples = endpoint.session.samples(Sample())
    assert [turn["reward"] for sample in samples for turn in sample.turn_rewards or []] == [1.0, 0.25]
    assert endpoint.session.reward == 2.0
    for body in (
        {"turn_rewards": [1.0]},
        {"turn_rewards": 1.0},
        {"turn_reward": "high"},
        {"turn_reward": 1, "state": 3},
    ):
        assert endpoint.refusal("/reward", **body)[0] == 400


@pytest.mark.parametrize(
    ("path", "values", "status", "message"),
    [
        (CHAT, {"messages": []}, 400, "messages: is missing or empty"),
        (CHAT, {"messages": ["x"]}, 400, "messages: is not a list of objects"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
            400,
            "ends with an empty message of the assistant",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "text only",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "\ud800"}]},
            400,
            "half of a surrogate pair",
        ),
        (CHAT, {"messages": [USER], "max_tokens": 0}, 400, "max_tokens: 0 is not between 1 and"),
        (CHAT, {"messages": [USER], "n": "2"}, 400, "n: '2' is not a whole number"),
        (
            CHAT,
            {"messages": [USER], "response_format": {"type": "xml"}},
            400,
            "response_format.type: 'xml' is not one of text, json_object, json_schema",
        ),
        (
            CHAT,
            {"messages": [USER], "response_format": {"type": "json_schema"}},
            400,
            "response_format.json_schema.schema: is missing",
        ),
        ("/v1/messages", {"messages": [{"role": "tool", "content": "x"}]}, 400, "must be user or assistant"),
        (
            "/v1/messages",
            {"messages": [USER], "tools": [{"type": "bash_20250124"}]},
            400,
            "tools[0]: is not a client tool",
        ),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 404, "is not a response of this session"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, 400, "type 'web_search_call' are not supported"),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "file_search"}]},
            400,
            "Only functions of the client are supported",
        ),
        ("/v1/completions", {"prompt": ["a", {}]}, 400, "prompt: must be a string, a list of token ids, or a list of"),
        ("/v1/completions", {"prompt": [["a"]]}, 400, "prompt: must be a string"),
        ("/v1/completions", {"prompt": ["a"] * 40, "n": 2}, 400, "n: 80 responses to one request are too many"),
    ],
)
def test_what_cannot_be_answered_is_one_error_and_no_turn(
    endpoint: Endpoint, path: str, values: dict[str, Any], status: int, message: str
):
    found_status, found = endpoint.refusal(path, **values)
    assert (found_status, message in found) == (status, True), found
    assert not endpoint.session.tree.turns
    assert endpoint.session.counts["refused_requests"] == 1


def test_keys_that_ask_for_another_sampling_are_counted_where_they_differ(endpoint: Endpoint):
    # The settings' temperature and top_p are 1.
    endpoint.post(CHAT, messages=[USER], temperature=1, top_p=1.0, top_k=-1)
    assert "unapplied_keys" not in endpoint.session.report()
    endpoint.post(CHAT, messages=[USER], temperature=0.2, seed=3, reasoning_effort="low")
    endpoint.post("/v1/messages", messages=[USER], thinking={"type": "enabled", "budget_tokens": 1024}, top_k=5)
    assert endpoint.session.report()["unapplied_keys"] == 5
    assert {params.temperature for *_, params in endpoint.engine.log} == {1.0}


def test_responses_to_several_prompts_are_turns_of_their_own(endpoint: Endpoint):
    body = endpoint.post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=2, logprobs=0)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    a, b = (endpoint.tokenizer.encode(letter) for letter in "ab")
    assert [prompt for prompt, *_ in endpoint.engine.log] == [a, a, b, b]
    assert len(endpoint.session.tree.turns) == 4
    assert all(len(choice["logprobs"]["tokens"]) == 2 for choice in body["choices"])
    endpoint.session.limits = SessionLimits(6, 1000)
    status, message = endpoint.refusal("/v1/completions", prompt=["a", "b", "c"])  # 4 + 3 turns
    assert (status, message, len(endpoint.session.tree.turns)) == (400, "the attempt has used its 6 turns", 4)


def test_log_probabilities_of_a_prompt_need_a_server_that_computes_them(endpoint: Endpoint):
    echoed = endpoint.post("/v1/completions", prompt="abc", echo=True, max_tokens=2)
    assert echoed["choices"][0]["text"].startswith("abc")
    status, message = endpoint.refusal("/v1/completions", prompt="abc", echo=True, logprobs=1)
    assert (status, message.partition(":")[0]) == (400, "echo")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_schema_and_a_forced_call_reach_the_engine_in_every_api(endpoint: Endpoint):
    add = {"name": "add", "parameters": PARAMETERS}
    form = {"type": "json_schema", "schema": SCHEMA}
    endpoint.post(CHAT, messages=[USER], response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    endpoint.post("/v1/responses", input="x", text={"format": {**form, "name": "sum"}})
    endpoint.post("/v1/messages", messages=[USER], output_config={"format": form})
    grammars = [params.grammar for *_, params in endpoint.engine.log]
    assert [json.loads(grammar.schema) for grammar in grammars if grammar is not None] == [SCHEMA] * 3
    tools = [{"type": "function", "function": add}]
    endpoint.post(CHAT, messages=[USER], tools=tools, tool_choice="required")
    named = {"type": "function", "name": "add"}
    endpoint.post("/v1/responses", input="x", tools=[{"type": "function", **add}], tool_choice=named)
    uses = [{"name": "add", "input_schema": PARAMETERS}]
    endpoint.post("/v1/messages", messages=[USER], tools=uses, tool_choice={"type": "tool", "name": "add"})
    forced = [params.grammar for *_, params in endpoint.engine.log[3:]]
    assert {grammar and grammar.prefix for grammar in forced} == {"<tool_call>\n"}
    assert endpoint.session.counts["unforced_tool_choices"] == 0


def test_an_engine_without_grammars_refuses_a_schema_and_leaves_a_call_to_the_policy(endpoint: Endpoint):
    generate = endpoint.session.generate

    async def free(tokens: list[int], params: SamplingParams) -> Completion:
        if params.grammar is not None:
            raise SettingsError("no grammars here")
        return await generate(tokens, params)

    endpoint.session.generate = free
    refusal = endpoint.refusal(CHAT, messages=[USER], response_format={"type": "json_object"})
    assert refusal == (400, "no grammars here")
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    endpoint.post(CHAT, messages=[USER], tools=tools, tool_choice="required")
    assert (len(endpoint.session.tree.turns), endpoint.session.counts["unforced_tool_choices"]) == (1, 1)


def test_broken_json_another_model_and_a_session_that_has_ended(endpoint: Endpoint):
    assert endpoint.raw("/v1/chat/completions", b'{"messages": [')[0] == 400
    assert endpoint.raw("/v1/chat/completions", b"[" * 100_000)[0] == 400
    endpoint.session.model = "policy"
    status, message = endpoint.refusal("/v1/chat/completions", messages=[USER], model="gpt-4o")
    assert (status, message) == (404, "model 'gpt-4o' is not served here. Use 'policy'.")
    address, endpoint.address = endpoint.address, endpoint.address[:-3] + "xyz"
    assert endpoint.refusal("/v1/messages", messages=[USER])[0] == 404
    endpoint.address, endpoint.session.is_closed = address, True
    assert endpoint.refusal("/v1/chat/completions", messages=[USER]) == (404, "this session has ended")


def test_a_client_that_leaves_ends_its_answer_and_leaves_no_turn(endpoint: Endpoint):
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(tokens: list[int], params: Any) -> Any:
        asked.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    endpoint.session.generate = slow

    async def leave() -> None:
        host, port = endpoint.address.split("/")[2].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": [USER]}).encode()
        path = "/" + endpoint.address.split("/", 3)[3]
        head = f"POST {path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await asked.wait()
        writer.close()
        await cancelled.wait()

    endpoint.background.submit(leave()).result()
    assert endpoint.session.tree.turns == []
