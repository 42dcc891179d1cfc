"""torch_dist names: mcore's own sharded_state_dict has exactly these keys, shapes and offsets."""

from __future__ import annotations

import math
from collections import Counter
from importlib.util import find_spec

import pytest
from hf_models import CONFIGS, config_of

from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.registry import family_of
from slimectl.architectures.torch_dist_keys import KeyStyle, ShardKey, detect_key_style, key_style, shard_key, tensors
from slimectl.errors import CheckpointError


def layer_of(name):
    config = config_of(name)
    return family_of(config).architecture(config).layer


PLAIN = [name for name in CONFIGS if layer_of(name) == "plain"]
"""Families whose layers are mcore's own."""


@pytest.fixture(scope="module", autouse=True)
def world():
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    from mcore import alone

    with alone():
        yield


def parts(name):
    config = config_of(name)
    family = family_of(config)
    return family.links(config), family.architecture(config)


def own_model(architecture):
    """The model that slimectl trains."""
    from slimectl.policies.megatron.model import build
    from slimectl.policies.options import MegatronOptions, TrainerOptions

    (model,) = build(architecture, TrainerOptions(), MegatronOptions())
    return model


@pytest.mark.parametrize("name", PLAIN)
def test_model_of_mcore_stores_the_same_keys_shapes_and_offsets(name):
    from mcore import bare_model

    links, architecture = parts(name)
    compare(bare_model(architecture), tensors(links, architecture))


@pytest.mark.parametrize("name", CONFIGS)
def test_model_that_is_trained_stores_the_same_keys_shapes_and_offsets(name):
    links, architecture = parts(name)
    compare(own_model(architecture), tensors(links, architecture))


def compare(model, ours):
    from mcore import sharded

    theirs = sharded(model)
    assert set(theirs) == set(ours)
    for key, pieces in ours.items():
        whole = {(*region.counts, *region.shape) for _, region in pieces}
        assert whole == {piece.global_shape for piece in theirs[key]}, key
        # gate and up of a fused matrix are two pieces of theirs and one region of ours
        starts = {piece.global_offset[: piece.prepend_axis_num] for piece in theirs[key]}
        assert {region.offsets for _, region in pieces} == starts, key


@pytest.mark.parametrize("name", PLAIN)
def test_parameters_of_mcores_model_are_those_of_the_links(name):
    from mcore import bare_model

    links, architecture = parts(name)
    state = {key: value for key, value in bare_model(architecture).state_dict().items() if "_extra_state" not in key}
    theirs = {key: tuple(value.shape) for key, value in state.items() if value is not None}
    assert theirs == {link.megatron: link.shape for link in links}


def test_layers_that_mcore_is_told_to_keep_apart_have_keys_of_their_own():
    from mcore import bare_model, sharded

    links, architecture = parts("qwen3")
    theirs = sharded(bare_model(architecture), non_homogeneous_layers=True)
    assert set(theirs) == set(tensors(links, architecture, KeyStyle(stacked=False)))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_regions_fill_every_tensor_exactly_once(name, fused, stacked):
    links, architecture = parts(name)
    stacked = stacked and key_style(architecture).stacked
    for key, pieces in tensors(links, architecture, KeyStyle(stacked, fused)).items():
        assert len({(region.counts, region.shape) for _, region in pieces}) == 1, key
        offsets = Counter(region.offsets for _, region in pieces)
        assert set(offsets.values()) == {1}, key
        assert len(offsets) == math.prod(pieces[0][1].counts), key


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
def test_naming_is_found_from_the_keys(name, fused):
    links, architecture = parts(name)
    how = key_style(architecture, fused=fused)
    keys = tensors(links, architecture, how)
    assert set(tensors(links, architecture, detect_key_style(keys, links, architecture))) == set(keys)


def test_key_that_is_missing_is_named():
    links, architecture = parts("qwen3")
    keys = set(tensors(links, architecture)) - {"decoder.layers.mlp.linear_fc2.weight"}
    with pytest.raises(CheckpointError, match=r"no tensor decoder\.layers\.mlp\.linear_fc2\.weight"):
        detect_key_style(keys, links, architecture)


def test_norm_takes_the_name_of_the_projection_after_it():
    _, architecture = parts("llama")
    norm = ParamMapping("decoder.layers.1.pre_mlp_layernorm.weight", ("norm",), ((32,),))
    assert shard_key(norm, architecture) == (
        ShardKey("decoder.layers.mlp.linear_fc1.layer_norm_weight", (1,), (2,), (32,), (0, 32)),
    )


FUSED = {
    "llama": {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    },
    "qwen3_moe": {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight",
    },
    "deepseek_v3": {
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
    },
    "qwen3_5": {
        "decoder.layers.0.self_attention.in_proj.layer_norm_weight",
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    },
}
"""Norms as the layers of TransformerEngine name them, in front of attention or MLP, in those that are told apart."""


@pytest.mark.parametrize("name", FUSED)
def test_norms_of_fused_modules_are_named_after_the_projection(name):
    links, architecture = parts(name)
    keys = tensors(links, architecture, key_style(architecture, fused=True))
    assert keys.keys() >= FUSED[name]


def test_blocks_of_a_delta_net_have_keys_of_their_own():
    links, architecture = parts("qwen3_5")
    link = next(link for link in links if link.megatron == "decoder.layers.1.self_attention.in_proj.weight")
    found = [(region.key.rpartition(".")[2], region.rows, region.shape) for region in shard_key(link, architecture)]
    # Two key heads of 6, four value heads of 10.
    assert found == [
        ("query", (0, 12), (12, 32)),
        ("key", (12, 24), (12, 32)),
        ("value", (24, 64), (40, 32)),
        ("z", (64, 104), (40, 32)),
        ("beta", (104, 108), (4, 32)),
        ("alpha", (108, 112), (4, 32)),
    ]


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_delta_net_of_mcore_has_the_same_parameters_and_keys(name, monkeypatch):
    from mcore import bare_delta_net, pieces

    monkeypatch.setattr("megatron.core.ssm.gated_delta_net.HAVE_FLA", True)  # it is not called, only looked for
    links, architecture = parts(name)
    prefix = "decoder.layers.0.self_attention."
    own = [link for link in links if link.megatron.startswith(prefix)]
    module = bare_delta_net(architecture)
    state = {key: value for key, value in module.state_dict().items() if "_extra_state" not in key}
    assert {prefix + key: tuple(value.shape) for key, value in state.items()} == {
        link.megatron: link.shape for link in own
    }
    theirs = {piece.key: piece.global_shape for piece in pieces(module.sharded_state_dict(prefix))}
    assert theirs == {key: regions[0][1].shape for key, regions in tensors(own, architecture).items()}
