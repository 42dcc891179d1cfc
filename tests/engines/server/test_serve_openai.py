"""OpenAI's endpoints: completions and chats, whole and streamed, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

PROMPT = "once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3=?"}]


@pytest.fixture
def streamed(server: Any, events: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    def all_of(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async def scene(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
            return [event async for event in events(session, path, body)]

        return server.run(scene)

    return all_of


def test_a_completion_is_what_generate_writes(server: Any) -> None:
    native = server.good(
        "/generate",
        {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}},
    )
    body = {"model": "any", "prompt": PROMPT, **GREEDY, "logprobs": 1, "return_token_ids": True}
    answer = server.good("/v1/completions", body)
    choice = answer["choices"][0]
    assert (answer["object"], answer["model"]) == ("text_completion", "any")
    assert (choice["text"], choice["token_ids"]) == (native["text"], native["output_ids"])
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 12
    assert answer["usage"]["prompt_tokens"] == 16
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (12, 28)
    assert answer["metadata"]["weight_version"] == "0"
    tokens = {"prompt": list(PROMPT.encode()), **GREEDY}
    assert server.good("/v1/completions", tokens)["choices"][0]["text"] == native["text"]


def test_several_prompts_n_and_seeds(server: Any) -> None:
    body = {"prompt": [PROMPT, "2+3="], "n": 2, "seed": 7, "max_tokens": 8, "ignore_eos": True, "temperature": 1}
    answer = server.good("/v1/completions", body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 16 + 4
    again = server.good("/v1/completions", {**body, "prompt": "2+3=", "n": 1})
    assert again["choices"][0]["text"] == texts[2]


def test_a_chat_goes_through_the_template_with_its_tools(server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    tokenizer = server.service.served.tokenizer
    rendered = tokenizer.apply_chat_template(CHAT, tools=tools, add_generation_prompt=True, tokenize=False)
    body = {"messages": CHAT, "tools": tools, **GREEDY, "return_token_ids": True, "logprobs": True}
    answer = server.good("/v1/chat/completions", body)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["prompt_token_ids"] == tokenizer.encode(rendered, add_special_tokens=False)
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == len(choice["response_token_ids"]) == 12
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    body = {"messages": parts, "tools": tools, "temperature": 0, "max_completion_tokens": 12, "ignore_eos": True}
    assert server.good("/v1/chat/completions", body)["choices"][0]["message"] == choice["message"]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_of_deltas_adds_up_to_the_whole(chat: bool, server: Any, streamed: Callable[..., Any]) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": CHAT} if chat else {"prompt": PROMPT}
    body |= {"temperature": 2.0, "seed": 3, "max_tokens": 40, "n": 2, "stop": ["ab", "e"]}
    whole = server.good(path, body)["choices"]
    chunks = streamed(path, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        said = [choice["delta"]["content"] if chat else choice["text"] for choice in own]
        assert "".join(said) == (whole[index]["message"]["content"] if chat else whole[index]["text"])
        assert [choice["finish_reason"] for choice in own][-1] == whole[index]["finish_reason"]
        if chat:
            assert own[0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {}, "messages: is missing"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role: is not a string"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content: has a part that is not text",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": -1}, "temperature: -1 is not between 0 and 10000"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 3}, "top_logprobs: is not supported"),
        ("/v1/completions", {"prompt": "x", "logprobs": 5}, "logprobs: 5 is not between 0 and 1"),
        ("/v1/completions", {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty: is not supported"),
        ("/v1/completions", {"prompt": "x", "n": 10**6}, "n: 1000000 is not between 1 and 4096"),
        ("/v1/completions", {"prompt": "x" * 300}, "300 tokens leave no room in a context of 256"),
        ("/v1/completions", {"prompt": []}, "prompt: is missing"),
    ],
)
def test_refusals_have_openai_s_form_and_name_the_field(
    path: str, body: dict[str, Any], named: str, server: Any
) -> None:
    status, answer = server.ask(path, body)
    assert status == 400
    assert named in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert "\n" not in answer["error"]["message"]


def test_the_model_is_listed_under_its_name(server: Any) -> None:
    (card,) = server.good("/v1/models")["data"]
    assert card["max_model_len"] == 256
    assert server.good(f"/v1/models/{card['id']}")["id"] == card["id"]
    assert server.ask("/v1/models/gpt-9")[0] == 404
