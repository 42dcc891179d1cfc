"""Finds the training algorithm of a TRL file, and the settings of its loss."""

from __future__ import annotations

import re
from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.conversion import ROWS, Conversion, Omission, stem
from slimectl.migrate.launch_scripts.foreign import algorithms_in, own_algorithm
from slimectl.migrate.launch_scripts.values import texts
from slimectl.migrate.launch_scripts.writing import inline

GROUP_NORMALIZED = ("grpo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo")
TELLING = {
    "grpo": "delta scale_rewards importance_sampling_level top_entropy_quantile use_bias_correction_kl entropy_coef "
    "sapo_temperature_pos sapo_temperature_neg vllm_importance_sampling_correction vllm_importance_sampling_mode "
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max off_policy_mask_threshold",
    "rloo": "reward_clip_range rloo_k",
    "sft": "packing packing_strategy assistant_only_loss completion_only_loss dataset_text_field",
    "dpo": "precompute_ref_log_probs f_divergence_type label_smoothing ld_alpha discopop_tau use_weighting rpo_alpha",
    "reward_model": "center_rewards_coefficient",
    "ppo": "num_ppo_epochs cliprange cliprange_value vf_coef",
}
"""Arguments of a single trainer, for files without a class or program that shows the algorithm."""
SAMPLING = {"num_generations", "reward_funcs", "max_completion_length", "reward_weights", "use_vllm"}
"""Arguments of the trainers that sample, which are GRPO and RLOO."""
LOSSES = {
    **dict.fromkeys(("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"), "grpo"),
    **dict.fromkeys(("nll", "chunked_nll", "dft"), "sft"),
    "sigmoid": "dpo",
}
SERVED_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "nll", "chunked_nll", "sigmoid")


def class_of(conversion: Conversion) -> str:
    """The class of the configuration, or an empty string if there is none."""
    return conversion.text("configuration").replace("Trainer", "Config")


def settle_algorithm(conversion: Conversion) -> tuple[str, bool]:
    """Set the algorithm according to a class, a subcommand, a script, or else an argument.

    Return it, and whether the file determines it. If not, it is grpo.
    """
    name, source = own_algorithm(conversion.text("configuration")), "configuration"
    if not name:
        served, absent = algorithms_in(stem(conversion.text("launcher")))
        names = {own_algorithm(word) for word in served}
        name, source = (names.pop() if len(names) == 1 and not absent else ""), "launcher"
    argument = ""
    if not name:
        name, argument = _told(conversion)
    if name == "dapo":  # a script of that name may train by any loss_type
        name = ""
    if name and not (argument and name == "grpo"):
        conversion.put("algorithm.name", name, argument or source)
    if class_of(conversion) == "AsyncGRPOConfig":
        conversion.put("run.async_level", 1, "AsyncGRPOConfig samples while it trains")
    return ("grpo" if name in ("", "gspo") else name), bool(name)


def _told(conversion: Conversion) -> tuple[str, str]:
    """The algorithm that single-trainer arguments imply, and the argument. Empty if there is none, or several."""
    sources = {
        name: argument for name, row in TELLING.items() for argument in row.split() if argument in conversion.flags
    }
    if loss := LOSSES.get(conversion.text("loss_type")):
        sources.setdefault(loss, "loss_type")
    return next(iter(sources.items())) if len(sources) == 1 else ("", "")


def require_algorithm(conversion: Conversion) -> None:
    """List the algorithm first among the settings to set, if the file does not determine it."""
    is_sampled = conversion.flags.keys() & SAMPLING
    candidates = "grpo (as written here) or rloo" if is_sampled else "sft, dpo, reward_model, grpo or rloo"
    reason = f"no class and no program in this file determines it. Set it by hand: {candidates}"
    conversion.omissions.insert(0, Omission("algorithm.name", _place(conversion), reason, by_hand=True, first=True))


def settle_loss(conversion: Conversion, name: str) -> None:
    """Reduction, clipping, normalization and divergence of the loss."""
    values, losses = conversion.values, conversion.flags["loss_type"].texts if "loss_type" in conversion.flags else []
    loss = ", ".join(losses)
    if loss and loss not in SERVED_LOSSES:
        raise SettingsError(
            f"{conversion.flags['loss_type'].place}: loss_type {loss} has no counterpart. Give one of "
            f"{', '.join(SERVED_LOSSES)}, or your own by train.custom_loss_function_path"
        )
    if name in (*ROWS, "rloo", "ppo"):
        values.pop("algorithm.calculate_per_token_loss", None)
        conversion.settled |= {"algorithm.calculate_per_token_loss", "algorithm.grpo_std_normalization"}
    _settle_divergence(conversion, name)
    if name != "grpo":
        if name == "gmpo":
            values.pop("algorithm.calculate_per_token_loss", None)
            conversion.settled |= {"algorithm.eps_clip", "algorithm.calculate_per_token_loss"}
        return
    _settle_scale(conversion)
    if loss in ("dr_grpo", "cispo", "sapo"):
        conversion.put("algorithm.name", loss, "loss_type")
        values.pop("algorithm.calculate_per_token_loss", None)
    if loss == "dr_grpo":
        conversion.put("algorithm.fixed_length", conversion.number("max_completion_length", 512), "loss_type")
    if loss == "cispo":
        _settle_cispo(conversion)
    elif conversion.text("importance_sampling_level") == "sequence":
        conversion.put("algorithm.name", "gspo", "importance_sampling_level")
    elif "importance_sampling_level" in conversion.flags:
        conversion.put("algorithm.name", values.get("algorithm.name", "grpo"), "importance_sampling_level")
    if values.get("algorithm.name") == "gspo" and "epsilon_high" not in conversion.flags:
        conversion.put("algorithm.eps_clip_high", conversion.real("epsilon", 0.2), "epsilon")


def _settle_scale(conversion: Conversion) -> None:
    """Divisors of advantages other than the group's standard deviation."""
    scale = conversion.text("scale_rewards")
    if scale == "mean":
        conversion.values.pop("algorithm.grpo_std_normalization", None)
        conversion.settled.add("algorithm.grpo_std_normalization")
        conversion.put("algorithm.name", "maxrl", "scale_rewards")
    elif scale == "batch":
        reason = "TRL divides by the batch's deviation, slimectl by the group's. Set algorithm.name by hand"
        conversion.omit(conversion.flags["scale_rewards"], reason, by_hand=True)


def _settle_cispo(conversion: Conversion) -> None:
    """In TRL, CISPO bounds the ratio itself by epsilon_high, and has no lower bound."""
    bound = conversion.real("epsilon_high", conversion.real("epsilon", 0.2))
    conversion.values.pop("algorithm.eps_clip_high", None)
    conversion.put("algorithm.eps_clip", 1.0, "CISPO there has no lower bound")
    if bound > 1:
        conversion.put("algorithm.eps_clip_high", bound - 1, "epsilon_high")
        return
    reason = f"TRL bounds the ratio by {bound:g}, and slimectl needs a bound above 1. Set it by hand"
    conversion.ask_for("algorithm.eps_clip_high", reason, first=False)


def _settle_divergence(conversion: Conversion, name: str) -> None:
    """`beta` is the KL coefficient in the loss for grpo, in the reward for rloo, and algorithm.beta for dpo."""
    key = {"dpo": "algorithm.beta", "rloo": "algorithm.kl_coef"}.get(name)
    if key and "algorithm.kl_loss_coef" in conversion.values:
        conversion.put(key, conversion.values.pop("algorithm.kl_loss_coef"), "beta")
    if conversion.switch("sync_ref_model"):
        conversion.put_default("ref_model_sync_steps", "algorithm.ref_update_interval", 512)
    else:
        conversion.take_back("algorithm.ref_update_interval", "has no effect there without sync_ref_model")
    if name not in GROUP_NORMALIZED or not conversion.real("beta", 0.0):
        conversion.values.pop("algorithm.use_unbiased_kl", None)
    elif name != "gmpo":
        conversion.put_default("use_bias_correction_kl", "algorithm.use_unbiased_kl", True)


ACCURACY = {"type": "math"}
NAMED: dict[str, dict[str, Any]] = {
    "accuracy_reward": ACCURACY,
    "reasoning_accuracy_reward": ACCURACY,
    "accuracy": ACCURACY,
    "think_format_reward": {"path": "trl.rewards:think_format_reward"},
    "get_soft_overlong_punishment": {"type": "overlong", "limit": 1280, "buffer": 256},
}
"""Names that `trl grpo --reward_funcs` accepts, and `accuracy` of Open R1, as parts of score.rm."""
FUNCTIONS = ("reward_funcs", "trainer.reward_funcs")
MODELS = ("reward_model_name_or_path", "reward_model_path")
UNNAMED = "this file has no reward. Set score.rm_type, or score.custom_rm_path = FILE.py:NAME (docs/verifiers.md)"


def settle_rewards(conversion: Conversion) -> None:
    """Set the reward, or list it first among the settings to set."""
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
    conversion.unlist(*FUNCTIONS)
    conversion.values.pop("score.rm_options.path", None)
    place = str(conversion.flags[sources[0]].place) if sources else _place(conversion)
    if unknown or not parts:
        shown = str(conversion.flags[sources[0]]) if sources else "score"
        reason = "; ".join(dict.fromkeys(unknown))
        beside = f" (in addition to score.rm = {inline(parts)})" if parts else ""
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
        pairs = zip(parts, weights, strict=True)
        weighted = [part if weight == 1.0 else {**part, "weight": weight} for part, weight in pairs]
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
    """Weights of the parts. Each is 1 if they are missing, or do not fit, which is listed."""
    flag = conversion.flags.get("reward_weights")
    if flag is None:
        return [1.0] * count
    try:
        weights = [float(text) for text in texts(flag)]
    except ValueError:
        weights = []
    if flag.problem or len(weights) != count:
        conversion.omit(flag, f"is not one number for each of {count} rewards. Set score.rm by hand", by_hand=True)
        return [1.0] * count
    conversion.unlist("reward_weights")
    return weights


def _part(text: str) -> dict[str, Any] | None:
    """A reward as a part of score.rm: by name, by path, or a reward model. None for a name of another program."""
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
    """The place of the first flag."""
    return str(next(iter(conversion.flags.values())).place) if conversion.flags else ""
