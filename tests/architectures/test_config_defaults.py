"""Defaults of configurations are those of transformers' classes; this file also writes the table of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, SHAPE
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slimectl.architectures import cards, config_defaults
from slimectl.architectures.config import with_defaults
from slimectl.architectures.config_defaults import STAND_INS, with_known_defaults
from slimectl.architectures.image_tokens import MODEL_TYPES as READING_IMAGES
from slimectl.architectures.registry import FAMILIES as REGISTERED
from slimectl.architectures.registry import family_of
from slimectl.errors import CheckpointError

TABLE = Path(config_defaults.__file__).with_suffix(".json")
GENERIC = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {
    "model_type", "_name_or_path", "output_attentions", "id2label", "label2id",
}  # fmt: skip
"""Keys of every configuration: how a model of transformers is called, not what it is."""


def table_of(model_type: str) -> dict[str, Any]:
    """What the configuration class of a model states."""
    cls = CONFIG_MAPPING[model_type]
    plain = cls()
    fields = {
        cls.attribute_map.get(field.name, field.name): field.default
        for field in dataclasses.fields(cls)
        if field.name not in GENERIC and field.init
    }
    fields |= {name: getattr(plain, name) for name in fields if name.endswith("_token_id")}
    is_linear = "linear_conv_kernel_dim" in fields
    return {
        "fields": fields,
        "aliases": cls.attribute_map,
        "theta": cls.default_theta,
        "rotary": plain.rope_parameters.get("partial_rotary_factor"),
        "interval": plain.layer_types.index("full_attention") + 1 if is_linear else None,
        "head_dim_is_rotary": "head_dim" not in fields and "head_dim" in plain.to_dict(),
        "no_window": getattr(plain, "sliding_window", None),
    }


def known_types() -> list[str]:
    """The types of families whose defaults are plain: those of vision towers and windows are left to transformers."""
    families = [
        family
        for family in REGISTERED.values()
        if not set(family.model_types) & set(READING_IMAGES) and family.windows is None
    ]
    types = {STAND_INS.get(name, name) for family in families for name in family.model_types}
    return sorted(name for name in types if "vision_config" not in CONFIG_MAPPING[name]().to_dict())


def written_table() -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(table_of(name))}" for name in known_types())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def complete_by_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    model_type = raw["model_type"]
    complete = AutoConfig.for_model(**{**raw, "model_type": STAND_INS.get(model_type, model_type)}).to_dict()
    return json.loads(json.dumps({**complete, "model_type": model_type}, default=str))


def test_the_table_is_what_the_classes_state():
    assert TABLE.read_text(encoding="utf-8") == written_table(), f"run python {__file__}"


def check(raw: dict[str, Any]) -> None:
    ours, theirs = with_known_defaults(raw), complete_by_transformers(raw)
    assert ours is not None
    ours, theirs = cards.language_model(ours), cards.language_model(theirs)
    assert ours["model_type"] == theirs["model_type"] or "text_config" in raw
    known = GENERIC | {"model_type"}
    assert {key: value for key, value in ours.items() if key not in known and theirs.get(key) != value} == {}
    assert theirs.keys() - ours.keys() <= known | {"partial_rotary_factor"}  # which rope_parameters has, too
    assert family_of(ours).architecture(ours) == family_of(theirs).architecture(theirs)


def has_known_defaults(name: str) -> bool:
    config = cards.load(name)["config"]
    return config["model_type"] not in READING_IMAGES and family_of(config).windows is None


@pytest.mark.parametrize("name", filter(has_known_defaults, cards.names()))
def test_a_card_is_completed_as_by_transformers(name: str):
    check(cards.load(name)["config"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_model_is_completed_as_by_transformers(name: str):
    check(SHAPE | FAMILIES[name])


@pytest.mark.parametrize(
    "values",
    [
        {"torch_dtype": "bfloat16"},
        {"rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": 2},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"layer_types": ["full_attention"] * 36, "quantization_config": {"bits": 4}},
    ],
)
def test_values_as_checkpoints_write_them_are_completed_as_by_transformers(values: dict[str, Any]):
    check(cards.load("qwen3-4B")["config"] | values)


@pytest.mark.parametrize(
    ("card", "values"),
    [
        ("qwen3-4B", {"hidden_size": "2560"}),
        ("qwen3-4B", {"use_sliding_window": True, "sliding_window": 4096}),
        ("qwen3-4B", {"rope_scaling": {"rope_type": "longrope"}}),
        ("qwen3-4B", {"model_type": "gemma3_text"}),
        ("glm5.2-744B-A40B", {"index_topk_pattern": "FS"}),
        ("qwen3-30B-A3B", {"num_local_experts": 64}),
        ("tiny-vl", {}),
        ("tiny-vl3", {}),
    ],
)
def test_what_only_transformers_can_tell_is_left_to_it(card: str, values: dict[str, Any]):
    assert with_known_defaults(cards.load(card)["config"] | values) is None


def test_a_value_of_a_wrong_type_is_refused_by_its_class():
    with pytest.raises(CheckpointError, match="hidden_size"):
        with_defaults(cards.load("qwen3-4B")["config"] | {"hidden_size": "2560"})


if __name__ == "__main__":
    TABLE.write_text(written_table(), encoding="utf-8")
