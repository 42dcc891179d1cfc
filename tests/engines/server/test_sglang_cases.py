"""The cases of SGLang's own server tests, asked by URL of `slimectl serve` and of `slimectl serve --record`.

SGLang 0.5.21 has them in test/registered: openai_server (basic, features, validation, function_call) and
test_srt_endpoint.py. A random model of bytes stands in for Llama, so a bias on single bytes writes what they wait for.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model_families import FAMILIES, SHAPE
from transformers import AutoTokenizer

from slimectl.agents.recorder import SessionRecorder
from slimectl.checkpoints.create import create_model
from slimectl.types import SamplingParams

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if false %}<tool_call>{% endif %}"
)
PROMPT = "The capital of France is"
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant"}
CHAT = [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]
END, NEWLINE = 256, 10
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}}, "required": ["unit"]},
    },
}
CONTEXT = 1024
COUNT = 4
"""Tokens of a response, where the case needs no others."""


@dataclass(frozen=True)
class Client:
    """The two kinds of clients of a server."""

    api: openai.OpenAI
    native: httpx.Client

    def complete(self, **body: Any) -> Any:
        defaults = {"prompt": PROMPT, "temperature": 0, "max_tokens": COUNT}
        return self.api.completions.create(model="m", **defaults | body)

    def chat(self, **body: Any) -> Any:
        defaults = {"messages": CHAT, "temperature": 0, "max_tokens": COUNT}
        return self.api.chat.completions.create(model="m", **defaults | body)

    def generate(self, **body: Any) -> Any:
        response = self.native.post("/generate", json=body)
        if response.status_code == 400:
            raise openai.BadRequestError("", response=response, body=response.json()["error"])
        assert response.status_code == 200, response.text
        if "stream" not in body:
            return response.json()
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return list(map(json.loads, events))


def completion_arguments(echo: bool, logprobs: int | None, listed: bool, n: int, tokens: bool) -> dict[str, Any]:
    prompt = list(PROMPT.encode()) if tokens else PROMPT
    return {"echo": echo, "logprobs": logprobs, "prompt": [prompt, prompt] if listed else prompt, "n": n}


def completion(client: Client, echo: bool, logprobs: int | None, listed: bool, n: int, tokens: bool) -> None:
    response = client.complete(**completion_arguments(echo, logprobs, listed, n, tokens))
    prompts = 2 if listed else 1
    assert len(response.choices) == prompts * n
    assert response.usage.prompt_tokens == prompts * len(PROMPT)
    assert response.usage.completion_tokens == prompts * n * COUNT
    assert response.id
    assert response.created
    for choice in response.choices:
        assert choice.text.startswith(PROMPT) or not echo
        if logprobs:
            count = COUNT + len(PROMPT) * echo
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == count
            assert (choice.logprobs.token_logprobs[0] is None) == echo
            assert len(choice.logprobs.top_logprobs[1]) >= logprobs


def streamed_completion(client: Client, echo: bool, logprobs: int | None, listed: bool, n: int, tokens: bool) -> None:
    arguments = completion_arguments(echo, logprobs, listed, n, tokens)
    chunks = list(client.complete(**arguments, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], COUNT * n * (2 if listed else 1))
    assert all(chunk.usage is None for chunk in chunks)
    texts, finished = dict[int, str](), list[int]()
    for chunk in chunks:
        [choice] = chunk.choices
        if logprobs:
            assert isinstance(choice.logprobs.tokens[0], str)
            is_prompt = echo and choice.index not in texts
            assert is_prompt or len(choice.logprobs.top_logprobs[0]) >= logprobs
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        finished += [choice.index] if choice.finish_reason else []
    whole = client.complete(**arguments)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert sorted(finished) == sorted(texts)


def chat(client: Client, logprobs: int | None, n: int) -> None:
    response = client.chat(logprobs=bool(logprobs), top_logprobs=logprobs, n=n)
    assert len(response.choices) == n
    for choice in response.choices:
        assert choice.message.role == "assistant"
        assert isinstance(choice.message.content, str)
        if logprobs:
            assert [len(token.top_logprobs) for token in choice.logprobs.content] == [logprobs] * COUNT
            assert isinstance(choice.logprobs.content[0].top_logprobs[0].token, str)
    assert response.usage.total_tokens == response.usage.prompt_tokens + COUNT * n


def streamed_chat(client: Client, logprobs: int | None, n: int) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat(logprobs=bool(logprobs), top_logprobs=logprobs, n=n, **options)
    assert last.usage.completion_tokens == COUNT * n
    first, finished, scored = set[int](), list[int](), 0
    for chunk in chunks:
        [choice] = chunk.choices
        if choice.index not in first:
            first.add(choice.index)
            assert choice.delta.role == "assistant"
            continue
        finished += [choice.index] if choice.finish_reason else []
        assert isinstance(choice.delta.content, str) or choice.finish_reason
        if logprobs:
            assert len(choice.logprobs.content[0].top_logprobs) == logprobs
            scored += len(choice.logprobs.content)
    assert sorted(finished) == sorted(first) == list(range(n))
    assert scored == (COUNT * n if logprobs else 0)


REGEX = r'\{\n   "name": "[A-Z][\w]{1,9}",\n   "population": [\d]{1,5}\n\}'


def regex(client: Client, ask: Callable[[Client, str], str]) -> None:
    text = ask(client, REGEX)
    assert re.fullmatch(REGEX, text), text
    value = json.loads(text)
    assert (type(value["name"]), type(value["population"])) == (str, int)


def grammar_logprobs(client: Client) -> None:
    """The likeliest tokens are those of the model, so both that the grammar allows are among all of them."""
    params = {"temperature": 1, "max_new_tokens": 3, "regex": "(Yes|No)", "sampling_seed": 1}
    output = client.generate(text=PROMPT, sampling_params=params, return_logprob=True, return_text_in_logprobs=True)
    assert output["text"] in ("Yes", "No")
    assert all(value < 0 for value, *_ in output["meta_info"]["output_token_logprobs"])


def json_mode(client: Client, stream: bool) -> None:
    # A bias closes the object: a random model would go on with blanks and letters.
    options = {"response_format": {"type": "json_object"}, "logit_bias": {str(ord("}")): 100}, "max_tokens": 32}
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat(**options, stream=True))
    else:
        text = client.chat(**options).choices[0].message.content
    assert isinstance(json.loads(text), dict)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Sofia", "Paris"]}, "population": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "population"],
    "additionalProperties": False,
}


def json_schema(client: Client, ask: Callable[[Client], str]) -> None:
    value = json.loads(ask(client))
    assert value["name"] in ("Sofia", "Paris")
    assert 1 <= value["population"] <= 9


def chat_schema(client: Client) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    return str(client.chat(response_format=form, max_tokens=80).choices[0].message.content)


def native_schema(client: Client) -> str:
    params = {"temperature": 0, "max_new_tokens": 300, "json_schema": json.dumps(SCHEMA)}
    return str(client.generate(text=PROMPT, sampling_params=params)["text"])


def refused(client: Client, ask: Callable[[Client], Any]) -> None:
    ask(client)
    raise AssertionError("this has been answered")


def prefill(client: Client) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "{\n"}]
    free, continued = client.chat(), client.chat(messages=messages, extra_body={"continue_final_message": True})
    assert continued.usage.prompt_tokens == free.usage.prompt_tokens + 2


def models(client: Client) -> None:
    [model] = client.api.models.list()
    assert isinstance(model.max_model_len, int)  # type: ignore[attr-defined]
    assert client.api.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.api.models.retrieve("non-existent-model")


def continuous_usage(client: Client, enabled: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": enabled}
    chunks = list(client.chat(stream=True, stream_options=options))
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == (len(chunks) if enabled else 1)
    assert [usage.completion_tokens for usage in usages] == sorted(usage.completion_tokens for usage in usages)
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
    assert (chunks[-1].choices, usages[-1].completion_tokens) == ([], COUNT)


def matched_stop(client: Client, is_chat: bool, options: dict[str, Any], expected: tuple[str, Any]) -> None:
    choice = (client.chat if is_chat else client.complete)(**options).choices[0]
    assert (choice.finish_reason, choice.model_extra["matched_stop"]) == expected


def ignored_end(client: Client) -> None:
    response = client.chat(logit_bias={str(END): 100}, extra_body={"ignore_eos": True})
    assert (response.choices[0].finish_reason, response.usage.completion_tokens) == ("length", COUNT)


def too_long(client: Client, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=f"context of {CONTEXT}"):
        client.chat(messages=[{"role": "user", "content": "hello " * CONTEXT}], stream=stream)


def tool_call(client: Client, choice: Any, stream: bool) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 400, "temperature": 1, "seed": 3}
    if stream:
        chunks = list(client.chat(**options, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        [answer] = client.chat(**options).choices
        calls, reason = answer.message.tool_calls, answer.finish_reason
    assert [call.function.name for call in calls] == ["get_weather"]
    assert json.loads(calls[0].function.arguments)["unit"] in ("celsius", "kelvin")
    assert reason == "tool_calls"


def no_call(client: Client, choice: str, stream: bool) -> None:
    response = client.chat(tools=[WEATHER], tool_choice=choice, stream=stream)
    if not stream:
        assert response.choices[0].message.tool_calls is None
    else:
        assert not any(chunk.choices[0].delta.tool_calls for chunk in response)


def decode(client: Client, n: int = 1, batch: bool = False, **options: Any) -> None:
    params = {"temperature": 0 if n == 1 else 0.5, "max_new_tokens": 16, "n": n, "ignore_eos": True}
    output = client.generate(text=[PROMPT] if batch else PROMPT, sampling_params=params, logprob_start_len=0, **options)
    outputs = output if isinstance(output, list) else [output]
    last = {each.get("index", 0): each for each in outputs}
    assert len(last) == n
    for each in last.values():
        assert (each["meta_info"]["completion_tokens"], len(each["output_ids"])) == (16, 16)
        assert each["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
        if options.get("return_logprob"):
            assert [len(top) for top in each["meta_info"]["output_top_logprobs"]] == [5] * 16
            assert each["meta_info"]["input_token_logprobs"][0][0] is None


def logprob_start(client: Client) -> None:
    prompts = ["I have a very good idea on", "Today is a sunndy day and"]
    outputs = client.generate(
        text=prompts, sampling_params={"temperature": 0, "max_new_tokens": 4}, return_logprob=True,
        top_logprobs_num=5, return_text_in_logprobs=True, logprob_start_len=4,
    )  # fmt: skip
    for prompt, output in zip(prompts, outputs, strict=True):
        meta = output["meta_info"]
        assert "".join(text for *_, text in meta["input_token_logprobs"]) == prompt[4:]
        assert meta["prompt_tokens"] == 4 + len(meta["input_token_logprobs"])
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 4
        for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
            assert (entry, len(top)) == (top[0], 5)  # greedy


def logprob_match(client: Client) -> None:
    """Log-probabilities of a response are those of the same tokens in a prompt."""
    params = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}
    options = {"return_logprob": True, "logprob_start_len": 0}
    meta = client.generate(text="I have a very good idea", sampling_params=params, **options)["meta_info"]
    tokens = [token for part in ("input", "output") for _, token, _ in meta[f"{part}_token_logprobs"]]
    judged = client.generate(input_ids=tokens, sampling_params={"max_new_tokens": 0}, **options)["meta_info"]
    values = [value for value, *_ in judged["input_token_logprobs"][meta["prompt_tokens"] :]]
    assert values == pytest.approx([value for value, *_ in meta["output_token_logprobs"]], abs=1e-4)


def token_ids(client: Client) -> None:
    choice = client.chat(extra_body={"return_token_ids": True}).choices[0]
    text = "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>"
    assert len(choice.model_extra["response_token_ids"]) == COUNT
    assert len(choice.model_extra["prompt_token_ids"]) > len(text.replace("<|im_start|>", "").replace("<|im_end|>", ""))


def named(**parts: Any) -> str:
    return ",".join(f"{name}={value}" for name, value in parts.items())


def cases() -> Iterator[tuple[str, Callable[[Client], None]]]:
    """Yield the name and the check of each case."""
    for echo, logprobs, listed, n, tokens in itertools.product(
        (False, True), (None, 5), (True, False), (1, 2), (False, True)
    ):
        parts = {"echo": echo, "logprobs": logprobs, "listed": listed, "n": n, "tokens": tokens}
        yield f"completion {named(**parts)}", partial(completion, **parts)
        yield f"completion stream {named(**parts)}", partial(streamed_completion, **parts)
    for logprobs, n in itertools.product((None, 5), (1, 2)):
        yield f"chat {named(logprobs=logprobs, n=n)}", partial(chat, logprobs=logprobs, n=n)
        yield f"chat stream {named(logprobs=logprobs, n=n)}", partial(streamed_chat, logprobs=logprobs, n=n)
    yield from constrained_cases()
    yield "penalty", lambda client: client.chat(frequency_penalty=1.0)
    yield "prefill", prefill
    yield "models", models
    for enabled in (True, False):
        yield f"continuous usage {named(enabled=enabled)}", partial(continuous_usage, enabled=enabled)
    yield from stop_cases()
    for stream in (False, True):
        yield f"input too long {named(stream=stream)}", partial(too_long, stream=stream)
        for kind, choice in (("required", "required"), ("named", {"function": {"name": "get_weather"}})):
            choice = {"type": "function", **choice} if isinstance(choice, dict) else choice
            yield f"tool choice {kind} {named(stream=stream)}", partial(tool_call, choice=choice, stream=stream)
        for kind in ("auto", "none"):
            yield f"tool choice {kind} {named(stream=stream)}", partial(no_call, choice=kind, stream=stream)
    yield "return token ids", token_ids
    yield from native_cases()


def constrained_cases() -> Iterator[tuple[str, Callable[[Client], None]]]:
    def of_chat(client: Client, pattern: str) -> str:
        answer = client.chat(extra_body={"regex": pattern}, max_tokens=128)
        return str(answer.choices[0].message.content)

    def of_generate(client: Client, pattern: str) -> str:
        params = {"temperature": 0, "max_new_tokens": 128, "regex": pattern}
        return str(client.generate(text=PROMPT, sampling_params=params)["text"])

    yield "regex chat", partial(regex, ask=of_chat)
    yield "regex generate", partial(regex, ask=of_generate)
    yield "regex log-probabilities", grammar_logprobs
    for stream in (False, True):
        yield f"json mode {named(stream=stream)}", partial(json_mode, stream=stream)
    yield "json schema chat", partial(json_schema, ask=chat_schema)
    yield "json schema generate", partial(json_schema, ask=native_schema)
    yield "ebnf", partial(refused, ask=lambda client: client.chat(extra_body={"ebnf": 'root ::= "a"'}))
    form: Any = {"type": "structural_tag", "structures": [], "triggers": ["<f="]}
    yield "structural tag", partial(refused, ask=lambda client: client.chat(response_format=form))


def stop_cases() -> Iterator[tuple[str, Callable[[Client], None]]]:
    at_newline, at_end = {"logit_bias": {str(NEWLINE): 100}}, {"logit_bias": {str(END): 100}}
    for is_chat in (False, True):
        kind = "chat" if is_chat else "completion"
        for name, options, expected in (
            ("string", {"stop": "\n", **at_newline}, ("stop", "\n")),
            ("end token", at_end, ("stop", END)),
            ("length", {"max_tokens": 5}, ("length", None)),
        ):
            check = partial(matched_stop, is_chat=is_chat, options=options, expected=expected)
            yield f"stop {name} {kind}", check
        options = {"extra_body": {"stop_regex": "and|or"}}
        yield f"stop regex {kind}", partial(matched_stop, is_chat=is_chat, options=options, expected=("stop", "and|or"))
    yield "ignored end token", ignored_end


def native_cases() -> Iterator[tuple[str, Callable[[Client], None]]]:
    yield "decode", decode
    yield "decode batch", partial(decode, batch=True)
    yield "decode n", partial(decode, n=3)
    yield "decode n stream", partial(decode, n=3, stream=True)
    scored = {"return_logprob": True, "top_logprobs_num": 5, "return_text_in_logprobs": True}
    yield "decode log-probabilities", partial(decode, **scored)
    yield "decode log-probabilities stream", partial(decode, stream=True, **scored)
    yield "log-probabilities from a place on", logprob_start
    yield "log-probabilities of response and prompt", logprob_match
    for key, value in (("token_ids_logprob", [-1]), ("token_ids_logprob", [[0]]), ("custom_logit_processor", "x"),
                       ("return_hidden_states", True)):  # fmt: skip
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, key: value}
        yield f"{key} {value}", partial(refused, ask=partial(Client.generate, **body))


CASES = dict(cases())
REFUSED = {
    "ebnf": "ebnf",
    "structural tag": "response_format.type",
    "stop regex completion": "stop_regex",
    "stop regex chat": "stop_regex",
    "token_ids_logprob [-1]": "token_ids_logprob",
    "token_ids_logprob [[0]]": "token_ids_logprob",
    "custom_logit_processor x": "custom_logit_processor",
    "return_hidden_states True": "return_hidden_states",
}
"""Key that the refusal of a case names."""
REFUSED_BY_RECORD = {
    "regex chat": "regex",
    "json mode": "logit_bias",
    "structural tag": "response_format",
    "penalty": "frequency_penalty",
    "continuous usage": "stream_options.continuous_usage_stats",
    "stop string|stop end token|ignored end": "logit_bias",
    "return token ids": "return_token_ids",
}
"""The same where sessions are recorded, by a pattern of the names."""


@pytest.fixture(scope="module", params=["serve", "record"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]
) -> Iterator[tuple[str, Client]]:
    """Clients of a server, with the kind of the server."""
    folder: Path = tmp_path_factory.mktemp("cases") / "tiny"
    create_model(SHAPE | FAMILIES["llama"] | {"max_position_embeddings": CONTEXT}, folder, seed=7)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    recorder = None
    if request.param == "record":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        recorder = SessionRecorder(tokenizer, SamplingParams(max_tokens=CONTEXT), CONTEXT, write=lambda sample: None)
    with serving(folder, extension=recorder) as server, httpx.Client(base_url=server.url, timeout=60) as native:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="admin-key-of-the-tests", max_retries=0)
        yield request.param, Client(api, native)


def outcome(case: str, client: Client) -> str:
    """Return "passed", or the key that a refusal names. Raises AssertionError for another response."""
    try:
        CASES[case](client)
    except openai.BadRequestError as error:
        body = error.body if isinstance(error.body, dict) else {}
        return str(error.param or re.split("[: ]", str(body.get("message")))[0])
    return "passed"


def expected(case: str, kind: str) -> str:
    by_record = [key for pattern, key in REFUSED_BY_RECORD.items() if re.match(pattern, case)]
    return by_record[0] if kind == "record" and by_record else REFUSED.get(case, "passed")


@pytest.mark.parametrize("case", CASES)
def test_a_case_of_sglang_is_answered_or_refused_by_name(case: str, client: tuple[str, Client]) -> None:
    kind, asked = client
    assert outcome(case, asked) == expected(case, kind)
