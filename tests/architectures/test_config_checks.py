"""Nonsense in config.json: one line that names the key, and no memory asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slimectl.architectures import cards
from slimectl.architectures.config import raw_config, with_defaults
from slimectl.architectures.config_checks import DTYPES, check_config
from slimectl.checkpoints.validate import ValidatedModel
from slimectl.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 259,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
CARDS = sorted(path.stem for path in (Path(__file__).parent.parent.parent / "models").glob("*.toml"))


def refusal(**changes: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        check_config({**CONFIG, **changes}, "config.json", weight_bytes=100_000)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
    return str(error.value).removesuffix(". Copy config.json and weights from the same checkpoint.")


@pytest.mark.parametrize("name", CARDS)
def test_the_configs_of_all_cards_pass(name: str):
    config = cards.load(name)["config"]
    check_config(config, name)
    check_config(with_defaults(config), name)


def test_every_type_of_weights_that_torch_has_passes():
    floating = {
        name for name, value in vars(torch).items() if isinstance(value, torch.dtype) and value.is_floating_point
    }
    assert floating - {"float8_e8m0fnu", "float4_e2m1fn_x2"} == DTYPES  # which hold scales, and pairs
    for name in DTYPES:
        check_config({**CONFIG, "dtype": name}, "config.json", weight_bytes=100_000)


@pytest.mark.parametrize(
    "value", [-1, 0, 0.5, 64.0, "64", True, None, [], {}, [64], float("nan"), float("inf"), 10**12, 10**4000, -(10**99)]
)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_size_is_a_number_within_reason(key: str, value: Any):
    assert refusal(**{key: value}).startswith(f"config.json: {key} ")
    assert "not a number from 1 to" in refusal(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, "num_attention_heads 4 is not a multiple of num_key_value_heads 8"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4, and there is no head_dim"),
        ({"head_dim": -16}, "head_dim -16, not a number from 1 to 8192"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05, not a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan, not a positive number"),
        ({"rope_theta": "10000"}, "rope_theta '10000', not a positive number"),
        ({"model_type": 7}, "model_type 7, not text"),
        ({"dtype": "nope"}, "dtype 'nope', not a weight dtype such as float32, bfloat16 or float16"),
        ({"torch_dtype": "int8"}, "torch_dtype 'int8', not a weight dtype such as float32, bfloat16 or float16"),
        ({"model_type": "a" * 10_000}, ""),
        ({"layer_types": "full_attention"}, "layer_types 'full_attention', not a list"),
        ({"layer_types": ["full_attention"] * 100_000}, "layer_types has 100000 entries"),
        ({"rope_parameters": []}, "rope_parameters a list, not an object"),
        ({"quantization_config": "fp8"}, "quantization_config 'fp8', not an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes', not true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>', not a token or a list of tokens"),
        ({"eos_token_id": [2, None]}, "eos_token_id a list, not a token or a list of tokens"),
        ({"num_experts": 2**13, "num_hidden_layers": 2**10}, "num_hidden_layers 1024 with 8192 experts each"),
        ({"vocab_size": 10_000}, "vocab_size 10000 x hidden_size 64 is too large for 100000 bytes of weights"),
        ({"num_hidden_layers": 2000}, "num_hidden_layers 2000 is too large for 100000 bytes of weights"),
        ({"text_config": {"hidden_size": "64"}}, "hidden_size '64', not a number from 1 to 262144"),
        ({"text_config": [7]}, "text_config a list, not an object"),
    ],
)
def test_other_nonsense_is_named(changes: dict[str, Any], message: str):
    if message:
        assert refusal(**changes) == f"config.json: {message}"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no such model"}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": 7}},
        {"rope_parameters": {"rope_theta": "x"}}, {"rope_parameters": {"rope_theta": [1]}}, {"model_type": "gpt2"},
        {"model_type": "deepseek_v3", "first_k_dense_replace": 10**3}, {"layer_types": [7, {}]}, {"model_type": ""},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"]},
    ],
)  # fmt: skip
def test_what_no_family_can_be_is_a_line(changes: dict[str, Any], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    try:
        ValidatedModel(with_defaults(raw_config(tmp_path)))
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_ids_of_minus_one_and_nulls_where_they_are_usual_pass():
    check_config({**CONFIG, "pad_token_id": -1, "num_key_value_heads": None, "head_dim": None}, "config.json")
    check_config({**CONFIG, "eos_token_id": [1, 2], "layer_types": None, "sliding_window": None}, "config.json")
