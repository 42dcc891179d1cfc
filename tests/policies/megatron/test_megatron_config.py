"""What [megatron.args] may say, and what becomes of an architecture's fields."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from model_cases import CASES, SHAPE
from policies.policy_cases import Clipped, random_rows
from rank_cases import megatron

from slimectl.architectures.config import Architecture, with_defaults
from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.megatron import ARGUMENTS
from slimectl.policies.megatron.config import ACTING, FP8_ARGUMENTS, Recompute, args_of, check_args, transformer_config


def architecture(name: str) -> Architecture:
    config = with_defaults({**SHAPE, **CASES[name]})
    return family_of(config).architecture(config)


def configured(name: str = "llama", layout: ParallelLayout = ParallelLayout(), **options):
    return transformer_config(architecture(name), layout, **{"dtype": torch.float32, **options})


def test_arguments_have_the_last_word():
    config = configured("qwen3_moe", args={"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"})
    assert (config.moe_aux_loss_coeff, config.moe_router_load_balancing_type) == (0.01, "aux_loss")


def test_arguments_go_to_the_class_that_takes_them():
    args = {"hidden_dropout": 0.1, "pin_cpu_grads": False, "bucket_size": 100}
    assert configured(args=args).hidden_dropout == 0.1
    assert args_of(args, OptimizerConfig) == {"pin_cpu_grads": False}
    assert args_of(args, DistributedDataParallelConfig) == {"bucket_size": 100}


def test_an_unknown_argument_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match=r"^megatron\.args\.moe_z_los_coeff: .*Did you mean moe_z_loss_coeff\?$"):
        configured(args={"moe_z_los_coeff": 1e-3})


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("tensor_model_parallel_size", r"megatron\.tensor_model_parallel_size"),
        ("sequence_parallel", r"megatron\.tensor_model_parallel_size"),
        ("bf16", r"train\.dtype"),
        ("lr", r"train\.lr"),
        ("recompute_granularity", r"train\.recompute_granularity"),
    ],
)
def test_an_argument_with_a_setting_of_its_own_is_refused(name, setting):
    with pytest.raises(
        SettingsError, match=rf"megatron\.args\.{name}: slimectl has a setting for this\. Set {setting}"
    ):
        configured(args={name: 2})


def test_what_megatron_core_refuses_is_one_line():
    with pytest.raises(SettingsError, match=r"^megatron-core rejects the configuration: ") as refusal:
        configured(args={"defer_embedding_wgrad_compute": True})
    assert "\n" not in str(refusal.value)


def test_tensor_parallelism_brings_sequence_parallelism():
    assert configured(layout=ParallelLayout(tensor=2)).sequence_parallel
    assert not configured().sequence_parallel


def test_recomputation_is_of_whole_layers_or_of_modules():
    full = configured(recompute=Recompute("full"))
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 1)
    some = configured(recompute=Recompute("selective", ("mlp",)))
    assert (some.recompute_granularity, some.recompute_modules) == ("selective", ["mlp"])


def test_yarn_is_squared_into_the_scale_of_latent_attention():
    # By hand: 24 dimensions a head; mscale 0.1 · 0.8 · ln 4 + 1 = 1.1109.
    assert configured("deepseek_v3_yarn").softmax_scale == pytest.approx(24**-0.5 * 1.110904**2, rel=1e-5)
    assert configured("deepseek_v3").softmax_scale == pytest.approx(24**-0.5)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"num_layers": 7}, "7, but the model's config.json sets it to 4"),
        ({"calculate_per_token_loss": False}, "False, but packed training needs True"),
    ],
)
def test_an_argument_that_would_make_another_model_is_refused(argument, reason):
    with pytest.raises(SettingsError, match=reason):
        configured(args=argument)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"fp8": "hybrid"}, r"fp8: hybrid has no effect \(low precision needs TransformerEngine: transformer_impl"),
        ({"mtp_num_layers": 1}, r"mtp_num_layers: 1 has no effect \(layers for multi-token prediction"),
        ({"attention_dropout": 0.1}, r"attention_dropout: 0.1 has no effect \(attention is slimectl's own"),
        ({"window_size": [8, 0]}, r"window_size: \[8, 0\] has no effect \(every token attends"),
        ({"attention_backend": "flash"}, r"attention_backend: flash has no effect \(attention is"),
        ({"activation_func_clamp_value": 7.0}, r"has no effect \(nothing here reads it\)\. Drop it"),
        ({"q_lora_rank": 8}, r"q_lora_rank: has no effect \(the model has no latent attention\)"),
    ],
)
def test_an_argument_that_nothing_acts_on_is_refused(argument, reason):
    with pytest.raises(SettingsError, match=rf"^megatron\.args\..*{reason}"):
        configured(args=argument)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_transformer_engine_that_is_not_installed_is_refused_with_the_command_that_installs_it():
    with pytest.raises(SettingsError) as refused:
        configured(args={"transformer_impl": "transformer_engine", "fp8": "hybrid"})
    assert str(refused.value) == (
        f"megatron.args.transformer_impl: transformer_engine is not installed for {sys.executable}. With a GPU run: "
        f"{sys.executable} -m pip install --no-build-isolation 'transformer-engine[pytorch]', or drop it"
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("deepseek_v3", "latent attention"), ("qwen3_moe", "experts"), ("qwen3_5", "linear attention")]
)
def test_transformer_engine_is_for_dense_layers(name: str, kind: str):
    with pytest.raises(SettingsError, match=f"transformer_engine, but layers with {kind} are megatron-core's local"):
        configured(name, args={"transformer_impl": "transformer_engine"})


def test_layers_multiply_by_megatron_cores_own_products():
    assert configured().transformer_impl == "local"


def test_an_argument_may_say_what_is_so_anyway():
    assert configured(args={"attention_dropout": 0.0, "mtp_num_layers": None}) == configured()
    assert configured(args={"transformer_impl": "local"}).num_layers == configured().num_layers


def test_an_argument_that_the_optimizer_ignores_is_refused(four_layers):
    for argument, reason in (({"decoupled_lr": 0.1}, "all weights have train.lr"), ({"sgd_momentum": 0.5}, "AdamW")):
        with pytest.raises(SettingsError, match=rf"has no effect \(.*{reason}"):
            megatron(four_layers(), args=argument)


ACTS = {
    "dense": [{"hidden_dropout": 0.5}, {"softmax_scale": 0.5}, {"apply_wd_to_qk_layernorm": True}],
    "experts": [
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0},
        {"moe_z_loss_coeff": 1.0},
        {"moe_input_jitter_eps": 0.5},
        {"moe_router_dtype": "fp64"},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_router_force_load_balancing": True},
    ],
}
"""Arguments that decide numbers, by the kind of model."""


@pytest.mark.parametrize("kind", ACTS)
def test_arguments_that_decide_numbers_change_the_step(four_layers, kind):
    def weights(**options):
        torch.manual_seed(0)
        policy = megatron(four_layers(kind), **options)
        policy.forward_backward(random_rows(groups=2), Clipped())
        policy.optim_step()
        return torch.cat([tensor.flatten().double() for _, tensor in policy.weights()])

    plain = weights()
    assert torch.equal(weights(), plain)
    idle = [argument for argument in ACTS[kind] if torch.equal(weights(args=argument), plain)]
    assert idle == []


def test_every_argument_that_launch_scripts_bring_is_one_that_acts():
    keys = [row.key for row in ARGUMENTS if row.key.startswith("megatron.args.")]
    names = {key.removeprefix("megatron.args.") for key in keys}
    assert names - ACTING - FP8_ARGUMENTS == set()
    check_args(dict.fromkeys(names, 0))
