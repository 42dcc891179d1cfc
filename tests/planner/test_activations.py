"""The formulas of activations against what autograd really saves, counted tensor by tensor.

T tokens of the pack · R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimectl.architectures.config import with_defaults
from slimectl.architectures.registry import family_of
from slimectl.checkpoints.create import create_model
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.planner import memory
from slimectl.planner.workload import Run
from slimectl.policies.fsdp.model import Request
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.options import MegatronOptions, TrainerOptions
from slimectl.policies.recompute import Recompute
from slimectl.settings.train import TrainSettings
from slimectl.types import TrainingSample

SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
LATENT = {
    **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 32,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {"model_type": "minimax_m2", **EXPERTS, "num_local_experts": 8, "intermediate_size": 128},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_next": {"model_type": "qwen3_next", **EXPERTS, **DELTA, "shared_expert_intermediate_size": 128},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
}
CORE: tuple[str, ...] = ("core_attn",)
MODULES = dict.fromkeys(CONFIGS, CORE) | {
    "llama": ("core_attn", "mlp"), "qwen3": ("mlp",), "qwen3_moe": ("moe",), "glm4_moe": ("core_attn", "mlp", "moe")
}  # fmt: skip
"""Modules that are recomputed where recomputation is selective."""
LENGTH, SEQUENCES, PROMPT = 400, 2, 100


def config_of(name: str) -> dict[str, Any]:
    return with_defaults({**SHAPE, **CONFIGS[name]})


def saved_bytes(forward: Callable[[], Any], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of all storages that autograd keeps, each counted once, parameters left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    return sum(size for size, _ in kept.values())


def layers_alone(name: str, run: Run) -> float:
    """The formula's activations and, where a head is in the pack, what the head saves."""
    config = config_of(name)
    return memory._activations(family_of(config).architecture(config), run, 0, last=True).value


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "glm4", "qwen2_moe", "qwen3_moe", "glm4_moe"])
def test_fsdp_saves_what_the_formula_says(name: str, dtype: Any, recompute: Any, tmp_path: Path):
    create_model(config_of(name), tmp_path, seed=0)
    options = TrainerOptions(dtype=dtype, recompute=Recompute(recompute, MODULES[name]))
    policy = FsdpPolicy(tmp_path, HFCheckpoint(), options)
    # The last token of a row is not computed.
    response = LENGTH + 1 - PROMPT
    rows = [TrainingSample([g] * (LENGTH + 1), response, [1.0] * response, group=g) for g in range(SEQUENCES)]
    (plan,) = policy._plans(rows, for_loss=False)
    measured = saved_bytes(lambda: policy._forward(plan, Request()), policy.model.parameters())
    multiple = policy.row_multiple  # of tokens and states that oneDNN is given
    tokens, states = (-(-rows // multiple) * multiple for rows in (LENGTH * SEQUENCES, SEQUENCES * response))
    run = Run(
        1, policy="fsdp", dtype=dtype, recompute=recompute, seq_len=LENGTH, max_tokens_per_gpu=tokens, device="cpu",
        recompute_modules=MODULES[name],
    )  # fmt: skip
    head = states * (run.bytes * SHAPE["hidden_size"] + 4 * SHAPE["vocab_size"] + 16)
    formula = layers_alone(name, run) + head
    if recompute == "full":
        # Angles are held, but not by autograd.
        formula -= 2 * run.bytes * SHAPE["head_dim"] * _architecture(name).rope.percent * tokens
    assert measured == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_save_at_most_what_lies_between_their_halves_besides(dtype: Any, tmp_path: Path):
    create_model(config_of("qwen3"), tmp_path, seed=0)
    response, rank = LENGTH + 1 - PROMPT, 8
    rows = [TrainingSample([g] * (LENGTH + 1), response, [1.0] * response, group=g) for g in range(SEQUENCES)]

    def saved(lora: LoraOptions | None) -> int:
        policy = FsdpPolicy(tmp_path, HFCheckpoint(), TrainerOptions(dtype=dtype, lora=lora))
        (plan,) = policy._plans(rows, for_loss=False)
        return saved_bytes(lambda: policy._forward(plan, Request()), policy.model.parameters())

    inner = LENGTH * SEQUENCES * SHAPE["num_hidden_layers"] * 7 * rank * (4 if dtype == "float32" else 2)
    # Frozen norms keep less, and so does the first layer, whose input has no gradient: neither is in the formulas.
    most = saved(None) + inner
    assert 0.8 * most < saved(LoraOptions(rank, 16.0, TrainSettings().lora_targets)) <= most


def _architecture(name: str) -> Any:
    config = config_of(name)
    return family_of(config).architecture(config)


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("megatron.core")
    from slimectl.architectures.parallel import ParallelLayout
    from slimectl.policies.megatron import parallel

    parallel.start(ParallelLayout(), seed=0)
    yield
    parallel.stop()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("name", "dtype", "recompute"),
    [
        *((name, dtype, "none") for name in CONFIGS for dtype in ("float32", "bfloat16")),
        *((name, "float32", "selective") for name in ("llama", "qwen3_moe", "glm4_moe")),
    ],
)
def test_megatron_saves_what_the_formula_says(name: str, dtype: Any, recompute: Any):
    from slimectl.architectures.parallel import ParallelLayout
    from slimectl.policies.megatron.batch import packed
    from slimectl.policies.megatron.model import build

    options = TrainerOptions(dtype=dtype, recompute=Recompute(recompute, MODULES[name]))
    (model,) = build(_architecture(name), options, MegatronOptions())
    model.train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    tokens = LENGTH * SEQUENCES
    pack = packed([LENGTH] * SEQUENCES, ParallelLayout(), rank=0, device=torch.device("cpu"))
    tokens_T = torch.randint(0, SHAPE["vocab_size"], (tokens,), generator=torch.manual_seed(0))
    measured = saved_bytes(lambda: model(tokens_T, pack), model.parameters())
    run = Run(
        1, dtype=dtype, recompute=recompute, seq_len=LENGTH, max_tokens_per_gpu=tokens, device="cpu",
        recompute_modules=MODULES[name],
    )  # fmt: skip
    assert measured == pytest.approx(layers_alone(name, run), rel=0.02)
