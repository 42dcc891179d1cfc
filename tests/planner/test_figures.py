"""The formulas by hand: parameters on a rank, bytes at the peak, FLOPs, cache; and the constants they share."""

from __future__ import annotations

from typing import Any

import pytest

from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.architectures.parallel import ParallelLayout
from slimectl.planner import activations, flops, memory, parameters, plan
from slimectl.planner.plan import PlannedModel
from slimectl.planner.workload import CHUNK_LOGITS, DENSE_SCORES, KEPT_LOGITS, Figure, Run


def model(name: str, **beside: Any) -> PlannedModel:
    return plan.any_model_of(cards.language_model(with_defaults(cards.load(name)["config"])), **beside)


def figure(figures: list[Figure], name: str) -> Figure:
    return next(figure for figure in figures if figure.name == name)


SMALL = model("qwen3-0.6B")  # 28 layers, hidden 1024, 16 heads of 128, 8 groups, MLP 3072, 151936 tokens, tied
MIXED = model("qwen3-30B-A3B")  # 48 layers, hidden 2048, 128 experts of 768, 8 of them chosen


def test_the_constants_are_those_of_the_policies():
    from slimectl.algorithms import gated_delta
    from slimectl.policies import causal_attention, lm_head

    assert activations.DELTA_CHUNK == gated_delta.CHUNK
    assert (CHUNK_LOGITS, KEPT_LOGITS, DENSE_SCORES) == (
        lm_head.CHUNK_LOGITS,
        lm_head.KEPT_LOGITS,
        causal_attention.DENSE_SCORES,
    )


def test_parameters_of_a_pipeline_rank():
    layout = ParallelLayout(tensor=2, pipeline=2)
    # attention: q 1024 x 2048, k and v 1024 x 1024 each, out 2048 x 1024; MLP 3 x 1024 x 3072; norms 2 x 1024 + 2 x 128
    matrices = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072
    embedding = 151936 * 1024
    first = 14 * (matrices // 2 + 2 * 1024 + 2 * 128) + embedding // 2
    held = [parameters.local_params(SMALL.parts, SMALL.architecture, layout, stage).all for stage in (0, 1)]
    assert held == [first, first + 1024]  # the last stage has its own copy of the tied embedding, and the last norm


def test_parameters_of_an_expert_rank():
    layout = ParallelLayout(tensor=2, expert=4, expert_tensor=2)
    held = parameters.local_params(MIXED.parts, MIXED.architecture, layout, 0)
    assert held.experts == 48 * 128 * 3 * 2048 * 768 // 8
    assert parameters.activated(MIXED.parts, MIXED.architecture) == 3_353_032_704


def test_vocabularies_are_padded_to_what_tensor_parallelism_divides():
    parts = [parameters.ParameterPart("embedding", None, 10 * 4, cut=True, rows=10)]
    assert parameters.local_params(parts, SMALL.architecture, ParallelLayout(tensor=4), 0).dense == 3 * 4


def test_optimizer_is_shared_out_over_data_and_context_ranks():
    P = 596_049_920
    run = Run(8, ParallelLayout(context=2))
    found = memory.figures(SMALL.all, run)
    sizes = [figure(found, name).value for name in ("weights", "gradients", "optimizer")]
    assert sizes == [2 * P, 4 * P, 12 * P / 8]
    alone = memory.figures(SMALL.all, Run(8, distributed_optimizer=False))
    assert figure(alone, "optimizer").value == 12 * P
    single = memory.figures(SMALL.all, Run(1, dtype="float32"))
    assert figure(single, "optimizer").value == 8 * P
    for run, size in ((Run(1, state_dtype="bfloat16"), 8 * P), (Run(4, policy="fsdp", state_dtype="bfloat16"), P)):
        assert figure(memory.figures(SMALL.all, run), "optimizer").value == size
    # 28 layers of q 1024 x 2048, k and v 1024 x 1024, o 2048 x 1024, three of 1024 x 3072, and norms of q and k.
    matrices = 28 * (1024 * (2048 + 2 * 1024 + 2048 + 3 * 3072) + 2 * 128)
    muon = Run(2, policy="fsdp", optimizer="muon", state_dtype="int8")
    one = 1 + 4 / 256
    found = memory.figures(SMALL.all, muon)
    assert figure(found, "optimizer").value == (one * matrices + 2 * one * (P - matrices)) / 2


def test_what_is_offloaded_moves_from_the_gpu_to_the_host():
    P = 596_049_920

    def of(**options: Any) -> tuple[list[float], float]:
        run = Run(**options)
        device = memory.figures(SMALL.all, run)
        gathered = 2 * (2 * 15_730_944 + 155_583_488) if run.sharded else 0
        sizes = [figure(device, name).value for name in ("weights", "gradients", "optimizer")]
        host = figure(memory.host_figures(SMALL.all, run), memory.HOST_PEAK)
        return [sizes[0] - gathered, *sizes[1:]], host.value

    assert of(world=1, policy="fsdp", offload="optimizer") == ([2 * P, 2 * P, 0], 16 * P)
    assert of(world=4, policy="fsdp", offload="optimizer") == ([P, P, 0], 4 * P)
    assert of(world=4, policy="fsdp", offload="parameters") == ([0, 0, 0], 4 * P)
    assert of(world=1, policy="fsdp", offload="parameters", state_dtype="bfloat16") == ([0, 0, 0], 12 * P)
    assert of(world=4, offload="optimizer") == ([2 * P, 4 * P, P], 3 * P)
    assert memory.host_figures(SMALL.all, Run(4)) == []


def test_engines_on_the_same_gpus_stand_beside_the_weights_while_they_are_pushed():
    P = 596_049_920
    training = memory.figures(SMALL.all, Run(1))
    asleep, push = memory.shared_gpu_figures(training, engine_bytes=1e9)
    assert (asleep.value, push.value) == (2 * P + 12 * P, 1e9 + 2 * P)


def test_one_fsdp_process_holds_masters_gradients_and_moments():
    P = 596_049_920
    for dtype, weights in (("float32", 4 * P), ("bfloat16", 6 * P)):
        found = memory.figures(SMALL.all, Run(1, policy="fsdp", dtype=dtype))
        sizes = [figure(found, name).value for name in ("weights", "gradients", "optimizer")]
        assert sizes == [weights, 4 * P, 8 * P]


def memory_of(found: PlannedModel, run: Run) -> dict[str, float]:
    lines = memory.figures(found.all, run)
    return {line.name: line.value for line in lines}


P = 596_049_920
Q, KV, H, F, K = 16 * 128, 8 * 128, 1024, 3072, 8
ADAPTERS = 28 * K * ((H + Q) + 2 * (H + KV) + (Q + H) + 3 * (H + F))  # rank x (inputs + outputs) of seven layers
ADAPTED = {
    "lora_rank": K,
    "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def test_with_adapters_the_model_has_no_gradients_and_no_optimizer():
    found = model("qwen3-0.6B", **ADAPTED)
    assert parameters.count(found.adapters) == ADAPTERS
    for policy, dtype, weights, moments in (
        ("fsdp", "float32", 4 * (P + ADAPTERS), 8 * ADAPTERS),
        ("fsdp", "bfloat16", 2 * (P + ADAPTERS) + 4 * ADAPTERS, 8 * ADAPTERS),  # float32 masters of what learns
        ("megatron", "bfloat16", 2 * (P + ADAPTERS), 12 * ADAPTERS),
    ):
        lines = memory_of(found, Run(1, policy=policy, dtype=dtype))  # type: ignore[arg-type]
        assert [lines[name] for name in ("weights", "gradients", "optimizer")] == [weights, 4 * ADAPTERS, moments]
        whole = memory_of(SMALL, Run(1, policy=policy, dtype=dtype))  # type: ignore[arg-type]
        # What lies between the halves of seven adapters a layer; the head's weight has no gradient.
        inner = (2 if dtype == "bfloat16" else 4) * 8192 * 28 * 7 * K
        assert lines["activations"] - whole["activations"] == inner
        assert lines["head"] <= whole["head"]


def test_adapters_are_cut_as_their_matrices_are():
    found = model("qwen3-0.6B", **ADAPTED)
    # Of q, k, v, gate and up B is cut, of o and down A; what is not cut every rank has.
    cut = 28 * K * (Q + 2 * KV + Q + 3 * F)
    held = parameters.local_params(found.adapters, found.architecture, ParallelLayout(tensor=4), 0).all
    assert held == cut // 4 + (ADAPTERS - cut)
    experts = model("qwen3-30B-A3B", lora_rank=4, lora_targets=["down_proj"])
    spread = parameters.local_params(experts.adapters, experts.architecture, ParallelLayout(expert=8), 0)
    assert (spread.dense, spread.experts) == (0, 48 * 128 * 4 * (768 + 2048) // 8)


def test_a_critic_learns_all_but_the_head_of_the_language_model():
    found, run = model("qwen3-4B", critic=True), Run(8, distributed_optimizer=False)
    backbone = parameters.count(found.parts)  # tied: the head is the embedding, which learns
    lines = memory_of(found, run)
    assert lines["critic weights"] == 2 * (backbone + 2560)
    assert (lines["critic gradients"], lines["critic optimizer"]) == (4 * (backbone + 2560), 12 * (backbone + 2560))
    untied = model("qwen3-8B", critic=True)
    (critic,) = untied.other_models
    assert parameters.count(critic.trained) == parameters.count(untied.parts) - 151936 * 4096 + 4096
    assert "critic's turn" not in lines  # it has no logits


def test_a_reference_and_a_teacher_hold_their_weights_alone():
    teacher = cards.language_model(with_defaults(cards.load("qwen3-8B")["config"]))
    found = model("qwen3-0.6B", reference=True, teachers=[teacher])
    lines = memory_of(found, Run(8, ParallelLayout(tensor=8), seq_len=1024, max_tokens_per_gpu=1024))
    plain = memory_of(SMALL, Run(8, ParallelLayout(tensor=8), seq_len=1024, max_tokens_per_gpu=1024))
    assert lines["reference weights"] == plain["weights"]
    of_teacher = plan.model_of(teacher)
    held = parameters.local_params(of_teacher.parts, of_teacher.architecture, ParallelLayout(tensor=8), 0)
    assert lines["teacher weights"] == 2 * held.all
    more = lines["reference weights"] + lines["teacher weights"] + lines.get("teacher's turn", 0.0)
    assert lines[memory.PEAK] == pytest.approx(plain[memory.PEAK] + more)
    (own, reference, eight), seq = (
        flops.flops_figures(found.all, seq_len=4096, batch=1, world=1, recomputes=False, tflops=None, mfu=1)[:3],
        4096,
    )
    assert reference.value == pytest.approx(own.value / 3)  # forward only
    assert eight.value == 2 * (parameters.count(of_teacher.parts) - 151936 * 4096) + 2 * 36 * 32 * 256 * seq / 2


def test_flops_with_adapters_leave_out_the_gradient_of_the_model():
    found = model("qwen3-0.6B", **ADAPTED)
    made = flops.flops_figures(found.all, seq_len=4096, batch=1, world=1, recomputes=True, tflops=None, mfu=1)
    attention = 28 * 16 * 256 * 2048
    token, whole = made[0].value, figure(made, "FLOPs per step, recomputation included").value / 4096
    assert token == 4 * P + 6 * ADAPTERS + 6 * attention
    assert whole == pytest.approx(token + 2 * (P + ADAPTERS) + 2 * attention)


def test_the_peak_is_the_sum_of_its_lines():
    found = memory.figures(MIXED.all, Run(8, ParallelLayout(pipeline=4, expert=2)))
    assert memory.peak(found) == pytest.approx(sum(line.value for line in found[:-1]))
    assert found[-1].formula.endswith("on pipeline stage 0")


@pytest.mark.parametrize(
    ("layout", "stage", "packs"),
    [
        (ParallelLayout(pipeline=4), 0, 4),
        (ParallelLayout(pipeline=4), 3, 1),
        # Interleaved, first of 4 with 2 parts: 2 x 3 + 4 + 1 = 11 parts under way, of 2 a pack.
        (ParallelLayout(pipeline=4, virtual_pipeline=2), 0, 5.5),
    ],
)
def test_packs_under_way(layout: ParallelLayout, stage: int, packs: float):
    assert memory.in_flight(Run(4, layout), stage) == packs


def test_full_recomputation_keeps_the_inputs_of_layers_and_makes_one_layer_anew():
    def of(name: str, recompute: str) -> float:
        run = Run(1, recompute=recompute, seq_len=4096, max_tokens_per_gpu=65536)  # type: ignore[arg-type]
        return figure(memory.figures(SMALL.all, run), name).value

    layer = sum(part.size for part in memory.layer_of(SMALL.architecture, Run(1, seq_len=4096), 0))
    saved = of("activations", "none") - of("activations", "full")
    assert saved == pytest.approx(65536 * 28 * (layer - 2 * 1024))
    # As far as it is above what the head has given back by then.
    assert of("backward", "full") == pytest.approx(65536 * (layer + 3 * 2 * 3072) - of("head", "full"))


def test_flops_of_a_token():
    # 6 a parameter; attention 6 x 28 layers x 16 heads x (128 + 128) columns x half of 4096 tokens
    found = flops.token_flops(SMALL.all[0], 4096)
    assert found.value == 6 * 596_049_920 + 6 * 28 * 16 * 256 * 2048
    # An untied embedding is looked up, its head is a product.
    assert flops.passed(MIXED.parts, MIXED.architecture) == 3_353_032_704 - 151936 * 2048


def test_a_token_attends_to_no_more_than_its_window():
    found = model("gemma3-1b")
    # 6 a parameter; 4 heads x (256 + 256) columns; 4 layers see half of 4096 tokens, 22 see 512, fewer at the start:
    # 512 - 512² / (2 x 4096) = 480.
    each = flops.token_flops(found.all[0], 4096).value
    assert each == 6 * 999_885_952 + 6 * 2048 * (4 * 2048 + 22 * 480)
    assert flops.attended(found.architecture, 256) == 26 * 128
    assert flops.model_flops(found.all[0]).training(4096) == pytest.approx(4096 * each)
    assert flops.pair_cost(found.parts, found.architecture) == 4 * 2048 / 999_885_952


def test_time_of_a_step():
    found = flops.flops_figures(SMALL.all, seq_len=4096, batch=2, world=4, recomputes=False, tflops=100, mfu=0.5)
    total_flops = flops.token_flops(SMALL.all[0], 4096).value * 8192
    assert figure(found, "time per step").value == pytest.approx(total_flops / (4 * 100e12 * 0.5))


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("qwen3-0.6B", 2 * 28 * 8 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("qwen3-next-80B-A3B", 2 * 12 * 2 * 256 * 2),  # one layer in four attends
    ],
)
def test_cache_of_a_token(name: str, each: int):
    found = model(name).architecture
    assert flops.cache_per_token(found, dtype_bytes=2, tensor=1).value == each


def test_key_value_heads_are_copied_where_there_are_fewer_than_ranks():
    assert flops.cache_per_token(SMALL.architecture, dtype_bytes=2, tensor=16).value == 2 * 28 * 1 * 128 * 2


def test_the_state_of_the_delta_rule_does_not_grow_with_the_sequence():
    found = flops.state_per_sequence(model("qwen3-next-80B-A3B").architecture, dtype_bytes=2, tensor=1)
    assert found is not None
    assert found.value == 36 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))
    assert flops.state_per_sequence(SMALL.architecture, dtype_bytes=2, tensor=1) is None


def test_sequences_that_fit():
    found = flops.cache_figures(
        SMALL.parts, SMALL.architecture, dtype_bytes=2, tensor=1, memory_gib=4, share=0.5, seq_len=1000, concurrency=10
    )
    free, each = 2 * 2**30 - 2 * 596_049_920, 2 * 28 * 8 * 128 * 2
    assert figure(found, "tokens in cache").value == free // each
    assert figure(found, "sequences at once").value == free // (each * 1000)
    assert figure(found, "cache for all").value == 10 * 1000 * each


def test_matrices_in_fp8_take_a_byte_a_parameter():
    options = {"dtype_bytes": 2, "tensor": 2, "memory_gib": 80, "share": 0.85, "seq_len": 1000, "concurrency": None}
    found = flops.cache_figures(MIXED.parts, MIXED.architecture, fp8=True, **options)  # type: ignore[arg-type]
    whole = 2 * 311_164_928 + 198_656  # embedding, head and norms
    assert figure(found, "engine weights").value == (2 * whole + 30_532_122_624 - whole) / 2
