"""Which layouts are possible, and what is said about those that are not."""

from __future__ import annotations

import pytest

from slimectl.architectures.parallel import ParallelLayout, problems

QWEN3_8B = {"num_layers": 36, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 12288}
MIXTURE = {**QWEN3_8B, "num_moe_experts": 128, "moe_ffn_hidden_size": 768}


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        (ParallelLayout(), 1),
        (ParallelLayout(tensor=8, pipeline=4, virtual_pipeline=9, context=2), 64),
        (ParallelLayout(tensor=2, pipeline=2, context=2), 8),
    ],
)
def test_a_layout_that_divides_everything_has_no_problem(layout: ParallelLayout, world: int):
    assert list(problems(layout, QWEN3_8B, world)) == []


def test_experts_may_lie_across_tensor_and_context_ranks():
    layout = ParallelLayout(tensor=2, context=2, expert=8)
    assert list(problems(layout, MIXTURE, 8)) == []
    assert (layout.data(8), layout.expert_data(8)) == (2, 1)


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (
            ParallelLayout(tensor=16),
            16,
            "megatron.tensor_model_parallel_size: 16 does not divide 8 key-value groups. Possible: 1, 2, 4, 8",
        ),
        (
            ParallelLayout(pipeline=8),
            8,
            "megatron.pipeline_model_parallel_size: 8 does not divide 36 layers. Possible: 1, 2, 3, 4, 6, 9, 12,"
            " 18, 36",
        ),
        (
            ParallelLayout(pipeline=4, virtual_pipeline=2),
            4,
            "megatron.virtual_pipeline_model_parallel_size: 2 does not divide 9 layers of a pipeline stage. Possible:"
            " 1, 3, 9",
        ),
        (
            ParallelLayout(virtual_pipeline=2),
            1,
            "megatron.virtual_pipeline_model_parallel_size: 2 needs pipeline stages to interleave. Raise"
            " megatron.pipeline_model_parallel_size above 1, or remove it.",
        ),
        (
            ParallelLayout(expert=2),
            2,
            "megatron.expert_model_parallel_size: 2, but the model has no experts. Leave it at 1.",
        ),
        (
            ParallelLayout(tensor=2, context=2),
            6,
            "megatron.tensor_model_parallel_size x pipeline x context: one copy of the model needs 4 ranks, which does"
            " not divide the 6 available. Lower one of them, or change the number of ranks.",
        ),
        (ParallelLayout(context=0), 1, "megatron.context_parallel_size: 0 is not at least 1"),
    ],
)
def test_what_is_said_about_a_dense_model(layout: ParallelLayout, world: int, message: str):
    assert list(problems(layout, QWEN3_8B, world)) == [message]


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (
            ParallelLayout(expert=48),
            48,
            "megatron.expert_model_parallel_size: 48 does not divide 128 experts. Possible: 1, 2, 4, 8, 16, 32, 64,"
            " 128",
        ),
        (
            ParallelLayout(expert=256),
            256,
            "megatron.expert_model_parallel_size: 256 does not divide 128 experts. Possible: 1, 2, 4, 8, 16, 32, 64,"
            " 128",
        ),
        (
            ParallelLayout(expert=8, expert_tensor=2),
            8,
            "megatron.expert_model_parallel_size x expert_tensor x pipeline: one copy of the experts needs 16 ranks,"
            " which does not divide the 8 available. Lower one of them, or change the number of ranks.",
        ),
    ],
)
def test_what_is_said_about_a_mixture_of_experts(layout: ParallelLayout, world: int, message: str):
    assert list(problems(layout, MIXTURE, world)) == [message]


def test_context_parallelism_cuts_linear_attention_by_heads():
    hybrid = {**MIXTURE, "linear_attention_freq": [1, 1, 1, 0] * 9, "linear_num_key_heads": 16}
    assert list(problems(ParallelLayout(tensor=2, pipeline=2, expert=2), hybrid, 8)) == []
    assert list(problems(ParallelLayout(tensor=2, context=4), hybrid, 8)) == []
    (message,) = problems(ParallelLayout(tensor=4, context=8), hybrid, 32)
    assert message == (
        "megatron.context_parallel_size: 8 does not divide 4 key heads of linear attention on a tensor-parallel rank,"
        " whose layers need whole sequences. Possible: 1, 2, 4"
    )


def test_heads_of_linear_attention_are_cut_evenly():
    hybrid = {**QWEN3_8B, "linear_attention_freq": [1, 1, 1, 0] * 9, "linear_num_key_heads": 4}
    (message,) = problems(ParallelLayout(tensor=8), hybrid, 8)
    assert message.startswith(
        "megatron.tensor_model_parallel_size: 8 does not divide 4 key heads of linear attention. Possible: 1, 2, 4"
    )
