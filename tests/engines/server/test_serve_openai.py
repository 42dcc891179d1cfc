"""OpenAI's endpoints: completions and chats, whole and streamed, and errors in OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimectl.engines.embedded.token_sampler import Sampled, SamplingBatch, sample_tokens

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


def log_likelihoods(answer: dict[str, Any], contexts: list[int]) -> list[tuple[float, bool]]:
    """What lm-evaluation-harness (0.4.13, local-completions) reads: log-likelihood, and whether greedy."""
    read = []
    for choice, start in zip(sorted(answer["choices"], key=lambda each: each["index"]), contexts, strict=True):
        values, tops = (choice["logprobs"][name][start:-1] for name in ("token_logprobs", "top_logprobs"))
        read.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return read


def test_the_requests_of_lm_eval_get_log_likelihoods_of_continuations(
    server: Any, model_dir: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    greedy = server.good("/v1/completions", {"prompt": PROMPT, **GREEDY, "return_token_ids": True})
    rows = [
        list(b"2+3=5"),
        list(PROMPT.encode()) + greedy["choices"][0]["token_ids"][:4],
        list(b"a longer context, too"),
    ]
    contexts = [4, len(PROMPT), 1]
    body = {
        "model": "any", "prompt": rows, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    answer = server.good("/v1/completions", body)
    for (value, is_greedy), row, start in zip(log_likelihoods(answer, contexts), rows, contexts, strict=True):
        with torch.no_grad():
            expected_TV = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)[start - 1 :]
        assert value == pytest.approx(expected_TV.gather(1, torch.tensor(row[start:])[:, None]).sum().item(), abs=1e-4)
        assert is_greedy == (expected_TV.argmax(-1).tolist() == row[start:]) == (start == len(PROMPT))
    texts = ["2+3=5", "a longer context, too"]  # tokenized_requests=False
    again = server.good("/v1/completions", {**body, "prompt": texts})
    read = log_likelihoods(answer, contexts)
    for one, other in zip(log_likelihoods(again, [4, 1]), (read[0], read[2]), strict=True):
        assert one == (pytest.approx(other[0], abs=1e-4), other[1])
    assert [choice["text"][:-1] for choice in again["choices"]] == texts
    judged = server.good("/v1/completions", {**body, "prompt": rows[0], "max_tokens": 0})["choices"][0]
    assert (judged["text"], judged["finish_reason"]) == ("2+3=5", "length")
    assert judged["logprobs"]["tokens"] == list("2+3=5")
    assert judged["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert judged["logprobs"]["token_logprobs"][0] is None
    values = answer["choices"][0]["logprobs"]["token_logprobs"][1:5]
    assert judged["logprobs"]["token_logprobs"][1:] == pytest.approx(values, abs=1e-5)


def test_the_likeliest_tokens_stand_beside_each_in_both_apis_and_streamed(
    server: Any, streamed: Callable[..., Any]
) -> None:
    params = {"temperature": 1.5, "max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 3, "logit_bias": {"65": 4}}
    native = server.good(
        "/generate",
        {
            "text": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 3,
            "logprob_start_len": 14, "return_text_in_logprobs": True,
        },
    )["meta_info"]  # fmt: skip
    assert [len(top) if top else top for top in native["input_top_logprobs"]] == [None, 3]
    assert [value for value, *_ in native["output_top_logprobs"][0]] == sorted(
        (value for value, *_ in native["output_top_logprobs"][0]), reverse=True
    )
    body = {
        "prompt": PROMPT, "temperature": 1.5, "seed": 3, "max_tokens": 6, "ignore_eos": True, "logit_bias": {"65": 4},
        "logprobs": 3, "echo": True,
    }  # fmt: skip
    whole = server.good("/v1/completions", body)["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == len(whole["top_logprobs"]) == len(whole["text_offset"]) == len(PROMPT) + 6
    for theirs, named in zip(native["output_top_logprobs"], whole["top_logprobs"][-6:], strict=True):
        assert {value for value, *_ in theirs} <= set(named.values())
        assert len(named) in (3, 4)  # with the drawn token, if that is none of the likeliest
    chunks = [choice["logprobs"] for chunk in streamed("/v1/completions", body) for choice in chunk["choices"]]
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk[name]] == values, name
    chat = {"messages": CHAT, "temperature": 0, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    for entry in server.good("/v1/chat/completions", chat)["choices"][0]["logprobs"]["content"]:
        assert (entry["top_logprobs"][0]["logprob"], len(entry["top_logprobs"])) == (entry["logprob"], 2)
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


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


VERDICT = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "sure": {"type": "boolean"}, "why": {"enum": ["counted", "guessed é"]}},
    "required": ["sum", "sure", "why"],
}


def test_an_answer_keeps_to_a_json_schema_whole_streamed_and_in_both_apis(
    server: Any, streamed: Callable[..., Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT, "strict": True}}
    body = {
        "prompt": "2+3=",
        "response_format": form,
        "temperature": 1,
        "seed": 4,
        "max_tokens": 200,
        "n": 3,
        "logprobs": 2,
    }
    choices = server.good("/v1/completions", body)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    for verdict in (json.loads(choice["text"]) for choice in choices):
        assert list(verdict) == ["sum", "sure", "why"]
        assert (type(verdict["sum"]), type(verdict["sure"])) == (int, bool)
        assert verdict["why"] in VERDICT["properties"]["why"]["enum"]
    # The first token must be a brace, and its log-probability is the one that a trainer computes.
    free = {"prompt": [*b"2+3={"], "echo": True, "max_tokens": 0, "logprobs": 1}
    scored = server.good("/v1/completions", free)["choices"][0]["logprobs"]["token_logprobs"]
    assert choices[0]["logprobs"]["token_logprobs"][0] == pytest.approx(scored[-1], abs=1e-5)
    assert scored[-1] < -1
    chunks = [
        choice for chunk in streamed("/v1/completions", body) for choice in chunk["choices"] if choice["index"] == 1
    ]
    assert "".join(chunk["text"] for chunk in chunks) == choices[1]["text"]
    params = {"temperature": 1, "sampling_seed": 4, "max_new_tokens": 200, "json_schema": json.dumps(VERDICT)}
    whole = server.good("/generate", {"text": "2+3=", "sampling_params": params})
    assert whole["text"] == choices[0]["text"]
    # A letter of a key was forced; which of the two truth values it is was not, but for what follows its first letter.
    mask, text = whole["meta_info"]["loss_mask"], whole["text"]
    at, truth = text.index('"sure"'), re.search("true|false", text)
    assert truth is not None
    assert mask[at + 1 : at + 6] == [0] * 5
    assert mask[truth.start() : truth.end()] == [1] + [0] * (truth.end() - truth.start() - 1)
    listed = server.good("/v1/completions", body | {"n": 1, "return_token_ids": True})["choices"][0]
    assert (listed["token_ids"], listed["loss_mask"]) == (whole["output_ids"], mask)
    endless = {**params, "ignore_eos": True}  # the end of the JSON is the end of the answer all the same
    finish = server.good("/generate", {"text": "2+3=", "sampling_params": endless})["meta_info"]["finish_reason"]
    assert finish == {"type": "stop", "matched": None}


REASONS_AND_CALLS = (
    "{% if tools %}<tool_call> {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    "{% if false %}</think>{% endif %}"
)
"""A chat template in the manner of Qwen3-Thinking, which opens the reasoning itself."""


@pytest.fixture
def scripted(server: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the server's model write a text, byte by byte, and then its end token."""
    monkeypatch.setattr(server.service.served.tokenizer, "chat_template", REASONS_AND_CALLS)

    def script(text: str) -> None:
        tokens = [*text.encode(), 256]

        def sample(logits_BV: torch.Tensor, batch: SamplingBatch) -> Sampled:
            sampled = sample_tokens(logits_BV, batch)
            return sampled._replace(tokens_B=torch.tensor([tokens[len(each.tokens)] for each in batch.sequences]))

        monkeypatch.setattr("slimectl.engines.embedded.runner.sample_tokens", sample)

    return script


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_reasoning_and_calls_are_parts_of_the_message_and_streamed(
    scripted: Callable[[str], None], server: Any, streamed: Callable[..., Any]
) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "€"}}\n</tool_call>'
    scripted(f"two and\nthree\n</think>\n\nI add.\n{call}\n{call}")
    body = {"messages": CHAT, "tools": [ADD], "temperature": 0}
    choice = server.good("/v1/chat/completions", body)["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I add.")
    assert message["reasoning_content"] == "two and\nthree"
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 2, "b": "€"}'}
    ] * 2
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    deltas = [choice["delta"] for chunk in streamed("/v1/chat/completions", body) for choice in chunk["choices"]]
    for part in ("reasoning_content", "content"):
        assert "".join(delta.get(part, "") for delta in deltas) == message[part]
    calls = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert [each["index"] for each in calls] == [0, 1]
    assert [each["function"] for each in calls] == [each["function"] for each in message["tool_calls"]]
    single = {**body, "parallel_tool_calls": False}
    assert len(server.good("/v1/chat/completions", single)["choices"][0]["message"]["tool_calls"]) == 1
    deltas = [choice["delta"] for chunk in streamed("/v1/chat/completions", single) for choice in chunk["choices"]]
    assert sum(len(delta.get("tool_calls", [])) for delta in deltas) == 1
    raw = server.good("/v1/chat/completions", {**body, "tool_choice": "none", "separate_reasoning": False})
    assert raw["choices"][0]["message"]["content"].endswith(call)
    assert raw["choices"][0]["finish_reason"] == "stop"
    for options, field in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        status, answer = server.ask("/v1/chat/completions", {**body, **options})
        assert (status, answer["error"]["param"]) == (400, field)


def test_a_forced_call_follows_the_parameters_of_its_tool(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server.service.served.tokenizer,
        "chat_template",
        "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>",
    )
    side = {"enum": ["left", "right"]}
    parameters = {"properties": {"to": {"$ref": "#/$defs/side"}}, "required": ["to"], "$defs": {"side": side}}
    turn = {"type": "function", "function": {"name": "turn", "parameters": parameters}}
    stop = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": CHAT, "tools": [stop, turn], "temperature": 1, "max_tokens": 200}
    for seed in range(4):
        named = {"type": "function", "function": {"name": "turn"}}
        choice = server.good("/v1/chat/completions", {**body, "tool_choice": named, "seed": seed})["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "turn")
        assert json.loads(call["function"]["arguments"])["to"] in side["enum"]
    status, answer = server.ask("/v1/chat/completions", {**body, "tool_choice": "required", "min_tokens": 2})
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
    status, answer = server.ask("/v1/chat/completions", {**body, "tool_choice": {"function": {"name": "fly"}}})
    assert (status, answer["error"]["message"]) == (400, "tool_choice: 'fly' is not one of the tools")
    monkeypatch.setattr(
        server.service.served.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    status, answer = server.ask("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert (status, "does not write calls as JSON" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {}, "messages: is missing"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role: is not a string"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content: has a part of type 'image_url'",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": -1}, "temperature: -1 is not between 0 and 10000"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "xml"}}, "response_format.type: 'xml'"),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 2}}}},
            "response_format: $: 'multipleOf' is not supported",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "json_object"}, "min_tokens": 2},
            "min_tokens: cannot be combined with response_format",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 3}, "top_logprobs: needs logprobs: true"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs: 21 is not between 0 and 20"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens: 0 is not between 1"),
        (
            "/v1/completions",
            {"prompt": "x", "frequency_penalty": 2.5},
            "frequency_penalty: 2.5 is not between -2 and 2",
        ),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: 'a' is not a token id"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"9999": 1}}, "token 9999 is outside the vocabulary"),
        (
            "/v1/completions",
            {"prompt": "x", "stop_token_ids": [151645], "min_tokens": 2},
            "stop_token_ids: token 151645 is outside the vocabulary of 259",
        ),
        ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids: token 999"),
        ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [-1]}}, "token -1 is outside the vocabulary"),
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
