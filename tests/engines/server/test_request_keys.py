"""Keys of requests: each is acted on, changes nothing by its value, or is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from transformers import AutoModelForCausalLM

from slimectl.chats.request_keys import ObjectKeys
from slimectl.engines.server.app import ROUTES
from slimectl.engines.server.request_keys import CHAT, COMPLETIONS, ENDPOINTS, GENERATE, SAMPLING, SAMPLING_PARAMS

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "temperature": 0},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "temperature": 0},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
}
OPENAI = ["/v1/chat/completions", "/v1/completions"]
DEFAULTS: dict[str, dict[str, Any]] = {
    # Of ChatCompletionRequest and CompletionRequest in SGLang 0.5.21 and vLLM, and of OpenAI's reference: what is sent
    # by clients that write out every key.
    "/v1/chat/completions": {
        "model": "m", "n": 1, "best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {},
        "logprobs": False, "top_logprobs": 0, "stop": [], "stream": False, "top_p": 1.0, "seed": 0, "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "user": "me", "metadata": {"run": "1"}, "store": False,
        "service_tier": "auto", "modalities": ["text"], "truncation": "disabled", "verbosity": "medium",
        "response_format": {"type": "text"}, "safety_identifier": "x", "prompt_cache_key": "x",
        "return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0,
        "return_cached_tokens_details": False, "return_sampling_mask": False, "top_k": -1, "min_p": 0.0,
        "min_tokens": 0, "repetition_penalty": 1.0, "stop_token_ids": [], "no_stop_trim": False, "ignore_eos": False,
        "continue_final_message": False, "add_generation_prompt": True, "skip_special_tokens": True,
        "separate_reasoning": True, "stream_reasoning": True, "chat_template_kwargs": {}, "use_audio_in_video": False,
        "priority": 0, "data_parallel_rank": 0, "use_beam_search": False, "length_penalty": 1.0, "echo": False,
        "include_stop_str_in_output": False, "spaces_between_special_tokens": True, "bad_words": [],
        "add_special_tokens": False, "include_reasoning": True, "documents": [], "mm_payload": "tensors",
        "return_tokens_as_token_ids": False, "return_token_ids": False, "session_id": "s", "watermarking": False,
    },
    "/v1/completions": {
        "model": "m", "best_of": 1, "echo": False, "suffix": "", "n": 1, "logit_bias": {}, "stop": [], "seed": 0,
        "stream": False, "user": "me", "return_hidden_states": False, "top_k": -1, "min_p": 0.0, "min_tokens": 0,
        "repetition_penalty": 1.0, "use_beam_search": False, "length_penalty": 1.0, "add_special_tokens": True,
        "routed_experts_prompt_start": 0, "return_token_offsets": False, "structured_outputs": {},
    },
    # Of GenerateReqInput and SamplingParams in SGLang 0.5.21; slime sends spaces_between_special_tokens: false.
    "/generate": {
        "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False,
        "stream": False, "log_metrics": True, "return_hidden_states": False, "background": False, "no_logs": False,
        "return_bytes": False, "require_reasoning": False, "routed_experts_start_len": 0, "conversation_id": "c",
        "sampling_params": {
            "max_new_tokens": 2, "stop": [], "top_k": -1, "n": 1, "beam_width": 1, "ignore_eos": False,
            "no_stop_trim": True, "spaces_between_special_tokens": False, "custom_params": {}, "regex": "",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing_pass_on_every_endpoint(path: str, server: Any) -> None:
    server.good(path, BODIES[path] | DEFAULTS[path])
    names = {name for defaults in DEFAULTS.values() for name in defaults} - BODIES[path].keys()
    server.good(path, BODIES[path] | dict.fromkeys([*names, "no_such_key"]))  # null


CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REFUSED = [
    ("/v1/chat/completions", {"max_token": 2}, "max_token: unknown key. Did you mean max_tokens?"),
    ("/v1/chat/completions", {"no_such_key": False}, "no_such_key: unknown key. docs/reference/http-api.md"),
    ("/v1/chat/completions", {"chat_template": "{{ 'x' }}"}, "chat_template: is not supported. Put"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions: .* Use tools"),
    ("/v1/chat/completions", {"modalities": ["audio"]}, r'modalities: .* except as \["text"\]'),
    ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options: .* searches nothing"),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort: is not read by"),
    ("/v1/chat/completions", {"documents": [{"text": "x"}]}, "documents: is not read by"),
    ("/v1/chat/completions", {"enable_thinking": False}, "enable_thinking: .* Put it into chat_template_kwargs"),
    ("/v1/chat/completions", {"stream_reasoning": False}, "stream_reasoning: .* except as true"),
    ("/v1/chat/completions", {"max_new_tokens": 3}, "max_new_tokens: .* Use max_tokens"),
    ("/v1/chat/completions", {"max_completion_tokens": 3}, "max_tokens: is not equal to max_completion_tokens"),
    ("/v1/chat/completions", {"prompt": "x"}, "prompt: is a key of /v1/completions"),
    ("/v1/chat/completions", {"extra_body": {"top_k": 1}}, "extra_body: .* Put its keys next to the others"),
    (
        "/v1/chat/completions",
        {"tools": [CALL], "tool_choice": "required", "regex": "a"},
        "tool_choice: .*(cannot be combined with regex|cannot be forced)",
    ),
    *[
        (path, body, words)
        for path in OPENAI
        for body, words in (
            ({"bad_words": ["a"]}, "bad_words: .* Use logit_bias"),
            ({"best_of": 3}, "best_of: .* Use n"),
            ({"use_beam_search": True}, "use_beam_search: is not supported"),
            ({"length_penalty": 2.0}, "length_penalty: .* except as 1.0"),
            ({"guided_grammar": "root ::= 'a'"}, "guided_grammar: .* Use guided_regex"),
            ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar: .* Use regex or json"),
            ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices: .* Did you mean choice"),
            ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex: cannot be combined .*json"),
            ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids: cannot be combined .*guided_regex"),
            ({"guided_choice": ["a"], "min_tokens": 1}, "min_tokens: cannot be combined with guided_choice"),
            ({"guided_regex": "(?=a)b"}, "guided_regex: pattern .* is not supported .assert"),
            ({"allowed_token_ids": []}, "allowed_token_ids: is empty"),
            ({"allowed_token_ids": [999]}, "allowed_token_ids: token 999 is outside the vocabulary"),
            ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema: unknown key"),
            ({"stream_options": {"include_usage": True}}, "stream_options: is for streams only"),
            ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage: .* Known are .*, include_usage"),
            ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs: is not available in a stream"),
            ({"prompt_logprobs": -1}, "prompt_logprobs: -1 is not between 0 and 20"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0 keeps no token"),
            ({"truncation_side": "middle"}, "truncation_side: 'middle' is not one of left, right"),
            ({"store": True}, "store: .* Record them with --record"),
            ({"priority": 5}, "priority: .* except as 0"),
        )
    ],
    *[
        ("/generate", {name: 1}, f"{name}: is a sampling parameter. Put it in sampling_params")
        for name in ("max_new_tokens", "top_k", "stop_token_ids", "temperature", "regex", "n", "max_tokens", "seed")
    ],
    ("/generate", {"messages": MESSAGES}, "messages: .* /v1/chat/completions"),
    ("/generate", {"return_logprobs": True}, "return_logprobs: .* Did you mean return_logprob"),
    ("/generate", {"sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens: .* Use max_new_tokens"),
    ("/generate", {"sampling_params": {"temprature": 1}}, "sampling_params.temprature: .* Did you mean temperature"),
    ("/pause_generation", {"mod": "abort"}, "mod: unknown key. Did you mean mode"),
    ("/update_weight_version", {"version": "1"}, "version: unknown key. Did you mean new_version"),
    ("/release_memory_occupation", {"tags": ["weights"]}, r'tags: .* except as \["kv_cache"\]'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_a_key_that_would_be_ignored_is_refused_with_the_way_out(
    path: str, body: dict[str, Any], words: str, server: Any
) -> None:
    status, answer = server.ask(path, BODIES.get(path, {}) | body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert re.match(words, answer["error"]["message"]), answer["error"]["message"]


def test_every_endpoint_with_a_body_has_a_table_and_every_key_of_openai_is_in_it() -> None:
    assert set(ENDPOINTS) == {path for path, (_, methods, _) in ROUTES.items() if "POST" in methods}
    for params, keys in (
        (chat_create_params.CompletionCreateParamsBase, CHAT),
        (completion_create_params.CompletionCreateParamsBase, COMPLETIONS),
    ):
        assert params.__annotations__.keys() <= keys.acts | keys.labels | keys.neutral.keys() | keys.remedies.keys()


def test_the_documentation_lists_the_keys_that_each_endpoint_acts_on() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "http-api.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]*) \| (`[^|]*`) \|$", text[text.index("## Keys of requests") :], re.MULTILINE))
    shared = COMPLETIONS.acts & CHAT.acts
    for row, names in {
        "sampling, on all three": SAMPLING,
        "both of OpenAI's": shared - SAMPLING,
        "`/v1/completions`": COMPLETIONS.acts - shared,
        "`/v1/chat/completions`": CHAT.acts - shared,
        "`/generate`": GENERATE.acts,
        "its `sampling_params`": SAMPLING_PARAMS.acts - SAMPLING,
        "any value passes": COMPLETIONS.labels | CHAT.labels | GENERATE.labels,
    }.items():
        assert set(re.findall(r"`(\w+)`", rows[row])) == names, row


def test_false_is_refused_only_where_true_changes_nothing() -> None:
    keys = ObjectKeys(frozenset(), neutral={"on": (True,), "off": (), "one": (1,), "none": ("",)})
    keys.check({"on": True, "off": False, "one": 1, "none": "", "other": None})
    for values in ({"on": False}, {"off": True}, {"one": True}, {"one": 2}, {"off": [1]}):
        with pytest.raises(Exception, match=next(iter(values))):
            keys.check(values)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_choice": ["yes", "no, thanks"]}, "yes|no, thanks"),
        ({"structured_outputs": {"choice": ['"é"', "\n"]}}, '"é"|\n'),
        ({"guided_regex": r"[0-9]{2,4}\.\w"}, r"[0-9]{2,4}\.[A-Za-z0-9_]"),
        ({"structured_outputs": {"regex": r'^"\\[^a]"$'}}, r'"\\[^a]"'),
        ({"regex": "(ab|c){1,3}é?"}, "(ab|c){1,3}é?"),
        ({"guided_json": {"enum": ["a", 1]}}, '"a"|1'),
        ({"guided_json": '{"const": true}'}, "true"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json_object": True}, "logit_bias": {"125": 100}}, r"\{\s*\}"),
    ],
)
def test_a_restricted_response_fits_on_both_endpoints(body: dict[str, Any], pattern: str, server: Any) -> None:
    for path in OPENAI:
        for seed in range(3):
            asked = {**BODIES[path], **body, "max_tokens": 60, "temperature": 1, "seed": seed}
            [choice] = server.good(path, asked)["choices"]
            text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
            assert (choice["finish_reason"], bool(re.fullmatch(pattern, text))) == ("stop", True), text


def test_allowed_tokens_are_the_only_ones_and_keep_the_log_probabilities_of_the_model(server: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 12, "return_token_ids": True, "logprobs": 0, "seed": 1}
    choice = server.good("/v1/completions", body | {"allowed_token_ids": [65, 66, 67]})["choices"][0]
    assert set(choice["token_ids"]) <= {65, 66, 67}
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (12, "length")  # no end token is allowed
    assert choice["loss_mask"] == [1] * 12
    free = server.good("/v1/completions", {"prompt": "hi" + choice["text"][0], "echo": True, "logprobs": 0,
                                           "max_tokens": 0})["choices"][0]  # fmt: skip
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(free["logprobs"]["token_logprobs"][-1], abs=1e-5)
    single = server.good("/v1/completions", body | {"allowed_token_ids": [65]})["choices"][0]
    assert (single["text"], single["loss_mask"]) == ("A" * 12, [0] * 12)
    ended = server.good("/v1/completions", body | {"allowed_token_ids": [65, 256], "logit_bias": {"256": 100}})
    assert (ended["choices"][0]["finish_reason"], ended["choices"][0]["matched_stop"]) == ("stop", 256)


def test_prompt_logprobs_are_those_of_transformers_with_ranks(server: Any, model_dir: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    tokens = [*b"once upon"]
    with torch.no_grad():
        expected_TV = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for top in (0, 3):
        body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": top, "n": 2}
        for choice in server.good("/v1/completions", body)["choices"]:
            first, *entries = choice["prompt_logprobs"]
            assert first is None
            for token, entry, log_p_V in zip(tokens[1:], entries, expected_TV, strict=False):
                own = entry[str(token)]
                assert own["logprob"] == pytest.approx(log_p_V[token].item(), abs=1e-4)
                assert own["rank"] == (log_p_V > log_p_V[token]).sum().item() + 1
                assert own["decoded_token"] == chr(token)
                likeliest = log_p_V.topk(top).indices.tolist() if top else []
                assert set(entry) == {str(each) for each in [token, *likeliest]}
    chat = server.good("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"prompt_logprobs": 1})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_tokens_are_named_by_their_ids_and_a_stop_string_is_kept_where_asked_for(server: Any) -> None:
    body = {"logit_bias": {"65": 100}, "max_tokens": 3, "return_tokens_as_token_ids": True}
    [choice] = server.good("/v1/completions", BODIES["/v1/completions"] | body | {"logprobs": 1})["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:65"] * 3
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [["token_id:65"]] * 3
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    chat = BODIES["/v1/chat/completions"] | body | {"logprobs": True, "top_logprobs": 1}
    [choice] = server.good("/v1/chat/completions", chat)["choices"]
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"][0]["token"]) == ("token_id:65", [65], "token_id:65")
    for kept, text in ((False, "A"), (True, "AAA")):
        asked = {"stop": "AA", "include_stop_str_in_output": kept, "max_tokens": 9, "logit_bias": {"65": 100}}
        asked |= {"min_tokens": 3} if kept else {"prompt": "hi", "echo": False}
        [choice] = server.good("/v1/completions", BODIES["/v1/completions"] | asked)["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == (text if kept else "")


def test_metadata_is_text_and_versions_stand_in_each_choice(server: Any) -> None:
    for path in OPENAI:
        answer = server.good(path, BODIES[path] | {"n": 2, "ignore_eos": True})
        assert answer["metadata"] == {"weight_version": "0"}
        spans = [{"version": "0", "start": 0, "end": 2}]
        assert [choice["weight_versions"] for choice in answer["choices"]] == [spans] * 2


def test_a_stream_has_null_or_filled_log_probabilities_and_its_last_token_brings_the_reason(
    server: Any, events: Any
) -> None:
    for path in OPENAI:
        shown = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
        body = BODIES[path] | {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True, **shown}

        async def scene(session: aiohttp.ClientSession, path: str = path, body: Any = body) -> list[Any]:
            return [event["choices"][0] async for event in events(session, path, body)]

        choices = server.run(scene)
        opening = choices.pop(0) if "chat" in path else None
        assert opening is None or opening["logprobs"] is None
        lists = [choice["logprobs"]["content" if "chat" in path else "tokens"] for choice in choices]
        assert min(map(len, lists)) > 0
        assert sum(map(len, lists)) == 30
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        assert json.dumps(choices[-1]["weight_versions"]) == '[{"version": "0", "start": 0, "end": 30}]'
