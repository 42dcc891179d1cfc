"""Models that a provider builds itself, as slime's providers do, against the built-in model of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from policies.policy_cases import Clipped, random_rows
from rank_cases import megatron
from torch import Tensor, nn

from slimectl.architectures.registry import family_of
from slimectl.errors import CheckpointError, HookError, SettingsError
from slimectl.plugins.callables import Hook
from slimectl.policies.megatron.hooks import UserFunctions
from slimectl.policies.megatron.parameters import global_name

ModelDir = Callable[..., Path]
VOCABULARY = 259


def own_config(**changes: Any) -> TransformerConfig:
    """The shape of the fixture `four_layers("dense")`, written by hand."""
    fields: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
        "kv_channels": 16, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "gated_linear_unit": True,
        "activation_func": F.silu, "add_bias_linear": False, "qk_layernorm": True, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "params_dtype": torch.float32, "use_cpu_initialization": True,
        "apply_rope_fusion": False, "bias_activation_fusion": False, "persist_layer_norm": False,
    }  # fmt: skip
    return TransformerConfig(**(fields | changes))


def gpt(config: Any, spec: Any, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=256,
        pre_process=pre_process, post_process=post_process, share_embeddings_and_output_weights=False,
        position_embedding_type="rope", rotary_base=10000, vp_stage=vp_stage,
    )  # fmt: skip


def local_spec() -> Any:
    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def padded(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    """slime's signature; its DotProductAttention reads no packs."""
    return gpt(own_config(), local_spec(), pre_process, post_process, vp_stage)


class PackedAttention(nn.Module):
    """Attention of one sequence of a pack after the other, as TransformerEngine's computes it."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any, **options: Any):
        ends, outputs = packed_seq_params.cu_seqlens_q.tolist(), []
        for start, end in pairwise(ends):
            q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def packed(pre_process: bool, post_process: bool, vp_stage: int | None, config: Any, vocab_size: int) -> GPTModel:
    assert vocab_size == VOCABULARY
    spec = local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return gpt(config, spec, pre_process, post_process, vp_stage)


def with_provider(model_dir: Path, provider: Callable[..., Any], **options: Any) -> Any:
    offers = ("args", "pre_process", "post_process", "vp_stage", "build", "config", "vocab_size")
    setting = "megatron.custom_model_provider_path"
    hook = Hook("own.py:provider", setting=setting, offers=offers, function=provider)
    return megatron(model_dir, user_functions=UserFunctions(None, None, hook, None, None), **options)


@pytest.mark.parametrize("provider", [padded, packed])
def test_a_model_of_the_users_computes_what_the_built_in_one_does(four_layers: ModelDir, provider: Any):
    rows = random_rows()
    expected, own = megatron(four_layers("dense")), with_provider(four_layers("dense"), provider)
    for ours, theirs in zip(expected.log_probs(rows), own.log_probs(rows), strict=True):
        assert theirs == pytest.approx(ours, abs=2e-5)
    for policy in (expected, own):
        policy.metrics = policy.forward_backward(rows, Clipped()) | policy.optim_step()
    assert own.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4)
    assert own.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    trained = dict(expected.weights())
    for name, tensor in own.weights():  # what an engine gets, by Hugging Face's names
        torch.testing.assert_close(tensor, trained[name], atol=1e-5, rtol=1e-3)


def renamed(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    model = padded(pre_process, post_process, vp_stage)
    model.extra = nn.Parameter(torch.zeros(2))
    return model


def narrow(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    return gpt(own_config(ffn_hidden_size=80), local_spec(), pre_process, post_process, vp_stage)


def shallow(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    return gpt(own_config(num_layers=2), local_spec(), pre_process, post_process, vp_stage)


def without_norms(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return gpt(own_config(qk_layernorm=False), spec, pre_process, post_process, vp_stage)


def nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("provider", "error", "message"),
    [
        (renamed, SettingsError, "has a parameter extra, which no weight of config.json's family is converted to"),
        (narrow, SettingsError, r"linear_fc1.weight has shape \[160, 64\], config.json asks for \[192, 64\]"),
        (shallow, SettingsError, "config has num_layers = 2, but config.json and the settings have 4"),
        (without_norms, SettingsError, "has no parameter decoder.layers.0.self_attention.k_layernorm.weight"),
        (nothing, HookError, "Return the result of build.., or a GPTModel of megatron-core"),
    ],
)
def test_a_model_that_weights_do_not_fit_is_refused_by_name(
    four_layers: ModelDir, provider: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        with_provider(four_layers("dense"), provider)


def test_norms_inside_transformer_engines_layers_have_the_names_of_norms_beside_them():
    layers = [SimpleNamespace(layer_number=3)]
    chunk: Any = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    named = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight": "decoder.layers.2.self_attention.linear_qkv.weight",
    }
    assert {name: global_name(name, chunk) for name in named} == named


def test_an_architecture_without_weight_names_is_refused_with_the_way_to_add_them():
    with pytest.raises(CheckpointError, match=r"has no weight mapping. .* CONTRIBUTING, recipe 3"):
        family_of({"model_type": "brand_new"})
