"""Model cards: TOML descriptions of architectures (models/*.toml), used without a checkpoint or to check one.

family = "qwen3"            the weight mapping in architectures/
aliases = ["deepseek-r1"]   other models of this architecture, which find the same card
parameters = 596_049_920    and `activated`, if a token does not use all of them
null = ["q_lora_rank"]      keys of [config] that are null in config.json: TOML has no null
[config]                    the contents of config.json
[image_processor]           min_pixels and max_pixels of the images of a new model
[layout.gpus_8]             a parallel layout that fits, or a `note` on why none does
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

from slimectl.errors import CheckpointError, SettingsError

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Alternative keys of the rotary embedding, which are compared by meaning."""
DERIVED = ("layer_types", "mlp_layer_types")
"""Lists that a configuration class derives from other keys, and the keys that it then drops."""
NOT_COMPARED = ("max_position_embeddings", *ROPE_KEYS)
"""Keys that are not compared. The maximum position does not affect outputs and varies within an architecture."""

Difference = tuple[str, Any, Any]
"""(key, value in the card, value in the checkpoint)."""


def folder() -> Path:
    """Return the folder of the cards: inside the installed package, or at the top of a source tree."""
    installed = Path(__file__).parents[1] / "models"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "models"


def names() -> list[str]:
    """Return the names of all cards, sorted by size: 4B before 14B."""
    return sorted((file.stem for file in folder().glob("*.toml")), key=_by_number)


def _by_number(name: str) -> list[tuple[float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]


@functools.cache
def aliases(cards: Path) -> dict[str, str]:
    """Return the aliases of the cards in this folder, as {alias: card}."""
    by_name: dict[str, str] = {}
    for file in sorted(cards.glob("*.toml")):
        with file.open("rb") as content:
            by_name |= dict.fromkeys(tomllib.load(content).get("aliases", []), file.stem)
    return by_name


def path_of(name: str) -> Path:
    """Return the file of a card, by its name, an alias or a hub id, in any spelling.

    Raises SettingsError with the closest name.
    """
    card = named(name)
    if card is None:
        lowered = {each.lower(): card for each, card in _spellings().items()}
        matches = difflib.get_close_matches(name.rpartition("/")[2].lower(), lowered, n=1)
        hint = f"Did you mean {lowered[matches[0]]}?" if matches else f"Known cards: {', '.join(names())}"
        raise SettingsError(f"model.card: no card {name!r}. {hint}")
    return folder() / f"{card}.toml"


def named(name: str) -> str | None:
    """Return the name of the card for a name, an alias or a hub id, in any spelling, or None."""
    if name in names():
        return name
    return next((card for each, card in _spellings().items() if spelling(each) == spelling(name)), None)


def _spellings() -> dict[str, str]:
    """Return the card of every name and alias."""
    return aliases(folder()) | {card: card for card in names()}


def spelling(name: str) -> str:
    """Return the canonical spelling of a model's name: no organisation, no capitals, dots only between digits.

    >>> spelling("meta-llama/Llama-3.1_8B"), spelling("llama3-1-8b")
    ('llama3.1.8b', 'llama3.1.8b')
    """
    text = re.sub(r"(?<=\d)[^a-z0-9]+(?=\d)", ".", name.rpartition("/")[2].lower())
    return re.sub(r"[^a-z0-9.]+|(?<!\d)\.|\.(?!\d)", "", text)


def load(name: str) -> dict[str, Any]:
    """Load the card of that name. Raises SettingsError with the closest name."""
    with path_of(name).open("rb") as file:
        card = tomllib.load(file)
    card["config"] |= dict.fromkeys(card.get("null", []))
    return card


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, even if it is a part of a larger one."""
    return config.get("text_config") or config


def differences(card: dict[str, Any], config: dict[str, Any]) -> list[Difference]:
    """Return the differences between a checkpoint and a card. `config` must be complete (config.read_config).

    Only keys of the card are compared, in any spelling, with defaults filled in on both sides. A key that is missing
    from the checkpoint is not a difference.
    """
    from slimectl.architectures.config import head_dim, with_defaults

    stated, expected = language_model(card["config"]), language_model(with_defaults(card["config"]))
    actual = language_model(config)
    if expected["model_type"] != actual.get("model_type"):
        return [("model_type", expected["model_type"], actual.get("model_type"))]
    differing = _rope_differences(expected, actual)
    for key in [*stated, *(key for key in DERIVED if expected["num_hidden_layers"] == actual.get("num_hidden_layers"))]:
        value = head_dim(actual) if key == "head_dim" else actual.get(key, expected.get(key))
        if key not in NOT_COMPARED and expected.get(key) != value:
            differing.append((key, expected.get(key), value))
    return differing


def _rope_differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[Difference]:
    from slimectl.architectures.config import rope

    expected_rope, actual_rope = rope(expected), rope(actual)
    pairs: list[Difference] = [
        ("rope_theta", expected_rope.theta, actual_rope.theta),
        ("partial_rotary_factor", expected_rope.percent, actual_rope.percent),
    ]
    if "sliding_attention" in (expected.get("rope_parameters") or {}):
        card, config = (rope(each, layers="sliding_attention") for each in (expected, actual))
        pairs.append(("rope_local_base_freq", card.theta, config.theta))
    expected_scaling, actual_scaling = (
        scaling or {"rope_type": "default"} for scaling in (expected_rope.scaling, actual_rope.scaling)
    )
    unscaled = {"type", "rope_theta", "partial_rotary_factor"}
    if expected_scaling["rope_type"] != actual_scaling["rope_type"]:
        pairs.append(("rope_scaling.rope_type", expected_scaling["rope_type"], actual_scaling["rope_type"]))
    else:
        pairs += [
            (f"rope_scaling.{key}", expected_scaling[key], actual_scaling.get(key))
            for key in expected_scaling
            if key not in unscaled
        ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def check(name: str, config: dict[str, Any], *, location: str) -> None:
    """Raise CheckpointError if the complete `config` read from `location` contradicts the card `name`."""
    mismatches = differences(load(name), config)
    if mismatches:
        raise CheckpointError(
            f"{location}: contradicts the card {name}: {'; '.join(map(describe_difference, mismatches))}. Give the card"
            " of this checkpoint, or none. config.json takes precedence."
        )


def describe_difference(difference: Difference) -> str:
    """Return a description of a difference.

    >>> describe_difference(("rope_theta", 1000000.0, 10000.0))
    'rope_theta is 10000.0, but 1000000.0 in the card'
    """
    key, card, config = difference
    if isinstance(card, list) and isinstance(config, list) and len(card) == len(config):
        index = next(i for i in range(len(card)) if card[i] != config[i])
        key, card, config = f"{key}[{index}]", card[index], config[index]
    return f"{key} is {config!r}, but {card!r} in the card"
