"""Loss, gradient norm and metrics are those of the samples, however they are ordered, packed and dealt to ranks.

Every algorithm on the FSDP policy; on Megatron-core's those that need something else of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from policies.invariance_cases import CASES, Learner, attempts, fsdp, megatron, shuffled, step
from rank_cases import Ranks

from slimectl.algorithms.packing import BatchingOptions
from slimectl.architectures.parallel import ParallelLayout
from slimectl.checkpoints.create import create_model
from slimectl.types import Metrics, Sample

ROUNDING = 1e-6
PLAIN: dict[str, Any] = {"max_tokens_per_pack": 10_000, "share_prefixes": True, "batching": BatchingOptions()}
"""The whole round in one pack."""
SMALL: dict[str, Any] = {"max_tokens_per_pack": 24, "batching": BatchingOptions(balance="flops", pair_cost=0.01)}
MODEL: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.05,
}  # fmt: skip
"""With weights as small as a fresh model's, so that float32 rounds by less than is asked for."""


class OverRanks:
    """What the ranks hold, as one."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def call(self, who: str, method: str, *arguments: Any) -> Any:
        return self.ranks.ask("call", who, method, *arguments)

    def arrange(self, options: dict[str, Any]) -> None:
        self.ranks.ask("arrange", options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("calm")
    create_model(MODEL, made, seed=7)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Learner:
    return fsdp(folder)


@pytest.fixture(scope="module")
def samples(alone: Learner) -> list[Sample]:
    return attempts(alone.policy.log_probs)


@pytest.fixture(scope="module")
def expected(alone: Learner, samples: list[Sample]) -> Callable[[str], Metrics]:
    """What one process reports that takes the round in one pack."""
    known: dict[str, Metrics] = {}

    def of(case: str) -> Metrics:
        if case not in known:
            alone.arrange(PLAIN)
            known[case] = step(alone, samples, case)
        return known[case]

    return of


@pytest.fixture(scope="module")
def dealt(two: Ranks, folder: Path) -> OverRanks:
    """Two ranks with micro-batches of three samples."""
    made = OverRanks(two.hold(partial(fsdp, folder)))
    made.arrange(PLAIN | {"batching": BatchingOptions(3, "none")})
    return made


@pytest.fixture(scope="module")
def dealt_to_four(four: Ranks, folder: Path) -> OverRanks:
    """Four ranks with small packs."""
    made = OverRanks(four.hold(partial(fsdp, folder)))
    made.arrange(PLAIN | SMALL)
    return made


LAYOUTS = [("two", ParallelLayout(tensor=2)), ("two", ParallelLayout(context=2)), ("four", ParallelLayout(pipeline=2))]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def cut(request: pytest.FixtureRequest, folder: Path) -> OverRanks:
    """A model cut over Megatron-core's ranks."""
    ranks, layout = request.param
    made = OverRanks(request.getfixturevalue(ranks).hold(partial(megatron, folder, layout)))
    made.arrange(PLAIN | SMALL)
    return made


def assert_equal(found: Metrics, expected: Metrics) -> None:
    assert found.keys() == expected.keys()
    apart = {name: (value, expected[name]) for name, value in found.items()
             if abs(value - expected[name]) > ROUNDING * max(1.0, abs(expected[name]))}  # fmt: skip
    assert not apart


@pytest.mark.parametrize("case", CASES)
def test_every_case_trains(expected: Callable[[str], Metrics], case: str):
    metrics = expected(case)
    assert metrics["train/grad_norm"] > 1e-4
    assert metrics["train/loss"] != 0


@pytest.mark.parametrize(
    "options",
    [{"max_tokens_per_pack": 24, "share_prefixes": False}, {"batching": BatchingOptions(1)}],
    ids=["small packs", "one sample each"],
)
@pytest.mark.parametrize("case", CASES)
def test_packs_micro_batches_and_the_order_of_samples_change_nothing(
    alone: Learner, samples: list[Sample], expected: Callable[[str], Metrics], case: str, options: dict[str, Any]
):
    wanted = expected(case)
    alone.arrange(PLAIN | options)
    assert_equal(step(alone, shuffled(samples), case), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_ranks_changes_nothing(
    dealt: OverRanks, samples: list[Sample], expected: Callable[[str], Metrics], case: str
):
    assert_equal(step(dealt, shuffled(samples), case), expected(case))


SOME = ["gspo", "ppo", "mis", "entropy and off-policy masks", "dpo", "reward_model", "sft"]
"""Each asks something else of a trainer: sums over a sequence, values, masks, entropy, pairs, scores, no advantages."""


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME)
def test_four_ranks_with_small_packs_change_nothing(
    dealt_to_four: OverRanks, samples: list[Sample], expected: Callable[[str], Metrics], case: str
):
    assert_equal(step(dealt_to_four, shuffled(samples), case), expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME)
def test_another_trainer_and_its_layouts_change_nothing(
    cut: OverRanks, samples: list[Sample], expected: Callable[[str], Metrics], case: str
):
    assert_equal(step(cut, shuffled(samples), case), expected(case))
