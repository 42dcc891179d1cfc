"""Layers for multi-token prediction, as GLM-4.5 and DeepSeek-V3 are published with, are in every saved checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, new_policy, random_rows
from rank_cases import Ranks, megatron
from safetensors.torch import load_file, save_file

from slimectl.architectures.parallel import ParallelLayout
from slimectl.checkpoints.create import create_model
from slimectl.data.convert_options import ConvertOptions
from slimectl.policies.lora import LoraOptions
from slimectl.runtime.builders import convert_checkpoint

WIDTH, LAYER = 32, "model.layers.2."
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
FAMILIES = {"glm4_moe": {}, "deepseek_v3": LATENT}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family with a third layer, which has the names of published checkpoints and is bfloat16."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp(family)
            create_model(SHAPE | FAMILIES[family] | {"model_type": family}, folder, seed=3)
            tensors = load_file(folder / "model.safetensors")
            vocabulary = tensors["lm_head.weight"].shape[0]
            spare = {n.replace(".1.", ".2.", 1): t for n, t in tensors.items() if n.startswith("model.layers.1.")}
            spare |= {f"{LAYER}{n}.weight": torch.ones(WIDTH) for n in ("enorm", "hnorm", "shared_head.norm")}
            spare |= {
                f"{LAYER}{n}.weight": torch.randn(vocabulary, WIDTH) for n in ("embed_tokens", "shared_head.head")
            }
            spare[f"{LAYER}eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH)
            spare = {name: tensor.bfloat16() for name, tensor in spare.items()}
            save_file(tensors | spare, folder / "model.safetensors", metadata={"format": "pt"})
        return folders[family]

    return make


def spare_layer(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("model*.safetensors")
    return {name: t for file in files for name, t in load_file(file).items() if name.startswith(LAYER)}


def trained(policy: Any) -> Any:
    policy.forward_backward(random_rows(groups=2), Clipped())
    policy.optim_step()
    return policy


def assert_carried(saved: Path, source: Path) -> None:
    """The saved model has every tensor of the source; those of the spare layer have every bit."""
    before, after = spare_layer(source), spare_layer(saved)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == torch.bfloat16 for name in before)
    assert json.loads((saved / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp_saves_them_from_any_checkpoint_that_it_loads(
    family: str, published: Callable[[str], Path], tmp_path: Path
):
    policy = trained(new_policy(published(family)))
    assert not any(name.startswith(LAYER) for name, _ in policy.weights())  # engines do not load them
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        policy.save(tmp_path / name)
        policy.load(tmp_path / name)
        assert_carried(tmp_path / name, published(family))


def test_fsdp_saves_them_beside_merged_adapters(published: Callable[[str], Path], tmp_path: Path):
    policy = trained(new_policy(published("glm4_moe"), lora=LoraOptions(2, 4.0, ("q_proj",))))
    policy.save(tmp_path)
    assert_carried(tmp_path, published("glm4_moe"))


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_saves_them_in_either_format(family: str, published: Callable[[str], Path], tmp_path: Path):
    for save_format in ("hf", "torch_dist"):
        policy = trained(megatron(published(family), save_format=save_format))
        (tmp_path / save_format).mkdir()
        policy.save(tmp_path / save_format)
    assert_carried(tmp_path / "hf", published(family))
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "converted", ConvertOptions(logits=0))
    assert_carried(tmp_path / "converted", published(family))
    # Either trainer starts from the torch_dist folder, and carries them on.
    (tmp_path / "again").mkdir()
    new_policy_from_torch_dist(tmp_path / "torch_dist").save(tmp_path / "again")
    assert_carried(tmp_path / "again", published(family))


def new_policy_from_torch_dist(folder: Path) -> Any:
    from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
    from slimectl.policies.fsdp.policy import FsdpPolicy
    from slimectl.policies.optimizer import OptimizerOptions
    from slimectl.policies.options import TrainerOptions

    return FsdpPolicy(folder, ModelCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3)))


@pytest.mark.slow
def test_two_ranks_share_them(two: Ranks, published: Callable[[str], Path], tmp_path: Path):
    two.build(published("deepseek_v3"), layout=ParallelLayout(expert=2), save_format="torch_dist")
    trained(two)
    (tmp_path / "torch_dist").mkdir()
    two.save(tmp_path / "torch_dist")
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "converted", ConvertOptions(logits=0))
    assert_carried(tmp_path / "converted", published("deepseek_v3"))


@pytest.mark.parametrize("new", [new_policy, megatron])
def test_a_config_with_layers_that_are_missing_says_none(
    new: Callable[[Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    create_model(SHAPE | {"model_type": "glm4_moe"}, tmp_path / "model", seed=3)
    (tmp_path / "saved").mkdir()
    with caplog.at_level(logging.WARNING, logger="slimectl"):
        new(tmp_path / "model").save(tmp_path / "saved")
    assert "no layers for multi-token prediction, so num_nextn_predict_layers is 0 in" in caplog.text
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == 0
