"""POST /generate: the same tokens as without a server, whole and in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slimectl import Prompt, Sample, Sampler, load_settings
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.server.state import Streaming
from slimectl.types import Completion, SamplingParams

PROMPT = list(b"once upon a time")
LONG = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}


def expected(engine: EmbeddedEngine, params: SamplingParams, prompt: list[int] = PROMPT) -> Completion:
    return asyncio.run(engine.generate(prompt, params=params))


def test_greedy_and_seeded_answers_are_those_of_the_engine_in_process(server: Any, in_process: EmbeddedEngine) -> None:
    for params, asked in (
        (SamplingParams(temperature=0.0, max_tokens=30), {"temperature": 0, "max_new_tokens": 30}),
        (
            SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, max_tokens=30, seed=11),
            {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "max_new_tokens": 30, "sampling_seed": 11},
        ),
    ):
        body = {"input_ids": PROMPT, "sampling_params": asked, "return_logprob": True}
        answer, wanted = server.good("/generate", body), expected(in_process, params)
        meta = answer["meta_info"]
        assert answer["output_ids"] == wanted.tokens
        assert answer["text"] == wanted.text
        # To the last digit: a float survives its way through JSON.
        assert meta["output_token_logprobs"] == [
            [p, t, None] for p, t in zip(wanted.log_probs, wanted.tokens, strict=True)
        ]
        assert meta["finish_reason"]["type"] == wanted.finish_reason
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(wanted.tokens))
        assert (meta["weight_version"], meta["cached_tokens"]) == ("0", 0)
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(wanted.tokens)}]


def test_a_later_turn_is_told_what_the_prefix_cache_had_of_it(server: Any) -> None:
    params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    first = server.good("/generate", {"input_ids": PROMPT * 4, "sampling_params": params})
    turn = PROMPT * 4 + first["output_ids"] + PROMPT

    def cached() -> tuple[int, int]:
        meta = server.good("/generate", {"input_ids": turn, "sampling_params": params})["meta_info"]
        answer = server.good("/v1/completions", {"model": "m", "prompt": turn, "max_tokens": 1})
        return meta["cached_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == (len(PROMPT) * 4, len(turn) - 1)
    server.good("/flush_cache", {})
    assert cached() == (0, len(turn) - 1)
    server.good("/flush_cache", {})
    assert server.good("/v1/loads")["loads"][0]["prefix_cache_bytes"] == 0


def test_text_is_tokenised_and_may_come_back_with_the_log_probs(server: Any, in_process: EmbeddedEngine) -> None:
    body = {"text": "once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    answer = server.good("/generate", body | {"return_logprob": True, "return_text_in_logprobs": True})
    wanted = expected(in_process, SamplingParams(temperature=0.0, max_tokens=5))
    assert answer["output_ids"] == wanted.tokens
    assert all(isinstance(text, str) for _, _, text in answer["meta_info"]["output_token_logprobs"])


def test_batches_and_n_come_in_order_each_with_its_own_id(server: Any, in_process: EmbeddedEngine) -> None:
    prompts = [PROMPT, list(b"2+3=")]
    params = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 5, "n": 3}
    answers = server.good("/generate", {"rid": "b", "input_ids": prompts, "sampling_params": params})
    wanted = [
        expected(in_process, SamplingParams(max_tokens=6, ignore_eos=True, seed=5 + i), prompt).tokens
        for prompt in prompts
        for i in range(3)
    ]
    assert [answer["output_ids"] for answer in answers] == wanted
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0_0", "b_0_1", "b_0_2", "b_1_0", "b_1_1", "b_1_2"]
    assert [answer["index"] for answer in answers] == list(range(6))
    single = server.good("/generate", {"input_ids": [PROMPT], "sampling_params": [{"max_new_tokens": 1}], "rid": ["x"]})
    assert [answer["meta_info"]["id"] for answer in single] == ["x"]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_adds_up_to_the_whole(incremental: bool, server: Any, events: Callable[..., Any]) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "incremental_streaming_output": incremental}
    body["sampling_params"] = {
        "temperature": 1.2,
        "max_new_tokens": 120,
        "ignore_eos": True,
        "sampling_seed": 3,
        "n": 2,
    }
    whole = server.good("/generate", body)

    async def streamed(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return [event async for event in events(session, "/generate", body)]

    chunks = server.run(streamed)
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert len(own) > 1  # how many steps come in one part is up to the machine
        assert [chunk["meta_info"]["finish_reason"] is None for chunk in own] == [True] * (len(own) - 1) + [False]
        if not incremental:
            for earlier, later in pairwise(own):
                assert later["text"].startswith(earlier["text"])
                assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
            own = own[-1:]
        assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
        assert [token for chunk in own for token in chunk["output_ids"]] == whole[index]["output_ids"]
        triples = [triple for chunk in own for triple in chunk["meta_info"]["output_token_logprobs"]]
        drawn = whole[index]["meta_info"]["output_token_logprobs"]
        assert [triple[0] for triple in triples] == pytest.approx([triple[0] for triple in drawn], abs=1e-5)
        assert own[-1]["meta_info"]["completion_tokens"] == 120


@pytest.mark.parametrize("by", ["request", "server"])
def test_fewer_chunks_are_sent_if_fewer_are_asked_for(by: str, server: Any, events: Callable[..., Any]) -> None:
    params = {"max_new_tokens": 45, "ignore_eos": True} | ({"stream_interval": 10} if by == "request" else {})

    async def streamed(session: aiohttp.ClientSession) -> list[int]:
        body = {"input_ids": PROMPT, "sampling_params": params}
        return [event["meta_info"]["completion_tokens"] async for event in events(session, "/generate", body)]

    server.service.streaming = Streaming(interval=10 if by == "server" else 1)
    counts = server.run(streamed)
    server.service.streaming = Streaming()
    assert counts[-1] == 45
    assert all(later - earlier >= 10 for earlier, later in pairwise([0, *counts[:-1]]))


def test_stop_strings_and_stop_tokens_are_named_and_strings_are_cut(server: Any, events: Callable[..., Any]) -> None:
    params = {"temperature": 5.0, "max_new_tokens": 200, "stop": ["e", "zz"], "sampling_seed": 1}
    for seed in range(20):
        params["sampling_seed"] = seed
        body = {"input_ids": PROMPT, "sampling_params": params}
        answer = server.good("/generate", body)
        if answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "e"}:
            break
    assert answer["output_ids"][-1] == ord("e")
    assert not answer["text"].endswith("e")
    kept = server.good("/generate", {"input_ids": PROMPT, "sampling_params": params | {"no_stop_trim": True}})
    assert kept["text"] == answer["text"] + "e"

    async def streamed(session: aiohttp.ClientSession) -> list[str]:
        return [event["text"] async for event in events(session, "/generate", body)]

    # What was sent is never taken back.
    assert all(answer["text"].startswith(text) for text in server.run(streamed))
    token = answer["output_ids"][0]
    params = params | {"stop_token_ids": [token], "stop": None}
    by_token = server.good("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert by_token["output_ids"] == [token]


def test_special_tokens_leave_text_only_if_asked(server: Any) -> None:
    for seed in range(40):
        params = {"temperature": 3.0, "max_new_tokens": 200, "sampling_seed": seed}
        answer = server.good("/generate", {"input_ids": PROMPT, "sampling_params": params})
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            break
    shown = server.good("/generate", {"input_ids": PROMPT, "sampling_params": params | {"skip_special_tokens": False}})
    assert "<|end|>" not in answer["text"]
    assert shown["text"].endswith("<|end|>")


def test_abort_ends_one_by_its_id_or_all_and_each_returns_what_it_has(
    server: Any, ask: Callable[..., Any], events: Callable[..., Any]
) -> None:
    async def scene(session: aiohttp.ClientSession) -> list[Any]:
        def body(rid: str) -> dict[str, Any]:
            return {"input_ids": PROMPT, "sampling_params": LONG, "rid": rid, "return_logprob": True}

        whole = asyncio.create_task(ask(session, "/generate", body("whole")))
        others = [asyncio.create_task(ask(session, "/generate", body(f"other-{i}"))) for i in range(2)]
        stream = events(session, "/generate", body("streamed"))
        while (await anext(stream))["meta_info"]["completion_tokens"] < 5 or server.engine.running < 4:
            pass
        await ask(session, "/pause_generation", {"mode": "in_place"})  # nothing else ends meanwhile
        await ask(session, "/abort_request", {"rid": "streamed"})
        last = [event async for event in stream][-1]
        assert not whole.done()
        await ask(session, "/abort_request", {"abort_all": True})
        answers = [last, (await whole)[1], *[(await other)[1] for other in others]]
        await ask(session, "/continue_generation", {})
        return answers

    for answer in server.run(scene):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < meta["completion_tokens"] < 200
        assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert server.good("/v1/loads")["loads"][0]["num_total_reqs"] == 0


def test_an_id_can_be_in_flight_once(server: Any, ask: Callable[..., Any]) -> None:
    async def scene(session: aiohttp.ClientSession) -> Any:
        body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": "twin"}
        first = asyncio.create_task(ask(session, "/generate", body))
        while not server.engine.running:
            await asyncio.sleep(0.001)
        refused = await ask(session, "/generate", body)
        await ask(session, "/abort_request", {"rid": "twin"})
        await first
        return refused, await ask(session, "/generate", body | {"sampling_params": {"max_new_tokens": 1}})

    (status, refused), (again, _) = server.run(scene)
    assert (status, again) == (400, 200)
    assert "'twin' is already in flight" in refused["error"]["message"]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_rests_and_then_goes_on_or_ends(
    mode: str, server: Any, in_process: EmbeddedEngine, ask: Callable[..., Any]
) -> None:
    wanted = expected(in_process, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)).tokens

    async def scene(session: aiohttp.ClientSession) -> tuple[Any, Any]:
        steps = server.engine.stats.steps
        first = asyncio.create_task(ask(session, "/generate", {"input_ids": PROMPT, "sampling_params": LONG}))
        while server.engine.stats.steps < steps + 10:
            await asyncio.sleep(0.001)
        await ask(session, "/pause_generation", {"mode": mode})
        rested = server.engine.stats.steps
        # Whoever comes now waits, and health is still told.
        late = asyncio.create_task(
            ask(session, "/generate", {"input_ids": PROMPT, "sampling_params": LONG | {"max_new_tokens": 3}})
        )
        await asyncio.sleep(0.05)
        assert (await ask(session, "/health"))[0] == 200
        assert server.engine.stats.steps == rested
        assert not late.done()
        await ask(session, "/continue_generation", {})
        return (await first)[1], (await late)[1]

    first, late = server.run(scene)
    assert late["output_ids"] == wanted[:3]
    assert first["output_ids"] == wanted[: len(first["output_ids"])]
    if mode == "abort":
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(first["output_ids"]) < 200
    else:
        assert len(first["output_ids"]) == 200


def test_memory_given_back_is_taken_again_and_answers_go_on(
    server: Any, in_process: EmbeddedEngine, ask: Callable[..., Any]
) -> None:
    wanted = expected(in_process, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)).tokens

    async def scene(session: aiohttp.ClientSession) -> Any:
        steps = server.engine.stats.steps
        first = asyncio.create_task(ask(session, "/generate", {"input_ids": PROMPT, "sampling_params": LONG}))
        while server.engine.stats.steps < steps + 10:
            await asyncio.sleep(0.001)
        await ask(session, "/release_memory_occupation", {})
        assert server.engine._runner._cache.tokens == 0
        await ask(session, "/resume_memory_occupation", {})
        return (await first)[1]

    assert server.run(scene)["output_ids"] == wanted


def test_a_prompt_is_judged_from_any_token_on_as_it_would_have_been_written(server: Any) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 1, "max_new_tokens": 20, "sampling_seed": 4}}
    written = server.good("/generate", body | {"return_logprob": True})
    whole = PROMPT + written["output_ids"]
    nothing = {"temperature": 1, "max_new_tokens": 0}
    ask = {"input_ids": [whole, PROMPT], "logprob_start_len": [len(PROMPT) - 1, 0], "return_logprob": True}
    judged, other = server.good("/generate", ask | {"sampling_params": nothing})
    first, *rest = judged["meta_info"]["input_token_logprobs"]
    assert first == [None, PROMPT[-1], None]
    assert [token for _, token, _ in rest] == written["output_ids"]
    output = [log_prob for log_prob, _, _ in written["meta_info"]["output_token_logprobs"]]
    assert [log_prob for log_prob, _, _ in rest] == pytest.approx(output, abs=1e-5)
    assert (judged["text"], judged["output_ids"], judged["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert judged["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(other["meta_info"]["input_token_logprobs"]) == len(PROMPT)


def test_a_prompt_is_judged_beside_its_answers_and_passes_do_not_show(server: Any, monkeypatch: Any) -> None:
    prompts = [list(b"once upon"), list(b"a"), list(b"a time, long ago")]
    ask = {"input_ids": prompts, "logprob_start_len": 0, "return_logprob": True, "return_text_in_logprobs": True}
    params = {"max_new_tokens": 2, "ignore_eos": True, "n": 2}
    together = server.good("/generate", ask | {"sampling_params": params})
    monkeypatch.setattr("slimectl.engines.server.log_probs.TOGETHER", 8)
    apart = server.good("/generate", ask | {"sampling_params": params})
    for one, other, prompt in zip(together, apart, [each for each in prompts for _ in range(2)], strict=True):
        given, again = (answer["meta_info"]["input_token_logprobs"] for answer in (one, other))
        assert [text for _, _, text in given] == [chr(token) for token in prompt]
        assert [p for p, _, _ in given[1:]] == pytest.approx([p for p, _, _ in again[1:]], abs=1e-5)
        assert len(one["output_ids"]) == 2


@pytest.mark.parametrize("start", [-2, 16, "0", True, [0, 0]])
def test_a_start_outside_the_prompt_is_refused(start: Any, server: Any) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": start}
    status, answer = server.ask("/generate", body)
    assert status == 400
    assert answer["error"]["param"] == "logprob_start_len"


FUNCTIONS = Path(__file__).parents[2] / "hooks" / "slime_functions.py"


def test_a_generate_function_of_slimes_style_asks_the_address_that_its_args_name(
    server: Any, model_dir: Callable[[str], Path]
) -> None:
    values = {
        "engine.url": [server.url],
        "model.path": str(model_dir("llama")),
        "rollout.n_samples_per_prompt": 2,
        "rollout.max_response_len": 3,
        "rollout.custom_generate_function_path": f"{FUNCTIONS}:generate",
        "custom.max_turns": 2,
    }
    with Sampler(load_settings(values=values)) as sampler:
        samples = list(sampler.rollout([Prompt(text="say one", label={"any": ["one", "two"]})]))
    assert [(sample.tool_call_count, sample.extra) for sample in samples] == [(1, {"tool_call_count": 1})] * 2
    for sample in samples:
        answers = [bit for bit, _ in groupby(sample.loss_mask)]
        assert answers == [1, 0, 1]
        assert " tool: 42 " in sample.response
        assert sample.label == {"any": ["one", "two"]}
        assert sample.weight_versions == ["0", "0"]
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
