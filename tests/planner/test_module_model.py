"""Plans of models that only transformers knows: exact parameters, and activations named as approximate."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.architectures.config import with_defaults
from slimectl.errors import CheckpointError, SettingsError
from slimectl.planner import plan as planner
from slimectl.planner.parameters import activated, count
from slimectl.planner.plan import any_model_of, model_of
from slimectl.planner.workload import Run

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "lfm2": SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "mixtral": SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
    "git": SHAPE
    | {
        "intermediate_size": 48,
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
}


def run(**options: Any) -> Run:
    defaults: dict[str, Any] = {"world": 1, "policy": "fsdp", "seq_len": 16, "max_tokens_per_gpu": 64}
    return Run(layout=planner.ParallelLayout(), **defaults | options)


@pytest.mark.parametrize("model_type", MODELS)
def test_parameters_are_those_of_the_module(model_type: str):
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    parts = any_model_of(with_defaults(config.to_dict())).parts
    assert count(parts) == sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def test_a_token_uses_only_its_experts():
    model = any_model_of(with_defaults({"model_type": "mixtral"} | MODELS["mixtral"]))
    # Two of four experts a token; an expert has three matrices of 32 x 48, in two layers.
    assert count(model.parts) - activated(model.parts, model.architecture) == 2 * 2 * 3 * 32 * 48


def test_towers_for_other_inputs_than_text_are_not_trained():
    [policy] = any_model_of(with_defaults({"model_type": "git"} | MODELS["git"])).all
    assert 0 < count(policy.parts, "vision") == count(policy.parts) - count(policy.trained)


def test_adapters_of_linear_layers_are_counted():
    model = any_model_of(
        with_defaults({"model_type": "lfm2"} | MODELS["lfm2"]), lora_rank=4, lora_targets=["q_proj", "in_proj"]
    )
    # q_proj 32 x 32 of one layer and in_proj 32 x 96 of the other.
    assert count(model.adapters) == 4 * (32 + 32) + 4 * (32 + 96)


def test_activations_are_named_approximate_and_megatron_is_refused():
    model = any_model_of(with_defaults({"model_type": "gpt2"} | MODELS["gpt2"]))
    planned = planner.PlannedRun({}, model, run(), 1, 1, 0.8, None, False, False)
    found = planner.plan_run(planned, memory_gib=1)
    assert found.fits
    names = [figure.name for figure in found.sections["training memory"]]
    assert "activations (approximate)" in names
    assert "activations" not in names
    with pytest.raises(SettingsError, match=r"--backend megatron: gpt2 models have no weight mapping\. Add --backend"):
        planner.check(model, run(policy="megatron"))


def test_known_families_are_planned_as_before():
    config = with_defaults({"model_type": "llama"} | SHAPE | {"intermediate_size": 48})
    assert any_model_of(config) == any_model_of(config, fsdp=True) == model_of(config)


def test_a_model_that_transformers_cannot_build_is_an_error():
    with pytest.raises(CheckpointError, match=r"model_type 'nova9': transformers .* does not know it\. Upgrade"):
        with_defaults({"model_type": "nova9"})
    with pytest.raises(CheckpointError, match=r"cannot build a causal model of type vit"):
        any_model_of({"model_type": "vit"})


def test_fsdp_plans_layers_of_known_families_that_its_formulas_lack():
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    more = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    config = with_defaults({"model_type": "qwen3_5_text"} | SHAPE | linear | more)
    exact, approximate = any_model_of(config), any_model_of(config, fsdp=True)
    assert (exact.approximate, approximate.approximate) == ("", "qwen3_5_text")
    assert count(approximate.parts) == count(exact.parts)
    planner.check(approximate, run())
