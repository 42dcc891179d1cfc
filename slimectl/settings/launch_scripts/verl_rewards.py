"""The reward of a verl script: a function, a reward model, or the verifier of each row's data_source."""

from __future__ import annotations

from typing import Any

from slimectl.settings.launch_scripts.conversion import Conversion
from slimectl.settings.launch_scripts.flags import Flag
from slimectl.settings.launch_scripts.verl_keys import OVERLONG

FUNCTION = ("reward.custom_reward_function.", "custom_reward_function.")
MODEL = ("reward.reward_model.", "reward_model.")
MANAGER = ("reward.reward_manager.name", "reward_model.reward_manager")
OWN_MANAGER = ("reward.reward_manager.module.path", "reward_model.reward_loop_module_path")
SAME_FUNCTION = ("", "naive", "dapo", "prime", "limited", "remote", "rate_limited")
"""Reward managers that call the function with one response."""
ARGUMENTS = tuple(f"{prefix}reward_kwargs." for prefix in FUNCTION)
LENGTH = ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len")


def _given(conversion: Conversion, *names: str) -> Flag | None:
    """The first of these flags that the script gives a value."""
    flags = (conversion.flags.get(name) for name in names)
    return next((flag for flag in flags if flag and (flag.problem or flag.text.lower() not in ("null", "none"))), None)


def settle_reward(conversion: Conversion) -> None:
    """Name the reward; what only the user can know is listed first."""
    path = _given(conversion, *(f"{prefix}path" for prefix in FUNCTION))
    name = _given(conversion, *(f"{prefix}name" for prefix in FUNCTION))
    manager = _given(conversion, *MANAGER)
    conversion.drop("score.custom_rm_path", "score.rm")
    shown = path or manager
    if manager:
        conversion.unlist(manager.name)
    if module := _given(conversion, *OWN_MANAGER):
        conversion.unlist(module.name)
        conversion.omit(module, "a reward manager of your own; write it as score.custom_rm_path", first=True)
    elif manager and shown and (manager.problem or manager.text not in SAME_FUNCTION):
        reason = manager.problem or f"the reward manager {manager.text} calls the function with lists"
        conversion.omit(shown, f"{reason}; write it as a function of `samples`: score.custom_rm_path", first=True)
    elif path:
        _take_function(conversion, path, name)
    elif any(conversion.switch(f"{prefix}enable") for prefix in MODEL):
        _take_model(conversion)
    else:
        conversion.put("score.rm_type", "by_column", "verl grades by data_source")
    if conversion.values.get("score.rm_type") != "by_column":
        conversion.take_back("score.rm_options.column", "the reward does not depend on it")
    if conversion.values.get("score.rm_type") != "reward_model":
        conversion.take_back("score.rm_options.path", "reward_model.enable is off, or a function grades")
    _settle_overlong(conversion)


def _take_function(conversion: Conversion, path: Flag, name: Flag | None) -> None:
    """Set the user's function; one that asks a generative reward model is left to the user."""
    problem = path.problem or (name.problem if name else "")
    if problem:
        already = conversion.omissions
        already[:] = [item for item in already if item.flag not in {str(path), str(name)}]
        conversion.omit(path, f"{problem}; set score.custom_rm_path by hand", first=True)
        return
    if switch := next((item for prefix in MODEL if conversion.switch(item := f"{prefix}enable")), None):
        reason = "the function asks a model that verl serves. Start it with `slimectl serve` and pass its URL"
        conversion.omit(conversion.flags[switch], reason, first=True)
    function = name.text if name else "compute_score"
    names = [flag.name for flag in (path, name) if flag]
    conversion.put("score.custom_rm_path", f"{path.text}:{function}", *names)


def _take_model(conversion: Conversion) -> None:
    """Set a trained reward model; its directory may be left to the user."""
    if "score.rm_options.path" in conversion.values:
        switch = next(f"{prefix}enable" for prefix in MODEL if conversion.switch(f"{prefix}enable"))
        conversion.put("score.rm_type", "reward_model", switch)
        conversion.unlist(switch)
    else:
        reason = "the directory of the reward model, with score.rm_type = reward_model"
        conversion.ask_for("score.rm_options.path", reason)


def _settle_overlong(conversion: Conversion) -> None:
    """Add DAPO's soft punishment of long responses to the reward (Yu et al. 2025, arXiv:2503.14476, eq. 13)."""
    prefix = next((item for item in OVERLONG if f"{item}.enable" in conversion.flags), "")
    names = [name for name in conversion.flags if name.startswith(tuple(f"{item}." for item in OVERLONG))]
    lengths = [name for name in LENGTH if name in conversion.flags]
    values = conversion.values
    if not prefix or not conversion.switch(f"{prefix}.enable"):
        for name in [*names, *lengths]:
            conversion.omit(conversion.flags[name], "the overlong buffer is off")
        return
    limit = int(float(conversion.text(lengths[0]))) if lengths and not conversion.is_unknown(*lengths) else None
    base: dict[str, Any] = {"path": values["score.custom_rm_path"]} if "score.custom_rm_path" in values else {}
    if values.get("score.rm_type") == "by_column":
        base = {"type": "by_column"}
        if "score.rm_options.column" in values:
            base["column"] = values.pop("score.rm_options.column")
    if not base or conversion.is_unknown(*names, *lengths):
        reason = 'write score.rm as a sum with {type = "overlong", limit = …, buffer = …}'
        conversion.omit(conversion.flags[f"{prefix}.enable"], reason, first=True)
        return
    buffer = conversion.number(f"{prefix}.len", 0)
    overlong = {"type": "overlong", "limit": limit or int(values.get("rollout.max_response_len", 512)),
                "buffer": buffer, "weight": conversion.real(f"{prefix}.penalty_factor", 1.0)}  # fmt: skip
    is_function = "path" in base
    conversion.drop("score.custom_rm_path", "score.rm_type")
    functions = [name for name in conversion.flags if name.startswith(FUNCTION) and name.endswith(("path", "name"))]
    conversion.put("score.rm", [base, overlong], *names, *lengths, *(functions if is_function else ()))
