"""Settings that a command inherits from a run if its model is a checkpoint of it: how it was trained and evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.data.columns import PromptOptions
from slimectl.data.ownership import is_run
from slimectl.data.prompts import open_prompts
from slimectl.data.run_settings import RUN_TOML, working_folder
from slimectl.errors import SlimectlError
from slimectl.settings import Settings
from slimectl.settings.keys import changed, flat
from slimectl.settings.layers import Layer, from_file, nested
from slimectl.settings.loading import ALTERNATIVES, resolve

TEMPLATE = "rollout.apply_chat_template"
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_response_len", "min_new_tokens", "stop", "stop_token_ids",
)  # fmt: skip
ROLLOUT = (
    TEMPLATE, "rollout.apply_chat_template_kwargs", "rollout.template_date", "rollout.skip_special_tokens",
    "rollout.ignore_eos", *(f"rollout.{key}" for key in SAMPLING),
)  # fmt: skip
VERIFIER = tuple(
    f"score.{key}"
    for key in (*ALTERNATIVES["score"], "rm_options", "none_reward", "group_rm", "rm_url", "reward_key", "timeout_s")
)
EVALUATION = tuple(f"eval.{key}" for key in (*SAMPLING, "rm_type", "reward_key", "success_threshold"))
MEASURED = (*ROLLOUT, *VERIFIER, *EVALUATION)
"""Keys that determine what an evaluation of a run measures."""


def lent_layer(layers: Sequence[Layer], keys: Sequence[str]) -> Layer | None:
    """Return the run's settings among `keys` that differ from the defaults, as the lowest layer.

    Return None if the model does not belong to a run. A verifier in the layers replaces all of the run's verifiers. A
    key of [rollout] or [score] replaces the run's key of the same name in [eval].
    """
    given = {f"{section}.{key}" for layer in layers for section, values in layer.values.items() for key in values}
    paths = [layer.values["model"]["path"] for layer in layers if layer.values.get("model", {}).get("path")]
    run = run_of(Path(str(paths[-1]))) if paths else None
    if run is None:
        return None
    with suppress(SlimectlError):
        settings = resolve([from_file(run / RUN_TOML)]).settings
        names = {*changed(settings), *([TEMPLATE] if _trains_on_texts(settings, run) else [])}
        if given & {f"score.{key}" for key in ALTERNATIVES["score"]}:
            names -= {*VERIFIER, "eval.rm_type", "eval.reward_key"}
        overruled = {f"eval.{name.partition('.')[2]}" for name in given if not name.startswith("eval.")}
        lent = {name: value for name, value in flat(settings) if name in keys and name in names - given - overruled}
        return Layer(str(run / RUN_TOML), nested(_absolute(lent, working_folder(run))))
    return None


def run_of(model: Path) -> Path | None:
    """Return the run of a model folder: the run itself, a step, or the policy of a step. None for other folders."""
    if not model.is_dir():
        return None
    parents = [model, *(model if model.name else model.absolute()).parents][:4]
    return next((folder for folder in parents if is_run(folder) and (folder / RUN_TOML).exists()), None)


def _trains_on_texts(settings: Settings, run: Path) -> bool:
    """Return whether rollout.apply_chat_template had an effect. It has none for agents and chat prompts."""
    rollout = settings.rollout
    if settings.has_agent or not rollout.data:
        return False
    source, folder = rollout.data[0], working_folder(run)
    if folder is not None and (folder / source).exists():
        source = str(folder / source)
    with suppress(SlimectlError):
        return isinstance(next(open_prompts([source], PromptOptions(rollout.input_key))).text, str)
    return False


def _absolute(values: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return values with function paths made absolute. They are relative to the run's working folder."""

    def placed(path: str) -> str:
        file = path.partition(":")[0]
        is_elsewhere = folder is not None and folder != Path.cwd() and (folder / file).is_file()
        return str(folder / path) if folder is not None and is_elsewhere else path

    lent: dict[str, Any] = {n: placed(value) if n.endswith("_path") else value for n, value in values.items()}
    for part in lent.get("score.rm", ()):
        if "path" in part:
            part["path"] = placed(part["path"])
    return lent
