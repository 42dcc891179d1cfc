"""The embedded engine reports the experts of every token that it read, those that transformers' routers choose."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.routed_experts import decoded
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.types import Completion, SamplingParams

Make = Callable[..., EmbeddedEngine]
Ask = Callable[..., list[Completion]]
ModelDir = Callable[[str], Path]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=4)
PROMPT = list(b"once upon a time there was a mixture")


@pytest.fixture(scope="module")
def chosen(model_dir: ModelDir) -> Callable[[list[int]], np.ndarray]:
    """`chosen(tokens)` [tokens, 2 layers, 2] are the experts of transformers, sorted; its first layer is dense."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir("qwen3_moe"), dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, inputs, output: seen.append(output[2]))

    def experts(tokens: list[int]) -> np.ndarray:
        seen.clear()
        with torch.no_grad():
            model(torch.tensor([tokens]))
        return np.sort(torch.stack((torch.zeros_like(seen[0]), seen[0]), 1).numpy())

    return experts


def reported(answer: Completion) -> np.ndarray:
    return np.sort(decoded(answer.extras["routed_experts"]))


def test_all_that_was_read_has_experts_in_every_layer(
    make_engine: Make, answers: Ask, chosen: Callable[[list[int]], np.ndarray]
):
    engine = make_engine("qwen3_moe", reports_experts=True, max_running=3)
    requests = [(PROMPT[:length], dataclasses.replace(PARAMS, seed=length)) for length in (1, 9, 9, 20, 36, 36)]
    for (prompt, _), answer in zip(requests, answers(engine, *requests), strict=True):
        assert reported(answer).shape == (len(prompt) + 23, 2, 2)
        np.testing.assert_array_equal(reported(answer), chosen([*prompt, *answer.tokens[:-1]]))


def test_what_the_prefix_cache_had_keeps_its_experts(
    make_engine: Make, answers: Ask, chosen: Callable[[list[int]], np.ndarray]
):
    engine = make_engine("qwen3_moe", reports_experts=True)
    [first] = answers(engine, (PROMPT, PARAMS))
    longer = [*PROMPT, *first.tokens, *PROMPT]
    forked = [*PROMPT[:30], *PROMPT[:30]]
    second, third = answers(engine, (longer, PARAMS), (forked, PARAMS))
    assert (second.cached_tokens, third.cached_tokens) == (len(PROMPT) + 23, 30)
    for prompt, answer in ((longer, second), (forked, third)):
        np.testing.assert_array_equal(reported(answer), chosen([*prompt, *answer.tokens[:-1]]))


def test_a_sequence_that_is_computed_again_keeps_the_experts_that_its_log_probs_were_taken_with(
    make_engine: Make, answers: Ask, model_dir: ModelDir
):
    """The weights change in the middle of an answer: each token was routed by those that first read it."""
    engine = make_engine("qwen3_moe", reports_experts=True)
    weights = dict(HFCheckpoint().read(model_dir("qwen3_moe")))
    router = "model.layers.1.mlp.gate.weight"

    async def interrupted() -> tuple[Completion, Completion]:
        sequence = engine.request(PROMPT, PARAMS)
        engine.submit(sequence)
        while len(sequence.tokens) < 5:
            await asyncio.sleep(0)
        engine.pause("test", retract=True)
        read = len(PROMPT) + len(sequence.tokens) - 1
        engine.update_weights([(router, -weights[router])], version="1")
        engine.resume("test")
        answer = await sequence.future
        again = await engine.generate([*PROMPT, *answer.tokens[:-1]], params=dataclasses.replace(PARAMS, max_tokens=1))
        np.testing.assert_array_equal(reported(answer)[read:], reported(again)[read:])
        assert (reported(answer)[:read] != reported(again)[:read]).any()
        return answer, again

    answer, again = asyncio.run(interrupted())
    assert reported(answer).shape == reported(again).shape == (len(PROMPT) + 23, 2, 2)
    [first] = answers(make_engine("qwen3_moe", reports_experts=True), (PROMPT, PARAMS))
    np.testing.assert_array_equal(reported(answer)[: len(PROMPT)], reported(first)[: len(PROMPT)])


def test_nothing_is_reported_unasked_nor_of_a_dense_model(make_engine: Make, answers: Ask):
    for engine in (make_engine("qwen3_moe"), make_engine("qwen3", reports_experts=True)):
        assert answers(engine, (PROMPT, PARAMS))[0].extras == {}
