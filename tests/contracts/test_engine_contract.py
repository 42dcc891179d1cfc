"""What every engine promises to the stages (protocols.Engine, protocols.WeightReceiver), whichever adapter keeps it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import serving
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.vllm.api import VllmApi
from slimectl.errors import SettingsError
from slimectl.settings.layers import Layer
from slimectl.settings.loading import resolve
from slimectl.types import Completion, JsonGrammar, SamplingParams

CONTEXT = 256
PROMPT = list(b"once upon a time")
IM_START = 257  # after 256 bytes and <|end|>
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

TRIES = 5
"""A small model writes 200 tokens in the time that a busy machine takes to pass a word on."""

ModelDir = Callable[..., Path]


def in_process(folder: Path, backend: str) -> Any:
    from slimectl.runtime.builders.engines import engine

    settings = resolve([Layer("file", {"engine": {"backend": backend}})]).settings
    return engine(settings, folder, AutoTokenizer.from_pretrained(folder), load=False)


@pytest.fixture(params=["embedded", "transformers", *serving.SERVERS])
def engine(request: pytest.FixtureRequest, model_dir: ModelDir) -> Any:
    """Each adapter with the weights of the small model; servers live as long as the session."""
    folder = model_dir()
    if request.param in ("embedded", "transformers"):
        made = in_process(folder, request.param)
    else:
        made = serving.client([request.getfixturevalue(request.param)], folder)
    made.load_weights(HFCheckpoint().read(folder), version="0")
    yield made
    asyncio.run(made.close())


@pytest.fixture
def tensors(model_dir: ModelDir) -> dict[str, torch.Tensor]:
    return dict(HFCheckpoint().read(model_dir()))


def answers(engine: Any, *requests: tuple[list[int], SamplingParams]) -> list[Completion]:
    """All requests in flight at once."""

    async def gathered() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(tokens, params=params) for tokens, params in requests))

    return asyncio.run(gathered())


def interrupted(engine: Any, by: Callable[[], Awaitable[None]], *, count: int = 1) -> list[Completion]:
    """`count` long requests, interrupted while they write; again where one was done, or had not begun."""

    async def scene() -> list[Completion]:
        under_way = [asyncio.create_task(engine.generate(PROMPT, params=LONG)) for _ in range(count)]
        # A short one that joins them and ends: by then the others have begun, unless it overtook one on its way.
        await engine.generate(PROMPT, params=dataclasses.replace(GREEDY, max_tokens=3))
        await by()
        return await asyncio.gather(*under_way)

    for _ in range(TRIES):
        found = asyncio.run(scene())
        if all(
            answer.tokens and (answer.finish_reason == "abort" or len(answer.weight_versions) > 1) for answer in found
        ):
            break
    return found


def test_many_in_flight_answer_as_each_would_alone_whatever_their_order(engine: Any):
    requests = [([65 + i, *PROMPT[: i % 7]], dataclasses.replace(GREEDY, max_tokens=1 + i % 9)) for i in range(24)]
    together = answers(engine, *requests)
    backwards = answers(engine, *reversed(requests))[::-1]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in backwards]
    assert [len(answer.tokens) for answer in together] == [1 + i % 9 for i in range(24)]
    for i in (0, 17, 23):
        assert answers(engine, requests[i])[0].tokens == together[i].tokens


def test_a_short_request_does_not_wait_for_a_long_one(engine: Any):
    async def order() -> list[str]:
        ended: list[str] = []

        async def ask(name: str, params: SamplingParams) -> None:
            await engine.generate(PROMPT, params=params)
            ended.append(name)

        await asyncio.gather(ask("long", LONG), ask("short", dataclasses.replace(GREEDY, max_tokens=2)))
        return ended

    # The long request is sent first: an engine that answers one after the other fails every time, one on a busy machine
    # only where the short request arrives after the long answer.
    assert any(asyncio.run(order()) == ["short", "long"] for _ in range(5))


def test_a_log_probability_for_every_token_tempered_and_not_renormalised(engine: Any, model_dir: ModelDir):
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.9, max_tokens=20, ignore_eos=True, seed=5)
    answer = answers(engine, (PROMPT, params))[0]
    assert len(answer.tokens) == len(answer.log_probs) == 20
    reference = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1)[torch.arange(20), answer.tokens]
    assert answer.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "temperature": 0.0},
    {"frequency_penalty": -0.4, "presence_penalty": 1.9, "repetition_penalty": 0.6, "temperature": 1.3},
    {"logit_bias": ((66, 9.0), (67, -100.0), (68, 9.5))},
    {"logit_bias": ((66, 7.0),), "repetition_penalty": 1.9, "temperature": 0.0},
]


def adjusted_log_probs(logits: torch.Tensor, tokens: list[int], params: SamplingParams) -> torch.Tensor:
    """What a penalised answer's distribution is at each of its tokens, worked out token by token."""
    rows = []
    for position, row in enumerate(logits):
        for token in set(tokens[:position]):
            value = row[token] - params.presence_penalty - params.frequency_penalty * tokens[:position].count(token)
            factor = params.repetition_penalty
            row[token] = value * factor if value < 0 else value / factor
        for token, bias in params.logit_bias:
            row[token] += bias
        rows.append((row / (params.temperature or 1.0)).log_softmax(-1))
    return torch.stack(rows)


def test_penalties_and_biases_change_the_answer_and_its_log_probabilities_alike(engine: Any, model_dir: ModelDir):
    if getattr(engine, "api", None) == VllmApi():  # which counts the prompt's tokens as repeated, too
        pytest.skip("vLLM has its own definition of the repetition penalty")
    chosen = [SamplingParams(max_tokens=20, ignore_eos=True, seed=5, **each) for each in PENALTIES]
    reference = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    for params, answer in zip(chosen, answers(engine, *((PROMPT, params) for params in chosen)), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1]
        expected = adjusted_log_probs(logits, answer.tokens, params)
        sampled = expected[torch.arange(20), answer.tokens]
        assert answer.log_probs == pytest.approx(sampled.tolist(), abs=1e-4), params
        if not params.temperature:
            assert answer.tokens == expected.argmax(-1).tolist()
    free = answers(engine, (PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, seed=5)))[0]
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + free.tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert free.log_probs == pytest.approx(
        adjusted_log_probs(logits, free.tokens, SamplingParams())[torch.arange(20), free.tokens].tolist(), abs=1e-4
    )  # its neighbours' penalties are not its own


def test_a_schema_is_kept_with_the_log_probabilities_of_the_policy_or_refused(engine: Any, model_dir: ModelDir):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    params = dataclasses.replace(GREEDY, max_tokens=60, ignore_eos=False, grammar=JsonGrammar(json.dumps(schema)))
    if hasattr(engine, "api"):  # of a server
        with pytest.raises(SettingsError, match=r"a grammar requires engine\.backend = embedded"):
            answers(engine, (PROMPT, params))
        return
    [answer] = answers(engine, (PROMPT, params))
    assert json.loads(answer.text)["a"] in ("x", "yy")
    reference = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(answer.tokens)), answer.tokens]
    assert answer.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_seed_draws_the_same_answer_again_and_another_seed_another(engine: Any):
    seeded = [(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, seed=seed)) for seed in (1, 2, 1, 3)]
    one, two, again, three = (answer.tokens for answer in answers(engine, *seeded))
    assert one == again == answers(engine, seeded[0])[0].tokens
    assert len({tuple(tokens) for tokens in (one, two, three)}) == 3


def test_finish_says_length_at_max_tokens_and_at_the_end_of_the_context(engine: Any):
    near_the_end = [66] * (CONTEXT - 5)
    cut, full = answers(engine, (PROMPT, GREEDY), (near_the_end, GREEDY))
    assert (len(cut.tokens), cut.finish_reason) == (12, "length")
    assert (len(full.tokens), full.finish_reason) == (5, "length")


def test_finish_says_stop_at_a_stop_token_which_belongs_to_the_answer(engine: Any):
    whole = answers(engine, (PROMPT, GREEDY))[0].tokens
    wanted = whole[4]
    answer = answers(engine, (PROMPT, dataclasses.replace(GREEDY, stop_token_ids=(wanted,))))[0]
    assert (answer.tokens, answer.finish_reason) == (whole[: whole.index(wanted) + 1], "stop")
    assert len(answer.log_probs) == len(answer.tokens)


def test_a_stop_string_is_cut_from_the_text_and_not_from_the_tokens(engine: Any):
    letters = [(PROMPT, SamplingParams(max_tokens=150, temperature=2.0, stop=("e",), seed=i)) for i in range(12)]
    stopped = [a for a in answers(engine, *letters) if a.finish_reason == "stop" and a.tokens[-1] == ord("e")]
    assert stopped
    assert all("e" not in answer.text for answer in stopped)


@pytest.mark.parametrize("skips", [True, False])
def test_a_stop_string_that_is_one_special_token_ends_the_answer(engine: Any, skips: bool):
    favored = dataclasses.replace(GREEDY, logit_bias=((IM_START, 100.0),), skip_special_tokens=skips)
    stopped = dataclasses.replace(favored, stop=("never", "<|im_start|>"))
    free, answer = answers(engine, (PROMPT, favored), (PROMPT, stopped))
    assert free.tokens == [IM_START] * 12
    assert (answer.tokens, answer.text, answer.finish_reason) == ([IM_START], "", "stop")


def test_abort_returns_what_each_has_and_the_engine_lives_on(engine: Any):
    whole = answers(engine, (PROMPT, LONG))[0].tokens
    parts = interrupted(engine, engine.abort, count=3)
    for part in parts:
        assert part.finish_reason == "abort"
        assert 0 < len(part.tokens) == len(part.log_probs) < 200
        assert part.tokens == whole[: len(part.tokens)]
    assert answers(engine, (PROMPT, GREEDY))[0].tokens == whole[:12]


@pytest.mark.slow
@pytest.mark.parametrize("url", serving.SERVERS)
def test_an_abort_leaves_the_requests_of_other_clients_alone(
    url: str, model_dir: ModelDir, request: pytest.FixtureRequest
):
    folder, address = model_dir(), request.getfixturevalue(url)
    first, second = (serving.client([address], folder, shared=True) for _ in range(2))
    first.load_weights(HFCheckpoint().read(folder), version="0")
    short = dataclasses.replace(GREEDY, max_tokens=3)

    async def scene() -> list[list[Completion]]:
        asked = [
            [asyncio.create_task(client.generate(PROMPT, params=LONG)) for _ in range(2)] for client in (first, second)
        ]
        await asyncio.gather(*(client.generate(PROMPT, params=short) for client in (first, second)))
        await first.abort()
        return [await asyncio.gather(*tasks) for tasks in asked]

    try:
        whole = answers(first, (PROMPT, LONG))[0].tokens
        for _ in range(TRIES):
            own, others = asyncio.run(scene())
            assert [answer.tokens for answer in others] == [whole, whole]
            if all(answer.finish_reason == "abort" for answer in own):
                break
        assert [answer.finish_reason for answer in own] == ["abort", "abort"]
        assert all(answer.tokens == whole[: len(answer.tokens)] for answer in own)
    finally:
        asyncio.run(first.close())
        asyncio.run(second.close())


def test_close_ends_what_is_in_flight(engine: Any):
    assert [answer.finish_reason for answer in interrupted(engine, engine.close, count=2)] == ["abort", "abort"]


def test_an_answer_names_the_versions_of_the_weights_that_wrote_it(engine: Any, tensors: dict[str, torch.Tensor]):
    assert answers(engine, (PROMPT, GREEDY))[0].weight_versions == ["0"]

    versions = itertools.count(1)

    async def push() -> None:
        await asyncio.to_thread(engine.load_weights, list(tensors.items()), version=str(next(versions)))

    before, after = map(int, interrupted(engine, push)[0].weight_versions)
    assert after == before + 1
    assert answers(engine, (PROMPT, GREEDY))[0].weight_versions == [str(after)]


def test_an_answer_tells_when_the_engine_worked_on_it(engine: Any):
    started = time.perf_counter()
    (completion,) = answers(engine, (PROMPT, GREEDY))
    assert completion.times is not None
    admitted, first_token, number = completion.times
    assert started <= admitted <= first_token <= time.perf_counter()
    assert number == 0


def test_new_weights_write_other_answers_and_the_old_ones_the_old(engine: Any, tensors: dict[str, torch.Tensor]):
    old = answers(engine, (PROMPT, GREEDY))[0]
    generator = torch.Generator().manual_seed(3)
    changed = {name: t + 0.3 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    engine.load_weights(changed.items(), version="1")
    assert answers(engine, (PROMPT, GREEDY))[0].tokens != old.tokens
    engine.load_weights(tensors.items(), version="2")
    assert answers(engine, (PROMPT, GREEDY))[0].log_probs == old.log_probs


def test_a_prompt_that_leaves_no_room_is_refused_and_costs_the_others_nothing(engine: Any):
    async def both() -> list[Any]:
        asked = (engine.generate(tokens, params=GREEDY) for tokens in ([66] * CONTEXT, PROMPT))
        return await asyncio.gather(*asked, return_exceptions=True)

    refused, answer = asyncio.run(both())
    assert isinstance(refused, SettingsError)
    assert "256" in str(refused)
    assert len(answer.tokens) == 12


NO_NUMBER = float("nan")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": (151645,), "min_tokens": 2}, "stop_token_ids: token 151645 is outside the vocabulary of 259"),
    ({"stop_token_ids": (66, -1)}, "stop_token_ids: token -1 is outside"),
    ({"logit_bias": ((999, 1.0),)}, "logit_bias: token 999 is outside"),
    ({"logit_bias": ((66, NO_NUMBER),)}, "logit_bias: nan is not a number"),
    ({"temperature": NO_NUMBER}, "temperature: nan is not a number"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty: inf is not a number"),
    ({"min_tokens": 2**63}, "min_tokens: 9223372036854775808 is not a number below"),
    ({"top_p": 0.0}, "top_p: 0.0 is not above 0"),
]


@pytest.mark.parametrize(("params", "reason"), REFUSED, ids=[reason.partition(":")[0] for _, reason in REFUSED])
def test_parameters_that_no_engine_can_follow_are_refused_by_name_and_cost_the_others_nothing(
    engine: Any, params: dict[str, Any], reason: str
):
    async def together() -> list[Any]:
        asked = (dataclasses.replace(GREEDY, **params), GREEDY)
        return await asyncio.gather(*(engine.generate(PROMPT, params=each) for each in asked), return_exceptions=True)

    refused, answer = asyncio.run(together())
    assert isinstance(refused, SettingsError)
    assert str(refused).startswith(reason)
    assert len(answer.tokens) == 12


def posted(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {serving.KEYS.admin_api_key}"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["meta_info"]


def test_the_likeliest_tokens_in_place_of_each_token_are_recorded_if_asked_for(engine: Any, model_dir: ModelDir):
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, temperature=0.7, top_log_probs=4)
    (answer,) = answers(engine, (PROMPT, params))
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    logits_TV = model(torch.tensor([[*PROMPT, *answer.tokens]])).logits[0][len(PROMPT) - 1 : -1]
    assert len(answer.top_log_probs) == 6
    for log_p_V, top in zip((logits_TV / 0.7).log_softmax(-1), answer.top_log_probs, strict=True):
        assert [value for _, value in top] == pytest.approx(log_p_V.topk(4).values.tolist(), abs=1e-4)
        assert [log_p_V[token].item() for token, _ in top] == pytest.approx([value for _, value in top], abs=1e-4)


@pytest.mark.slow
@pytest.mark.sglang
def test_the_likeliest_tokens_of_prompt_and_answer_are_those_that_sglang_lists(
    served: str, sglang: str, model_dir: ModelDir
):
    for url in (served, sglang):
        engine = serving.client([url], model_dir())
        engine.load_weights(HFCheckpoint().read(model_dir()), version="0")
        asyncio.run(engine.close())
    body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 12}
    body["sampling_params"] = {
        "temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "presence_penalty": 1.5, "logit_bias": {"65": 3.0},
    }  # fmt: skip
    ours, theirs = posted(served, body), posted(sglang, body)
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [token for _, token, _ in ours[name]] == [token for _, token, _ in theirs[name]], name
        for (mine, *_), (real, *_) in zip(ours[name], theirs[name], strict=True):
            assert mine == (real if real is None else pytest.approx(real, abs=1e-4))
    for name in ("input_top_logprobs", "output_top_logprobs"):
        for mine, real in zip(ours[name], theirs[name], strict=True):
            assert (mine is None) == (real is None)
            for (value, token, _), (other, same, _) in zip(mine or [], real or [], strict=True):
                assert (token, value) == (same, pytest.approx(other, abs=1e-4))
