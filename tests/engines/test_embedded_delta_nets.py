"""Models with gated delta nets in the embedded engine: their numbers, and the states that it keeps of sequences."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies.policy_cases import Clipped, random_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.routed_experts import decoded
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.embedded.prefix_tree import MIN_TOKENS, PrefixTree
from slimectl.engines.embedded.states import State
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.types import Completion, SamplingParams, TrainingSample

Ask = Callable[..., list[Completion]]
Build = Callable[..., tuple[EmbeddedEngine, Any]]
PROMPT = list(range(40, 110))  # more than a chunk
FREE = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def build(model_dir: Callable[[str], Path]) -> Build:
    """`build("qwen3_5", max_running=3)` is an engine and transformers' model, with norms that are not 1."""
    references: dict[str, Any] = {}

    def make(family: str = "qwen3_5", **options: Any) -> tuple[EmbeddedEngine, Any]:
        folder = model_dir(family)
        if family not in references:
            torch.manual_seed(3)
            model = references[family] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.data += 0.3 * torch.randn_like(parameter)
        norms = {name: value for name, value in references[family].state_dict().items() if "norm" in name}
        tensors = dict(HFCheckpoint().read(folder)) | norms
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        engine = EmbeddedEngine(config, tokenizer, EngineOptions(**options))
        engine.load_weights(tensors.items(), version="0")
        return engine, references[family]

    return make


def assert_reference(model: Any, prompt: list[int], answer: Completion) -> None:
    """The log-probabilities are those of transformers' plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(answer.tokens)), answer.tokens]
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "compile_kernels"),
    [("qwen3_next", True), ("qwen3_5", True), ("qwen3_5", False), ("qwen3_5_moe", True), ("qwen2_moe", True)],
)
def test_sampled_log_probs_and_experts_are_those_of_transformers(
    family: str, compile_kernels: bool, build: Build, answers: Ask
) -> None:
    """Siblings and prompts of all lengths take three slots one after another, so that sequences move between slots."""
    engine, model = build(family, compile_kernels=compile_kernels, max_running=3, reports_experts=True)
    prompts = [PROMPT, [65], PROMPT, list(b"2+3="), list(b"2+3="), PROMPT[:64], list(range(150))]
    requests = [
        (prompt, dataclasses.replace(FREE, seed=i, max_tokens=(12, 3, 20)[i % 3])) for i, prompt in enumerate(prompts)
    ]
    made = answers(engine, *requests)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
        for layer in model.model.layers
        if family.endswith(("moe", "next"))
    ]
    for prompt, answer in zip(prompts, made, strict=True):
        chosen.clear()
        assert_reference(model, prompt, answer)
        if chosen:
            expected = np.sort(torch.stack(chosen, 1)[:-1].numpy())
            np.testing.assert_array_equal(np.sort(decoded(answer.extras["routed_experts"])), expected)
    for hook in hooks:
        hook.remove()
    scores = engine.scores([p + a.tokens for p, a in zip(prompts, made, strict=True)], [len(p) - 1 for p in prompts])
    for score, answer in zip(scores, made, strict=True):
        torch.testing.assert_close(torch.tensor(score.log_probs), torch.tensor(answer.log_probs), atol=2e-5, rtol=0)


def test_turns_go_on_from_kept_states_and_so_do_forks_from_the_second_time_on(build: Build, answers: Ask) -> None:
    engine, model = build()

    def asked(prompt: list[int], *, cached: int) -> Completion:
        before = engine.stats.prefill_tokens
        [answer] = answers(engine, (prompt, FREE))
        assert_reference(model, prompt, answer)
        assert answer.cached_tokens == cached
        assert engine.stats.prefill_tokens - before == len(prompt) - cached
        return answer

    first = asked(PROMPT, cached=0)
    second_prompt = PROMPT + first.tokens + PROMPT[:20]
    second = asked(second_prompt, cached=len(PROMPT) + 19)  # all but the last token, which was sampled and not read
    asked([*second_prompt, *second.tokens, 7], cached=len(second_prompt) + 19)
    asked(PROMPT + PROMPT[:5], cached=len(PROMPT))  # the state after the first prompt
    asked([*PROMPT, *first.tokens[:10], 9, 9], cached=len(PROMPT))  # ten tokens are not worth a state
    asked([*PROMPT[:50], 3], cached=0)
    asked([*PROMPT[:50], 4, 5], cached=50)
    asked(second_prompt, cached=len(PROMPT) + 19)  # only its last token has to be computed, but before that is no state
    asked(second_prompt, cached=len(second_prompt) - 1)


def test_interrupted_sequences_are_computed_again_or_kept_with_what_they_have_read(build: Build) -> None:
    engine, model = build(max_running=2)

    async def interrupted() -> tuple[list[Completion], list[int]]:
        sequences = [
            engine.request(PROMPT[: 40 + i], dataclasses.replace(FREE, seed=i, max_tokens=40)) for i in range(3)
        ]
        for sequence in sequences:
            engine.submit(sequence)
        while len(sequences[0].tokens) < 8:
            await asyncio.sleep(0)
        engine.pause("test", retract=True)
        engine.free()
        engine.resume("test")
        while len(sequences[0].tokens) < 30:
            await asyncio.sleep(0)
        read = len(sequences[1].tokens)
        engine.end(sequences[1])  # it is in a slot for one more step
        return [await sequence.future for sequence in sequences], [*PROMPT[:41], *sequences[1].tokens[:read], 5, 6]

    made, prompt = asyncio.run(interrupted())
    for i, answer in enumerate(made):
        assert_reference(model, PROMPT[: 40 + i], answer)
    again = asyncio.run(engine.generate(prompt, params=FREE))
    assert again.cached_tokens == len(prompt) - 2
    assert_reference(model, prompt, again)


def test_a_state_stays_where_its_tokens_end_and_goes_before_what_is_read() -> None:
    def stored(tokens: range) -> Any:
        state = State(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8, 8))  # 288 bytes
        return tree.insert(
            tuple(tokens), lambda start: torch.zeros(1, 2, 1, len(tokens) - start, 1), state=lambda: state
        )

    def matched(count: int) -> int:
        return tree.matched(tuple(range(count)))

    tree = PrefixTree(capacity=4 * (288 + 8 * MIN_TOKENS), token_bytes=8, layers=1, state_bytes=288)
    first, second, third = (range(count * MIN_TOKENS) for count in (1, 2, 3))
    stored(first)
    stored(second)
    assert [matched(count) for count in (16, 20, 31, 32, 40)] == [16, 16, 16, 32, 32]
    assert not stored(range(40))  # too few tokens after a state
    fork = tree.insert((*range(20), *range(100, 120)), lambda start: torch.zeros(1, 2, 1, 40 - start, 1))
    assert fork is not None
    assert fork.parent is not None
    assert (fork.parent.end, fork.parent.state) == (20, None)  # a node that was split keeps its state at its end
    assert [matched(count) for count in (20, 32)] == [16, 32]
    tree.use(tree.match(tuple(second)))
    stored(third)
    assert tree.bytes == 3 * 288 + 8 * (3 * MIN_TOKENS + 20)
    assert stored(range(500, 540))  # in place of the fork and of the third
    assert (matched(48), tree.bytes) == (32, 3 * 288 + 8 * (2 * MIN_TOKENS + 40))
    assert stored(range(600, 640))  # in place of the states of the first and second, whose tokens are read
    assert (matched(48), tree.bytes) == (0, 2 * 288 + 8 * (2 * MIN_TOKENS + 80))
    assert tree.matched(tuple(range(500, 540))) == 40


def test_a_published_vision_checkpoint_is_read_without_its_tower(
    model_dir: Callable[[str], Path], answers: Ask, make_engine: Callable[..., EmbeddedEngine]
) -> None:
    text = AutoConfig.from_pretrained(model_dir("qwen3_5"))
    config = AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), tie_word_embeddings=False)
    engine = EmbeddedEngine(config, AutoTokenizer.from_pretrained(model_dir("qwen3_5")))
    tensors = [
        (name.replace("model.", "model.language_model."), tensor)
        for name, tensor in HFCheckpoint().read(model_dir("qwen3_5"))
    ]
    carried = [("model.visual.patch_embed.proj.bias", torch.zeros(4)), ("mtp.norm.weight", torch.zeros(64))]
    engine.load_weights([*tensors, *carried], version="0")
    [seen], [expected] = answers(engine, (PROMPT, FREE)), answers(make_engine("qwen3_5"), (PROMPT, FREE))
    assert (seen.tokens, seen.log_probs) == (expected.tokens, expected.log_probs)


def test_bf16_is_close_to_fp32(build: Build, answers: Ask) -> None:
    (exact, _), (coarse, _) = build(), build(dtype=torch.bfloat16)
    [expected] = answers(exact, (PROMPT, FREE))
    score = coarse.scores([PROMPT + expected.tokens], [len(PROMPT) - 1])[0]
    difference = torch.tensor(score.log_probs) - torch.tensor(expected.log_probs)
    assert difference.abs().mean() < 0.05


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_what_was_sampled_has_the_log_probs_of_the_trainer_after_a_push(
    family: str, make_engine: Callable[..., EmbeddedEngine], model_dir: Callable[[str], Path], answers: Ask
) -> None:
    engine = make_engine(family)
    policy = FsdpPolicy(model_dir(family), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.01)))
    policy.forward_backward(random_rows(), Clipped())
    policy.optim_step()
    engine.load_weights(policy.weights(), version="1")
    prompts = [PROMPT, PROMPT, PROMPT[:7]]
    made = answers(engine, *((prompt, dataclasses.replace(FREE, seed=i)) for i, prompt in enumerate(prompts)))
    rows = [
        TrainingSample(prompt + answer.tokens, 20, [1.0] * 20, [1.0] * 20, group=0)
        for prompt, answer in zip(prompts, made, strict=True)
    ]
    for log_probs, answer in zip(policy.log_probs(rows), made, strict=True):
        assert log_probs == pytest.approx(answer.log_probs, abs=2e-5)
