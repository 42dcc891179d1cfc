"""Model cards: data about an architecture for when there is no checkpoint yet (models/*.toml).

family = "qwen3"            the weight mapping in weights/
parameters = 596_049_920    and `activated`, where a token does not pass through all of them
null = ["q_lora_rank"]      keys of [config] that are null in config.json: TOML has no null
[config]                    what config.json would say
[layout.gpus_8]             a parallel layout that fits, or a `note` why none does
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

from slimectl.errors import CheckpointError, SettingsError

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Four ways to write the rotary facts; they are compared by what they mean."""
DERIVED = ("layer_types", "mlp_layer_types")
"""Lists that a configuration class makes of other keys, and then forgets those."""
NOT_COMPARED = ("max_position_embeddings", *ROPE_KEYS)
"""The longest position changes no number that a model computes, and models of one architecture differ in it."""

Difference = tuple[str, Any, Any]
"""(key, what the card says, what the checkpoint says)."""


def folder() -> Path:
    """Where the cards lie: inside the installed package, or at the top of a source tree."""
    installed = Path(__file__).parent / "models"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "models"


def names() -> list[str]:
    """All cards, sizes in order: 4B before 14B."""
    return sorted((file.stem for file in folder().glob("*.toml")), key=_by_number)


def _by_number(name: str) -> list[tuple[float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]


def path_of(name: str) -> Path:
    """The file of a card. Raises SettingsError with the nearest name."""
    if name not in (known := names()):
        lowered = {each.lower(): each for each in known}
        near = difflib.get_close_matches(name.lower(), lowered, n=1)
        hint = f"did you mean {lowered[near[0]]}?" if near else f"known are {', '.join(known)}"
        raise SettingsError(f"model.card: no card {name!r}; {hint}")
    return folder() / f"{name}.toml"


def load(name: str) -> dict[str, Any]:
    """The card of that name. Raises SettingsError with the nearest name."""
    with path_of(name).open("rb") as file:
        card = tomllib.load(file)
    card["config"] |= dict.fromkeys(card.get("null", []))
    return card


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model, where it is a part of a larger one."""
    return config.get("text_config") or config


def differences(card: dict[str, Any], config: dict[str, Any]) -> list[Difference]:
    """Where a checkpoint contradicts a card; `config` is complete, as weights.complete.read_config gives it.

    Compared are the keys that the card states, defaults filled in on both sides, however they are written. A key that
    the checkpoint does not have contradicts nothing.
    """
    from slimectl.weights.architecture import head_dim
    from slimectl.weights.complete import completed

    stated, wanted = language_model(card["config"]), language_model(completed(card["config"]))
    found = language_model(config)
    if wanted["model_type"] != found.get("model_type"):
        return [("model_type", wanted["model_type"], found.get("model_type"))]
    differing = _rope_differences(wanted, found)
    for key in [*stated, *(key for key in DERIVED if wanted["num_hidden_layers"] == found.get("num_hidden_layers"))]:
        value = head_dim(found) if key == "head_dim" else found.get(key, wanted.get(key))
        if key not in NOT_COMPARED and wanted.get(key) != value:
            differing.append((key, wanted.get(key), value))
    return differing


def _rope_differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[Difference]:
    from slimectl.weights.architecture import rope

    ours, theirs = rope(wanted), rope(found)
    pairs: list[Difference] = [
        ("rope_theta", ours.theta, theirs.theta),
        ("partial_rotary_factor", ours.percent, theirs.percent),
    ]
    left, right = (scaling or {"rope_type": "default"} for scaling in (ours.scaling, theirs.scaling))
    unscaled = {"type", "rope_theta", "partial_rotary_factor"}
    if left["rope_type"] != right["rope_type"]:
        pairs.append(("rope_scaling.rope_type", left["rope_type"], right["rope_type"]))
    else:
        pairs += [(f"rope_scaling.{key}", left[key], right.get(key)) for key in left if key not in unscaled]
    return [pair for pair in pairs if pair[1] != pair[2]]


def check(name: str, config: dict[str, Any], *, where: str) -> None:
    """Raises CheckpointError, one line, if the complete `config` found at `where` contradicts the card `name`."""
    found = differences(load(name), config)
    if found:
        raise CheckpointError(
            f"{where}: contradicts the card {name}: {'; '.join(map(told, found))}; give the card of this checkpoint,"
            " or none: config.json is the truth about it"
        )


def told(difference: Difference) -> str:
    """A difference in words.

    >>> told(("rope_theta", 1000000.0, 10000.0))
    'rope_theta is 10000.0, the card says 1000000.0'
    """
    key, card, config = difference
    if isinstance(card, list) and isinstance(config, list) and len(card) == len(config):
        place = next(i for i in range(len(card)) if card[i] != config[i])
        key, card, config = f"{key}[{place}]", card[place], config[place]
    return f"{key} is {config!r}, the card says {card!r}"
