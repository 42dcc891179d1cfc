"""The schema of settings files takes what the program takes, and names a mistake where an editor shows it."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from slimectl import __version__, recipes
from slimectl.settings import Settings
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.keys import settings_toml
from slimectl.settings.reference import json_schema

RECIPES = sorted(Path(recipes.__file__).parent.glob("*.toml"))


@cache
def validator() -> jsonschema.Draft202012Validator:
    """Return the validator of the schema, which is checked itself once: that takes two seconds."""
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def faults(document: dict[str, Any]) -> list[str]:
    """Return the places of a document that the schema refuses."""
    errors = validator().iter_errors(document)
    return sorted(".".join(map(str, error.absolute_path)) for error in errors)


def test_the_schema_names_its_dialect_and_itself_and_every_algorithm() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:slimectl:settings:{__version__}"
    assert schema["properties"]["algorithm"]["properties"]["name"]["enum"] == list(ALGORITHMS)


@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_recipes_pass(file: Path) -> None:
    assert faults(tomllib.loads(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", [*ALGORITHMS])
def test_the_settings_that_a_run_writes_down_pass(name: str) -> None:
    settings = Settings.model_validate({"algorithm": {"name": name}, "run": {"keep_checkpoints": None}})
    document = tomllib.loads(settings_toml(settings))
    assert document["run"]["keep_checkpoints"] == "none"
    assert faults(document) == []


def test_an_algorithm_is_judged_by_its_name_and_without_one_as_the_default() -> None:
    assert faults({"algorithm": {"eps_clip": 0.1}}) == []
    assert faults({"algorithm": {"name": "dpo", "beta": 0.2}}) == []
    assert faults({"algorithm": {"name": "sft", "beta": 0.2}}) == ["algorithm"]
    assert faults({"algorithm": {"name": "grop"}}) == ["algorithm.name"]
    assert faults({"train": {"lr": "high"}, "run": {"keep_checkpoints": "some"}}) == [
        "run.keep_checkpoints",
        "train.lr",
    ]
