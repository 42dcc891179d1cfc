"""Names on disk and in the module: transformers' own files are the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.checkpoints.module_tensors import ModuleTensors
from slimectl.errors import CheckpointError

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": EXPERTS,  # experts w1, w3, w2 in a block of another name
    "phimoe": EXPERTS,  # and a router of another name
    "gpt_oss": EXPERTS,  # fused experts on disk, in rows of inputs
    "deepseek_v3": EXPERTS | LATENT,  # a router's bias is a buffer
    "qwen3_5_moe_text": EXPERTS | LINEAR,
    "hrm_text": {},  # fused on disk, separate in the module
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


def build(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | MODELS[model_type])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def loaded(tensors: ModuleTensors, folder: Path) -> dict[str, Tensor]:
    return dict(tensors.to_module(HFCheckpoint().read(folder), folder))


def published(tensors: ModuleTensors, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for group in tensors.groups
        for name, tensor in tensors.to_published(group, {name: parameters[name] for name in group.parameters})
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("model_type", MODELS)
def test_tensors_load_and_are_published_as_transformers_does(model_type: str, tmp_path: Path):
    hf = build(model_type)
    hf.save_pretrained(tmp_path)
    tensors = ModuleTensors(build(model_type))
    found = loaded(tensors, tmp_path)
    state = hf.state_dict()
    assert {state[name].data_ptr() for name in found} == {tensor.data_ptr() for tensor in state.values()}
    assert_equal(found, {name: state[name] for name in found})
    assert_equal(published(tensors, found), load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("model_type", ["mixtral", "hrm_text"])
def test_a_checkpoint_under_the_modules_names_is_published_like_others(model_type: str, tmp_path: Path):
    hf = build(model_type)
    hf.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    hf.save_pretrained(tmp_path, save_original_format=False)
    assert load_file(tmp_path / "model.safetensors").keys() != expected.keys()
    tensors = ModuleTensors(build(model_type))
    assert_equal(published(tensors, loaded(tensors, tmp_path)), expected)


def test_names_of_a_vision_models_decoder_stay_as_they_are(tmp_path: Path):
    hf = build("qwen3_5_moe_text")
    hf.save_pretrained(tmp_path)
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(stored | {"model.visual.patch_embed.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    tensors = ModuleTensors(build("qwen3_5_moe_text"), stored=stored)
    found = loaded(tensors, tmp_path)
    assert tensors.carried == ["model.visual.patch_embed.weight"]
    assert_equal(published(tensors, found), stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.block_sparse_moe.experts.2.w3.weight": None}, r"no tensor for .*experts\.2\.w3\.weight"),
        ({"model.layers.1.block_sparse_moe.experts.4.w3.weight": torch.ones(48, 32)}, r"the model has no .*4\.w3"),
        ({"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.ones(8, 32)}, r"shape \[8, 32\], .* \[48, 32\]"),
        ({"model.layers.0.extra.weight": torch.ones(1)}, r"the model has no model\.layers\.0\.extra\.weight"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_errors(change: dict[str, Any], message: str, tmp_path: Path):
    hf = build("mixtral")
    hf.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors") | change
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        loaded(ModuleTensors(build("mixtral")), tmp_path)


def test_tensors_that_cannot_be_converted_are_an_error(tmp_path: Path):
    hf = build("hrm_text")
    hf.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if "gqkv_proj" in name)
    save_file(stored | {name: stored[name][:-4].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape|cannot convert"):
        loaded(ModuleTensors(build("hrm_text")), tmp_path)


def test_experts_of_an_unknown_layout_are_read_as_they_are_stored(tmp_path: Path):
    hf = build("gpt_oss")
    hf.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt_oss"
    assert HFCheckpoint().open(tmp_path).forms()["model.layers.0.mlp.experts.down_proj"][0] == (4, 48, 32)
