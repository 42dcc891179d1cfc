"""Every family: what transformers writes to disk, through the links and back, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hf_models import CONFIGS, DELTA, SMALL, VISION, config_of, saved
from safetensors.torch import load_file
from vision_models import CONFIGS as VISION_CONFIGS
from vision_models import vision_model

from slimectl.architectures.config import read_config
from slimectl.architectures.registry import FAMILIES, family_of
from slimectl.checkpoints.hf import InMemoryWeights
from slimectl.checkpoints.validate import UnfusedExperts
from slimectl.errors import CheckpointError


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The tensors of a family's checkpoint, written once, with separate ones for each expert."""
    written: dict[str, dict[str, torch.Tensor]] = {}

    def tensors(name: str) -> dict[str, torch.Tensor]:
        if name not in written:
            folder: Path = saved(name, tmp_path_factory.mktemp("model"))
            tensors = InMemoryWeights(load_file(folder / "model.safetensors").items())
            separate = UnfusedExperts(tensors, family_of(config_of(name)))
            written[name] = {part: separate.get(part) for part in separate.forms()}
        return written[name]

    return tensors


def links_of(name):
    config = config_of(name)
    return family_of(config).links(config)


def test_every_family_has_a_model_here():
    assert {*(family_of(config_of(name)).name for name in CONFIGS), *VISION_CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_on_disk_has_exactly_one_place(name, on_disk):
    tensors, links = on_disk(name), links_of(name)
    used = [part for link in links for part in link.hf]
    assert sorted(used) == sorted(tensors)
    assert len({link.megatron for link in links}) == len(links)
    for link in links:
        assert link.shapes == tuple(tuple(tensors[part].shape) for part in link.hf), link


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_changes_no_byte(name, on_disk):
    tensors = on_disk(name)
    for link in links_of(name):
        whole = link.to_megatron([tensors[part] for part in link.hf])
        assert tuple(whole.shape) == link.shape
        shards = [link.split.shard(whole, rank, 2) for rank in range(2)] if link.split else [whole]
        joined = link.split.joined(shards) if link.split else shards[0]
        for part, tensor in link.to_hf(joined):
            assert torch.equal(tensor, tensors[part]), part


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_of_distinct_tensors_never_meet(name):
    """A join may move numbers, not lose or mix them: every element is found again under its own name."""
    first = 0
    for link in links_of(name):
        parts = []
        for shape in link.shapes:
            count = torch.Size(shape).numel()
            parts.append(torch.arange(first, first + count).reshape(shape))
            first += count
        whole = link.to_megatron(parts)
        assert torch.equal(whole.flatten().sort().values, torch.cat([part.flatten() for part in parts]))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_vision_tower_is_carried(name, tmp_path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    raw = {"model_type": name, "text_config": {**SMALL, **DELTA}, "vision_config": VISION}
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(**raw)).save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), read_config(tmp_path)
    family = family_of(config)
    shapes = {part: shape for link in family.links(config) for part, shape in zip(link.hf, link.shapes, strict=True)}
    carried = {part for part in tensors if any(re.search(pattern, part) for pattern in family.carried)}
    assert {part: tuple(tensors[part].shape) for part in tensors.keys() - carried} == shapes
    assert {part.split(".")[1] for part in carried} == {"visual"}
    alone = {**config_of(name), "tie_word_embeddings": False}
    assert family.architecture(config) == family_of(alone).architecture(alone)


@pytest.mark.parametrize(("vision", "text"), [("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")])
def test_the_decoder_of_a_vision_model_is_that_of_a_language_model(vision, text, tmp_path):
    family = family_of(read_config(vision_model(tmp_path, vision)))
    tensors, config = load_file(tmp_path / "model.safetensors"), read_config(tmp_path)
    shapes = {part: shape for link in family.links(config) for part, shape in zip(link.hf, link.shapes, strict=True)}
    carried = {part for part in tensors if any(re.search(pattern, part) for pattern in family.carried)}
    assert {part: tuple(tensors[part].shape) for part in tensors.keys() - carried} == shapes
    assert {part.removeprefix("model.").split(".")[0] for part in carried} == {"visual"}
    plain = {**config["text_config"], "model_type": text, "tie_word_embeddings": config["tie_word_embeddings"]}
    assert family.architecture(config) == family_of(plain).architecture(plain)


def test_rotated_width_of_minimax_is_read_from_its_published_key():
    config = config_of("minimax_m2")
    assert family_of(config).architecture(config).rope.percent == 0.5  # rotary_dim 8 of 16


def test_experts_are_known_by_their_links():
    experts = {link.expert for link in links_of("qwen3_moe")}
    assert experts == {None, 0, 1, 2, 3}
    router = next(link for link in links_of("qwen3_moe") if link.megatron.endswith("router.weight"))
    assert router.expert is None


def test_unknown_architecture_names_those_that_are_known():
    with pytest.raises(CheckpointError, match=r"model_type 'bert' has no weight mapping. Supported: .*kimi_k2, llama"):
        family_of({"model_type": "bert"})


def test_spare_layers_are_carried_and_others_are_not():
    kimi, llama = family_of(config_of("kimi_k2")), family_of(config_of("llama"))
    carried = [bool(re.search(kimi.carried[-1], f"model.layers.{i}.eh_proj.weight")) for i in (1, 2, 3, 20)]
    assert carried == [False, True, False, False]
    assert not any(re.search(pattern, "model.layers.2.mlp.up_proj.weight") for pattern in llama.carried)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias True: llama models .* only with False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window True"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "num_experts_per_tok 2 over topk_group 2"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(name, change, message):
    config = {**config_of(name), **change}
    with pytest.raises(CheckpointError, match=message):
        family_of(config).architecture(config)
