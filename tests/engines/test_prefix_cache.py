"""The prefix cache: answers with it are those without it, whatever forks, is evicted, updated or aborted."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded import prefix_tree
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.embedded.prefix_tree import MIN_TOKENS, PrefixTree
from slimectl.types import Completion, SamplingParams

Make = Callable[..., EmbeddedEngine]
Ask = Callable[..., list[Completion]]
KIB = 2.0**-20  # in GiB
PROMPT = list(range(40, 100))
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
READ_IN_PLACE = 4096
"""SHARED_BYTES of which two siblings of 16 tokens and more read one copy in the small model."""


def tree_of(engine: EmbeddedEngine) -> PrefixTree:
    return engine._runner.tree


def assert_sound(tree: PrefixTree) -> None:
    """The bytes are those of the nodes and within the bound, and nobody holds a reference."""
    nodes = list(tree._recent)
    tensors = [part for node in nodes for part in (node.keys_values, *(node.state or ()))]
    assert tree.bytes == sum(part.untyped_storage().nbytes() for part in tensors) <= tree.capacity
    assert not any(node.users or node.detached for node in nodes)
    assert all(node.parent is None or node.parent.children[node.tokens[0]] is node for node in nodes)


def equal(warm: list[Completion], cold: list[Completion]) -> None:
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    for one, other in zip(warm, cold, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "capacity", "shared_bytes"),
    [
        ("qwen3", 1.0, READ_IN_PLACE),
        ("qwen3", 300 * KIB, READ_IN_PLACE),
        ("qwen3", 1.0, 2**30),
        ("qwen3_5", 1.0, READ_IN_PLACE),
        ("qwen3_5", 600 * KIB, READ_IN_PLACE),
    ],
)
def test_random_conversations_that_fork_are_answered_as_without_the_cache(
    family: str, capacity: float, shared_bytes: int, make_engine: Make, answers: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "SHARED_BYTES", shared_bytes)
    warm = make_engine(family, max_running=7, prefix_cache_gib=capacity)
    cold = make_engine(family, max_running=7, prefix_cache_gib=0)
    draw = random.Random(7)
    texts = [[draw.randrange(250) for _ in range(draw.randint(1, 60))] for _ in range(3)]
    for _ in range(8):
        requests = []
        for i in range(draw.randint(1, 12)):
            base = draw.choice(texts)
            start = base[: draw.randint(1, len(base))] if draw.random() < 0.3 else base
            prompt = [*start, *(draw.randrange(250) for _ in range(draw.choice([0, 0, 1, 5, 40])))][:200]
            requests.append((prompt, SamplingParams(max_tokens=draw.randint(1, 24), ignore_eos=True, seed=i)))
        made = answers(warm, *requests)
        equal(made, answers(cold, *requests))
        assert_sound(tree_of(warm))
        texts += [[*prompt, *answer.tokens] for (prompt, _), answer in zip(requests, made, strict=True)]
    assert warm.stats.prefill_tokens < 0.8 * cold.stats.prefill_tokens
    assert tree_of(cold).bytes == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_second_turn_is_that_of_transformers_and_computes_only_what_is_new(
    family: str, make_engine: Make, answers: Ask, model_dir: Callable[[str], Path]
) -> None:
    engine = make_engine(family)
    first = answers(engine, (PROMPT, GREEDY))[0]
    reply = list(b" and a tool says ")
    second_prompt = PROMPT + first.tokens + reply
    computed = engine.stats.prefill_tokens
    second = answers(engine, (second_prompt, GREEDY))[0]
    # All but the last token of the first answer, which was sampled and not read.
    assert second.cached_tokens == len(PROMPT) + 19
    assert engine.stats.prefill_tokens - computed == 1 + len(reply)
    reference = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([second_prompt + second.tokens])).logits[0, len(second_prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert second.tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(second.log_probs), expected.max(-1).values, atol=1e-5, rtol=0)


def test_siblings_read_one_copy_of_a_long_prompt(
    make_engine: Make, answers: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "SHARED_BYTES", READ_IN_PLACE)
    engine, copying = make_engine(max_running=8), make_engine(max_running=8, prefix_cache_gib=0)
    siblings = [(PROMPT * 3, dataclasses.replace(GREEDY, temperature=1.0, seed=i)) for i in range(8)]
    equal(answers(engine, *siblings), answers(copying, *siblings))
    assert (engine._runner._cache.tokens, copying._runner._cache.tokens) == (32, 240)  # of a slot


def test_what_was_used_for_longest_is_evicted_and_never_what_is_read() -> None:
    def stored(tokens: range) -> Any:
        return tree.insert(tuple(tokens), lambda start: torch.zeros(1, 2, 1, len(tokens) - start, 1))

    tree = PrefixTree(capacity=5 * MIN_TOKENS * 8, token_bytes=8, layers=1)
    first, second, third = (range(start, start + MIN_TOKENS) for start in (0, 100, 200))
    for tokens in (first, second, third):
        assert stored(tokens)
    tree.match(tuple(first))
    tree.use(tree.match(tuple(second)))
    assert stored(range(300, 300 + 4 * MIN_TOKENS))  # needs the room of two
    assert [tree.matched(tuple(tokens)) for tokens in (first, second, third)] == [0, MIN_TOKENS, 0]
    assert tree.bytes == tree.capacity
    assert not stored(range(400, 400 + 5 * MIN_TOKENS))  # what is read leaves no room for it
    assert not stored(range(400, 399 + MIN_TOKENS))  # too short to be worth it
    assert tree.bytes == MIN_TOKENS * 8


def test_new_weights_empty_it_and_answers_in_flight_keep_what_they_read(
    make_engine: Make, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "SHARED_BYTES", READ_IN_PLACE)
    generator = torch.Generator().manual_seed(3)
    tensors = [
        (name, t + 0.3 * torch.randn(t.shape, generator=generator))
        for name, t in HFCheckpoint().read(model_dir("llama"))
    ]

    async def updated(engine: EmbeddedEngine) -> list[Completion]:
        params = [dataclasses.replace(GREEDY, temperature=1.0, seed=i) for i in range(4)]
        tasks = [asyncio.create_task(engine.generate(PROMPT, params=each)) for each in params]
        while engine.stats.steps < 10:
            await asyncio.sleep(0)
        engine.load_weights(tensors, version="1")
        if engine is warm:
            assert tree_of(engine).bytes > 0  # read by those in flight, and found by nobody else
            assert tree_of(engine).matched(tuple(PROMPT)) == 0
        return await asyncio.gather(*tasks)

    warm, cold = make_engine(), make_engine(prefix_cache_gib=0)
    made = asyncio.run(updated(warm))
    equal(made, asyncio.run(updated(cold)))
    assert made[0].weight_versions == ["0", "1"]
    assert (tree_of(warm).bytes, len(tree_of(warm))) == (0, 0)  # keys and values of two versions are not stored
    again = asyncio.run(warm.generate(PROMPT, params=GREEDY))
    assert again.cached_tokens == 0
    equal([again], [asyncio.run(cold.generate(PROMPT, params=GREEDY))])


@pytest.mark.parametrize("end", ["abort", "cancel", "retract", "close"])
def test_an_interruption_leaves_no_reference_behind(
    end: str, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "SHARED_BYTES", READ_IN_PLACE)
    engine = make_engine(max_running=2)

    async def interrupted() -> None:
        siblings = [asyncio.create_task(engine.generate(PROMPT, params=GREEDY)) for _ in range(4)]
        while engine.stats.steps < 5:
            await asyncio.sleep(0)
        assert any(node.users for node in tree_of(engine)._recent)
        if end in ("abort", "close"):
            await getattr(engine, end)()
        elif end == "cancel":
            for task in siblings[:3]:
                task.cancel()
        else:
            engine.pause("memory", retract=True)
            engine.free()
            assert tree_of(engine).bytes == 0
            engine.resume("memory")
        await asyncio.gather(*siblings, return_exceptions=True)

    asyncio.run(interrupted())
    assert_sound(tree_of(engine))
    assert (tree_of(engine).bytes == 0) == (end == "close")
    assert engine._runner._prefixes == {}


def test_rotations_that_depend_on_the_length_share_only_within_the_original_context(
    model_dir: Callable[[str], Path], answers: Ask
) -> None:
    config = AutoConfig.from_pretrained(model_dir("llama"))
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    config.max_position_embeddings = 64
    engines = []
    for gib in (1.0, 0.0):
        tokenizer = AutoTokenizer.from_pretrained(model_dir("llama"))
        engines.append(EmbeddedEngine(config, tokenizer, EngineOptions(max_context=160, prefix_cache_gib=gib)))
        engines[-1].load_weights(HFCheckpoint().read(model_dir("llama")), version="0")
    cached = []
    for length in (30, 55, 100, 64):  # the second one's answer crosses the original context
        request = ([*range(length)], GREEDY)
        [warm], [cold] = (answers(engine, request) for engine in engines)
        equal([warm], [cold])
        cached.append(warm.cached_tokens)
    assert cached == [0, 30, 0, 55]
