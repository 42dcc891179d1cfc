"""However a model is cut over ranks, it computes what Hugging Face's model does: logits and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from layout_ranks import Trial, run
from model_cases import CASES, SHAPE, reference
from rank_cases import Ranks

from slimectl.architectures.config import with_defaults
from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.errors import SettingsError
from slimectl.policies.megatron import parallel
from slimectl.policies.recompute import Recompute

pytestmark = pytest.mark.slow

LENGTHS = (7, 12, 12, 5, 1, 9, 4, 16)
PLAIN = Recompute()


def trials(layouts: dict[str, list[ParallelLayout]]) -> list[Trial]:
    return [(name, layout, PLAIN) for name, some in layouts.items() for layout in some]


def compare(ranks: Ranks, folder: Path, chosen: list[Trial]) -> None:
    for name in {name for name, _, _ in chosen}:
        torch.save(reference(name, folder / name, lengths=LENGTHS), folder / f"{name}.pt")
    ranks.hold(partial(run, folder, chosen))


def test_two_ranks_equal_one(two: Ranks, tmp_path: Path):
    """Families and layouts that test_equal_ranks, which compares whole steps, does not cut."""
    cut = {
        "llama_tied": [ParallelLayout(tensor=2), ParallelLayout(pipeline=2, virtual_pipeline=2)],
        "qwen2_yarn": [ParallelLayout(tensor=2)],
        "qwen2_moe": [ParallelLayout(tensor=2), ParallelLayout(expert_tensor=2)],
        "qwen3_moe": [ParallelLayout(context=2, expert=2)],
        "deepseek_v3": [ParallelLayout(tensor=2), ParallelLayout(context=2), ParallelLayout(pipeline=2)],
        "deepseek_v3_yarn": [ParallelLayout(tensor=2, expert=2)],
        "gemma3": [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(context=2)],
        "glm_moe_dsa": [
            ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(expert=2),
        ],
        "gpt_oss": [ParallelLayout(tensor=2), ParallelLayout(tensor=2, expert=2), ParallelLayout(context=2, expert=2)],
        "glm4": [ParallelLayout(tensor=2)],
        "glm4_moe": [ParallelLayout(tensor=2)],
        "qwen3_next": [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(expert=2)],
        "qwen3_5": [ParallelLayout(tensor=2)],
        "minimax_m2": [ParallelLayout(tensor=2), ParallelLayout(context=2)],
    }  # fmt: skip
    recomputed = [
        ("qwen3", ParallelLayout(pipeline=2), Recompute("full")),
        ("qwen3", ParallelLayout(context=2), Recompute("selective", ("core_attn", "mlp"))),
        ("deepseek_v3", ParallelLayout(expert=2), Recompute("selective", ("core_attn", "moe"))),
    ]
    compare(two, tmp_path, trials(cut) + recomputed)


def test_four_ranks_equal_one(four: Ranks, tmp_path: Path):
    cut = {
        "qwen3_moe": [ParallelLayout(expert=2, expert_tensor=2), ParallelLayout(tensor=2, expert=4)],
        "deepseek_v3": [
            ParallelLayout(tensor=2, pipeline=2), ParallelLayout(tensor=2, expert=2, expert_tensor=2),
        ],
    }  # fmt: skip
    compare(four, tmp_path, trials(cut))


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        (
            "llama",
            ParallelLayout(tensor=4),
            r"megatron\.tensor_model_parallel_size: 4 does not divide 2 key-value groups",
        ),
        ("llama", ParallelLayout(pipeline=3), r"megatron\.pipeline_model_parallel_size: 3 does not divide 4 layers"),
        ("qwen3_moe", ParallelLayout(expert=16), r"megatron\.expert_model_parallel_size: 16 does not divide 8 experts"),
        ("qwen3_5", ParallelLayout(context=4), r"context_parallel_size: 4 does not divide 2 key heads of linear att"),
        ("glm_moe_dsa", ParallelLayout(pipeline=4), r"pipeline_model_parallel_size: 4 makes layer 1 the first of a st"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(name, layout, message):
    config = with_defaults({**SHAPE, **CASES[name]})
    with pytest.raises(SettingsError, match=message):
        parallel.check(layout, family_of(config).architecture(config), 16)
