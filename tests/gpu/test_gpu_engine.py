"""The embedded engine on a GPU answers as on a CPU, and has the weights of a policy that is on the GPU too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from policies.policy_cases import Clipped, new_policy, random_rows
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded import prefix_tree
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.weight_sync.base import InProcessSync
from slimectl.types import Completion, SamplingParams

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ModelDir = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [list(b"H"), list(b"2+3="), list(b"once upon a time there was"), [3] * 40, list(b"2+3="), list(b"2+3=")]
FLOAT32, BFLOAT16 = 1e-4, 0.4
"""Largest differences of log-probabilities from float32; in bfloat16 on a CPU they are 0.12 in these models."""


def new_engine(folder: Path, device: str, *, dtype: torch.dtype = torch.float32, load: bool = True) -> EmbeddedEngine:
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(config, tokenizer, EngineOptions(device=device, dtype=dtype, max_running=5))
    if load:
        engine.load_weights(HFCheckpoint().read(folder), version="0")
    return engine


def answers(engine: EmbeddedEngine, prompts: list[list[int]]) -> list[Completion]:
    """Greedy answers to all prompts at once."""

    async def gathered() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, params=GREEDY) for prompt in prompts))

    return asyncio.run(gathered())


def assert_same(on_gpu: list[Completion], on_cpu: list[Completion]) -> None:
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probs == pytest.approx(other.log_probs, abs=FLOAT32)


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen2", "qwen3", "qwen3_moe"])
def test_greedy_answers_and_log_probs_are_those_of_the_cpu(model_dir: ModelDir, family: str):
    on_gpu, on_cpu = (answers(new_engine(model_dir(family), device), PROMPTS) for device in (DEVICE, "cpu"))
    assert_same(on_gpu, on_cpu)


def test_conversations_that_go_on_from_the_prefix_cache_are_those_of_the_cpu(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefix_tree, "SHARED_BYTES", 4096)  # siblings read the beginning of their prompts in place
    engines = [new_engine(model_dir("qwen3"), device) for device in (DEVICE, "cpu")]
    first = list(range(40, 100))
    turns = [answers(engine, [first, first, [*first, 7]]) for engine in engines]
    assert_same(*turns)
    later = [first + turns[0][0].tokens + [8, 9, i] for i in range(3)]
    turns = [answers(engine, [*later, later[0]]) for engine in engines]
    assert_same(*turns)
    assert turns[0][0].cached_tokens == turns[1][0].cached_tokens > len(first)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_of_texts_are_near_those_of_the_cpu(
    model_dir: ModelDir, family: str, dtype: torch.dtype, tolerance: float
):
    texts = [list(b"once upon a time there was"), list(range(90)), list(b"12*9=108")]
    expected = new_engine(model_dir(family), "cpu").scores(texts, [0, 30, 4])
    scores = new_engine(model_dir(family), DEVICE, dtype=dtype).scores(texts, [0, 30, 4])
    for score, other in zip(scores, expected, strict=True):
        assert score.log_probs == pytest.approx(other.log_probs, abs=tolerance)


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    # Without experts in bfloat16, where a token near the border between two goes to another one.
    [
        ("qwen3", torch.float32, FLOAT32),
        ("qwen3_moe", torch.float32, FLOAT32),
        ("qwen3", torch.bfloat16, BFLOAT16),
    ],
)
def test_weights_that_are_pushed_in_process_are_the_policys(
    model_dir: ModelDir, family: str, dtype: torch.dtype, tolerance: float
):
    policy = new_policy(model_dir(family), device=DEVICE)
    engine = new_engine(model_dir(family), DEVICE, dtype=dtype, load=False)
    sync, rows = InProcessSync(policy, engine), random_rows()
    before = policy.log_probs(rows)
    for step in range(3):
        sync.push()
        assert engine.weight_version == policy.weight_version == str(step)
        scores = engine.scores([row.tokens for row in rows], [row.prompt_length - 1 for row in rows])
        for score, log_probs in zip(scores, policy.log_probs(rows), strict=True):
            assert score.log_probs == pytest.approx(log_probs, abs=tolerance)
        policy.forward_backward(random_rows(seed=step), Clipped())
        policy.optim_step()
    # So that an engine which had kept the first weights would have been found.
    assert policy.log_probs(rows)[0] != pytest.approx(before[0], abs=tolerance)
    assert {tensor.device.type for _, tensor in policy.weights()} == {DEVICE}
