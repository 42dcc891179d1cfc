"""Old names of settings, which every layer still accepts: sections, keys and values."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

SECTIONS = {"warmup": "sft_warmup"}
"""Old section -> section."""

KEYS = {
    "engine": {"kind": "backend"},
    "eval": {"skip_before_train": "before_train"},
    "run": {
        "ahead": "async_level",
        "max_logprob_abs_diff": "max_logprob_mismatch",
        "on_disagreement": "on_logprob_mismatch",
    },
    "sft_warmup": {"until_accuracy": "target_accuracy"},
    "sglang": {"groups": "server_groups"},
    "track": {
        "track_with": "with",
        "tracker_kwargs": "kwargs",
        "wandb_project": "project",
        "wandb_team": "entity",
        "wandb_group": "group",
        "wandb_mode": "mode",
        "wandb_dir": "dir",
        "wandb_host": "host",
        "wandb_key": "api_key",
        "wandb_run_id": "run_id",
        "wandb_always_use_train_step": "always_use_train_step",
        "disable_wandb_random_suffix": "random_suffix",
        "eval_table_rows": "samples",
    },
    "train": {"policy": "backend", "share_prompts": "share_prompt_prefix"},
}
"""Section -> old key -> key. The old keys of [track] come from ROLL and slime."""

INVERTED = ("eval.skip_before_train", "track.disable_wandb_random_suffix")
"""Old switches that mean the opposite of the new ones."""

VALUES: dict[str, dict[Any, str]] = {
    "algorithm.critic": {"own": "separate"},
    "algorithm.pairs": {"extremes": "best_worst"},
}
"""Setting -> old value -> value."""

FORMER_DEFAULTS: dict[str, Any] = {"sync.update_weight_delta_checksum": "blake2b"}
"""Setting -> its default in an older version. The settings files of runs of that version contain it."""


TRACKER_SWITCHES = {"use_wandb": "wandb", "use_tensorboard": "tensorboard"}
"""Slime's switches of a tracker, and its name in track.with."""
TENSORBOARD_FOLDER = ("tb_project_name", "tb_experiment_name")
"""Slime's names for parts of TensorBoard's folder: tensorboard_log/PROJECT/EXPERIMENT."""


def with_tracker_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a settings file, with the tracker options of ROLL and slime moved into [track].

    These options may be at the top level, as in their files, or in [track].

    >>> with_tracker_names({"track_with": "wandb", "use_tensorboard": True})
    {'track': {'track_with': ['wandb', 'tensorboard']}}
    """
    run = document.get("run", {})
    if "exp_name" in document and isinstance(run, dict) and "name" not in run:  # ROLL's name of a run
        document = {**document, "run": {**run, "name": document["exp_name"]}}
        del document["exp_name"]
    names = {*KEYS["track"], *TRACKER_SWITCHES, *TENSORBOARD_FOLDER}
    track = document.get("track", {})
    if not isinstance(track, dict) or not names & {*document, *track}:
        return document
    track = track | {name: document[name] for name in document if name in names}
    selected = [track.pop(switch, False) and tracker for switch, tracker in TRACKER_SWITCHES.items()]
    if any(selected):
        key = "track_with" if "track_with" in track else "with"
        trackers = track.get(key, ["stdout"])
        track[key] = [*([trackers] if isinstance(trackers, str) else trackers), *filter(None, selected)]
    folder = [str(track.pop(name)) for name in TENSORBOARD_FOLDER if name in track]
    if folder:
        key = "tracker_kwargs" if "tracker_kwargs" in track else "kwargs"
        arguments = {"log_dir": "/".join(["tensorboard_log", *folder])}
        track[key] = {"tensorboard": arguments} | track.get(key, {})
    return {name: value for name, value in document.items() if name not in names} | {"track": track}


def current_section(section: str) -> str:
    return SECTIONS.get(section, section)


def current_name(name: str) -> str:
    """Return the present name of a dotted key or a section.

    >>> current_name("warmup.until_accuracy"), current_name("run.ahead"), current_name("train.lr")
    ('sft_warmup.target_accuracy', 'run.async_level', 'train.lr')
    """
    section, dot, key = name.partition(".")
    section = current_section(section)
    return f"{section}{dot}{KEYS.get(section, {}).get(key, key)}"


def current_value(section: str, key: str, value: Any) -> Any:
    """Return the value that a setting has under its present name. A value that cannot be converted is unchanged.

    >>> current_value("eval", "skip_before_train", True), current_value("algorithm", "critic", "own")
    (False, 'separate')
    """
    if f"{section}.{key}" in INVERTED:
        try:
            return not TypeAdapter(bool).validate_python(value)
        except ValidationError:
            return value  # refused under the present name
    renamed = VALUES.get(f"{section}.{key}", {})
    return renamed.get(value, value) if isinstance(value, str) else value


def old_names(sections: dict[str, list[str]]) -> list[str]:
    """Return every old dotted name of the keys in `sections`."""
    by_key = [f"{section}.{old}" for section in sections for old in KEYS.get(section, {})]
    by_section = [f"{old}.{key}" for old, section in SECTIONS.items() for key in sections.get(section, [])]
    both = [f"{old}.{key}" for old, section in SECTIONS.items() if section in sections for key in KEYS.get(section, {})]
    return [*by_key, *by_section, *both]
