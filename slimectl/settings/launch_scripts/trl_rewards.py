"""Reward functions and reward models that TRL is given, as settings of [score]."""

from __future__ import annotations

import re
from typing import Any

from slimectl.settings.launch_scripts.conversion import Conversion, Omission
from slimectl.settings.launch_scripts.values import texts
from slimectl.settings.launch_scripts.writing import inline

ACCURACY = {"type": "math"}
NAMED: dict[str, dict[str, Any]] = {
    "accuracy_reward": ACCURACY,
    "reasoning_accuracy_reward": ACCURACY,
    "accuracy": ACCURACY,
    "think_format_reward": {"path": "trl.rewards:think_format_reward"},
    "get_soft_overlong_punishment": {"type": "overlong", "limit": 1280, "buffer": 256},
}
"""Names that `trl grpo --reward_funcs` takes, and `accuracy` of Open R1, as parts of score.rm."""
FUNCTIONS = ("reward_funcs", "trainer.reward_funcs")
MODELS = ("reward_model_name_or_path", "reward_model_path")
UNNAMED = "this file names no reward. Set score.rm_type, or score.custom_rm_path = FILE.py:NAME (docs/verifiers.md)"


def settle_rewards(conversion: Conversion) -> None:
    """Set the reward, or ask for it before all else."""
    parts: list[dict[str, Any]] = []
    unknown: list[str] = []
    sources = [name for name in (*FUNCTIONS, *MODELS) if name in conversion.flags]
    for name in sources:
        flag = conversion.flags[name]
        for value, text in zip(flag.values, flag.texts, strict=True):
            part = {"type": "reward_model", "path": text} if name in MODELS else _part(text)
            if value.problem or part is None:
                unknown.append(value.problem or f"{text} is a name that only the program knows")
            else:
                parts.append(part)
        if name in FUNCTIONS:
            conversion.unlist(name)
    conversion.values.pop("score.rm_options.path", None)
    place = str(conversion.flags[sources[0]].place) if sources else _place(conversion)
    if unknown or not parts:
        shown = str(conversion.flags[sources[0]]) if sources else "score"
        reason = "; ".join(dict.fromkeys(unknown))
        beside = f" (beside score.rm = {inline(parts)})" if parts else ""
        reason = f"{reason}. Set score.custom_rm_path or score.rm by hand{beside}" if reason else UNNAMED
        conversion.omissions.insert(0, Omission(shown, place, reason, by_hand=True, first=True))
    else:
        _put(conversion, parts, sources)


def _put(conversion: Conversion, parts: list[dict[str, Any]], sources: list[str]) -> None:
    """Set one reward by its key, several as a weighted sum."""
    weights = _weights(conversion, len(parts))
    if any(part.get("type") == "math" for part in parts) and "rollout.label_key" not in conversion.values:
        conversion.put("rollout.label_key", "solution", *sources)
    if len(parts) > 1 or weights != [1.0] * len(parts):
        weighted = [
            part if weight == 1.0 else {**part, "weight": weight} for part, weight in zip(parts, weights, strict=True)
        ]
        conversion.put("score.rm", weighted, *sources, "reward_weights")
        return
    (part,) = parts
    if "type" not in part:
        conversion.put("score.custom_rm_path", part["path"], *sources)
        return
    conversion.put("score.rm_type", part["type"], *sources)
    for option, value in part.items():
        if option != "type":
            conversion.put(f"score.rm_options.{option}", value, *sources)


def _weights(conversion: Conversion, count: int) -> list[float]:
    """Weights of the parts; 1 each where they are not given, or do not fit, which is listed."""
    flag = conversion.flags.get("reward_weights")
    if flag is None:
        return [1.0] * count
    try:
        weights = [float(text) for text in texts(flag)]
    except ValueError:
        weights = []
    if flag.problem or len(weights) != count:
        conversion.omit(flag, f"is not one number for each of {count} rewards; set score.rm by hand", by_hand=True)
        return [1.0] * count
    conversion.unlist("reward_weights")
    return weights


def _part(text: str) -> dict[str, Any] | None:
    """A reward as a part of score.rm: by name, by path, or a reward model; None for a name of another program."""
    name = text.removeprefix("trl.rewards:").removeprefix("trl.rewards.")
    if name in NAMED:
        return NAMED[name]
    if match := re.fullmatch(r"get_soft_overlong_punishment:(\d+):(\d+)", text):
        return {"type": "overlong", "limit": int(match[1]), "buffer": int(match[2])}
    if ":" in text:
        return {"path": text}
    if "/" in text:
        return {"type": "reward_model", "path": text}
    module, dot, function = text.rpartition(".")
    return {"path": f"{module}:{function}"} if dot and re.fullmatch(r"[\w.]+", text) else None


def _place(conversion: Conversion) -> str:
    return str(next(iter(conversion.flags.values())).place) if conversion.flags else ""
