"""ROLL's estimators, losses, masks and corrections."""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Conversion, is_on
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.values import SOLUTION

WHITENING = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
PLAIN = ("", "vanilla", "ppo")
"""Variants of the loss that leave the algorithm to the estimator."""


def settle_algorithm(conversion: Conversion, kind: str) -> None:
    """The estimator sets the algorithm, unless the loss does. The normalization of rewards sets its baseline."""
    if kind == "opd":
        _settle_teacher(conversion)
        if not conversion.switch("use_opd"):
            conversion.put("algorithm.name", "opd", "student_train learns from the teacher")
            conversion.take_back("algorithm.reward_clip", "a policy that learns from a teacher only has no rewards")
            return
    of_loss = "pg_variant" if "pg_variant" in conversion.flags else "actor_train.pg_variant"
    variant = conversion.text(of_loss)
    estimator = conversion.converted("adv_estimator")
    if variant not in PLAIN:
        if loss := conversion.converted(of_loss):
            conversion.put("algorithm.name", loss, of_loss)
        else:
            conversion.take_back("algorithm.name", f"{of_loss} decides the algorithm")
    elif "adv_estimator" not in conversion.flags:
        conversion.put("algorithm.name", "ppo", "adv_estimator")
    elif estimator is not None:
        conversion.put("algorithm.name", estimator, "adv_estimator")
    if conversion.text("importance_sampling") == "seq" and variant in PLAIN:
        conversion.put("algorithm.name", "gspo", "importance_sampling", "adv_estimator")
    if conversion.switch("use_topr_loss"):
        conversion.put("algorithm.name", "topr", "use_topr_loss")
    if conversion.values.get("algorithm.name") in OF_TURNS:
        _settle_turns(conversion)
    elif kind == "agentic":
        _settle_normalization(conversion, *_kinds_of_episodes(conversion))
    else:
        _settle_normalization(conversion, *_kinds_of_responses(conversion))
    name = conversion.values.get("algorithm.name")
    flag = conversion.flags.get("adv_estimator")
    if name in WHITENING and not conversion.switch("whiten_advantages"):
        conversion.take_back("algorithm.normalize_advantages", f"{name} always whitens advantages")
        reason = f"advantages are not whitened there, and {name} always whitens them. Set algorithm.name by hand"
        if flag:
            conversion.omit(flag, reason, by_hand=True)


TEACHER = "teacher.model_args.model_name_or_path"


def _settle_teacher(conversion: Conversion) -> None:
    """A teacher that is the policy itself reads a solution, a column of the row, beside the prompt."""
    if not conversion.switch("opsd_mode"):
        for key in ("algorithm.opd_self_teacher", "algorithm.opd_teacher_template"):
            conversion.take_back(key, "opsd_mode is off")
        return
    column = conversion.text("opsd_solution_key", "solution")
    conversion.put("algorithm.opd_teacher_template", SOLUTION.format(column), "opsd_solution_key", "opsd_mode")
    if conversion.text(TEACHER) in ("", conversion.text("pretrain")):
        conversion.take_back("algorithm.opd_teacher_load", "the teacher is the model that the run starts from")
    else:
        conversion.drop("algorithm.opd_self_teacher")


NO_KIND = "off"
KINDS = ("norm_mean_type", "norm_std_type")
GROUPINGS = {"traj_group_id": "group", "batch": "batch"}
METHODS = {"identity": (False, False), "mean": (True, False), "mean_std": (True, True)}
"""Whether a method subtracts the mean and divides by the standard deviation."""


def _kinds_of_responses(conversion: Conversion) -> tuple[str, str, list[str]]:
    """The kinds of the mean and of the standard deviation, and the flags that they come from."""
    mean, std = (conversion.text(name, NO_KIND) for name in KINDS)
    names = [name for name in KINDS if name in conversion.flags]
    if names and "reward_norm" in conversion.flags:
        names.append("reward_norm")
    elif not names and "reward_norm" in conversion.flags:
        kind = conversion.text("reward_norm")
        mean = NO_KIND if conversion.switch("reward_scale") else kind
        std = NO_KIND if conversion.switch("reward_shift") else kind
        names = [name for name in ("reward_norm", "reward_shift", "reward_scale") if name in conversion.flags]
    elif not names and conversion.text("adv_estimator") == "grpo":
        mean = std = "group"
    return mean, std, names


def _kinds_of_episodes(conversion: Conversion) -> tuple[str, str, list[str]]:
    """The kinds of an agentic pipeline. A grouping or a method without a counterpart is left to the user."""
    table = "reward_normalization."
    if any(f"{table}{name}" in conversion.flags for name in KINDS):
        mean, std = (conversion.text(f"{table}{name}", NO_KIND) for name in KINDS)
        return mean, std, [f"{table}{name}" for name in KINDS if f"{table}{name}" in conversion.flags]
    method, grouping = f"{table}method", f"{table}grouping"
    names = [name for name in (grouping, method) if name in conversion.flags]
    has = METHODS.get(conversion.text(method, "identity"))
    place = GROUPINGS.get(conversion.text(grouping, "state"))
    if has is None or (any(has) and place is None):
        flag = conversion.flags[method if has is None or grouping not in conversion.flags else grouping]
        conversion.unlist(*names)
        reason = "algorithm.norm_mean_type and norm_std_type are group, batch, running or off. Set them by hand"
        for name in names:
            conversion.omit(conversion.flags[name], reason, by_hand=conversion.flags[name] is flag)
        return "group", "group", []
    mean, std = (place or NO_KIND if part else NO_KIND for part in has)
    return mean, std, names


def _settle_normalization(conversion: Conversion, mean: str, std: str, names: list[str]) -> None:
    """Set the kinds of normalization. They decide between the algorithms of one estimator."""
    values = conversion.values
    conversion.drop(*(f"algorithm.{name}" for name in KINDS))
    conversion.unlist(*names)
    source = names or ["the default of ROLL for the normalization of rewards"]
    is_grpo = (mean, std) == ("group", "group") or not conversion.switch("whiten_advantages")
    if values.get("algorithm.name") == "reinforce_plus_plus" and is_grpo:
        conversion.put("algorithm.name", "grpo", "adv_estimator", *names, "whiten_advantages")
    if values.get("algorithm.name") in ("reinforce_plus_plus", "ppo") and (mean, std) == (NO_KIND, NO_KIND):
        conversion.note_equal(*names)
        return
    if values.get("algorithm.name") != "reinforce_plus_plus" and (mean, std) == ("group", NO_KIND):
        conversion.put("algorithm.grpo_std_normalization", False, *source)
    elif values.get("algorithm.name") in ("reinforce_plus_plus", "ppo") or (mean, std) != ("group", "group"):
        for key, value in zip(KINDS, (mean, std), strict=True):
            conversion.put(f"algorithm.{key}", value, *source)
    else:
        conversion.note_equal(*names)


OF_TURNS = ("gigpo", "step_reinforce")


def _settle_turns(conversion: Conversion) -> None:
    """Set what estimators with rewards of turns read. Their discount is of turns, not of tokens."""
    name, table = conversion.values["algorithm.name"], "reward_normalization."
    method, names = conversion.text(f"{table}method", "identity"), [f"{table}grouping", f"{table}method"]
    is_segment = conversion.text("adv_estimator") == "agentic_reinforce"
    for key in KINDS:
        if any(item in conversion.flags for item in (*KINDS, "reward_norm")):
            conversion.take_back(f"algorithm.{key}", f"{name} takes the rewards of turns as they are")
        conversion.drop(f"algorithm.{key}")
    discount = "gamma" if is_segment else "step_reward_gamma"
    conversion.put_known("algorithm.turn_gamma", conversion.real(discount, 1.0 if is_segment else 0.95), discount)
    if name == "gigpo" and method in ("mean", "mean_std"):
        conversion.put("algorithm.grpo_std_normalization", method == "mean_std", *reversed(names))
        conversion.unlist(*names)
    elif method == "identity":
        conversion.unlist(*names)
        for item in names:
            if item in conversion.flags:
                conversion.omit(conversion.flags[item], f"{name} takes the rewards of turns as they are")
    else:
        conversion.unlist(*names)
        for item in names:
            if item in conversion.flags:
                reason = f"{name} does not normalize rewards so. Set algorithm.name by hand"
                conversion.omit(conversion.flags[item], reason, by_hand=item.endswith("method"))


def settle_loss(conversion: Conversion) -> None:
    """In ROLL, switches turn divergences on, and other keys read the bounds."""
    for switch, coefficient, key, default in (
        ("use_kl_loss", "kl_loss_coef", "algorithm.kl_loss_coef", "0"),
        ("add_token_level_kl", "init_kl_coef", "algorithm.kl_coef", "0.2"),
    ):
        conversion.put_switched(key, switch, coefficient, default)
    values = conversion.values
    _settle_bounds(conversion)
    if values.get("algorithm.name") == "ppo" and "value_clip" not in conversion.flags:
        conversion.put("algorithm.value_clip", 1e6, "ROLL clips no values without value_clip")
    mode = conversion.text("loss_agg_mode")
    if mode == "seq-mean-token-sum":
        conversion.put("algorithm.fixed_length", 1, "loss_agg_mode")
    elif mode == "seq-mean-token-sum-norm" and "rollout.max_response_len" in values:
        length = int(values["rollout.max_response_len"])
        conversion.put("algorithm.calculate_per_token_loss", False, "loss_agg_mode")
        conversion.put("algorithm.fixed_length", length, "loss_agg_mode", "response_length")
    _settle_masks(conversion)
    _settle_correction(conversion)


def _settle_masks(conversion: Conversion) -> None:
    """In ROLL a mask has bounds that leave out nothing, unless the file has others."""
    if conversion.switch("difficulty_mask"):
        for side, default in (("low", 0.0), ("high", 1.0)):
            name = f"difficulty_{side}_threshold"
            conversion.put_known(f"algorithm.{name}", conversion.real(name, default), name)
    if not conversion.switch("error_max_len_clip"):
        conversion.take_back("algorithm.error_max_len_threshold", "error_max_len_clip is off")
    elif "error_max_len_threshold" not in conversion.flags:
        conversion.omit(conversion.flags["error_max_len_clip"], "error_max_len_threshold is not in the file")


def _settle_bounds(conversion: Conversion) -> None:
    """Set the bounds of the ratio. The variants cispo and tis have bounds of their own."""
    values, actor = conversion.values, "actor_train."
    variant = conversion.text("pg_variant", conversion.text(f"{actor}pg_variant"))
    prefix = actor if any(name.startswith((f"{actor}cispo_", f"{actor}tis_")) for name in conversion.flags) else ""
    if variant == "cispo":
        for side, key in (("low", "algorithm.eps_clip"), ("high", "algorithm.eps_clip_high")):
            name = f"{prefix}cispo_epsilon_{side}"
            conversion.put_known(key, conversion.real(name, 0.1), name)
        return
    if variant == "tis":
        lower, upper = f"{prefix}tis_lower_bound", f"{prefix}tis_upper_bound"
        conversion.put_known("algorithm.eps_clip", 1.0 - conversion.real(lower, 0.0), lower)
        conversion.put_known("algorithm.eps_clip_high", max(1e-6, conversion.real(upper, 1.0) - 1.0), upper)
        return
    clip = conversion.real("pg_clip", 0.2)
    if conversion.switch("use_pg_clip_range"):
        for name, key in (("pg_clip_low", "algorithm.eps_clip"), ("pg_clip_high", "algorithm.eps_clip_high")):
            conversion.put_known(key, conversion.real(name, 0.2), name, "use_pg_clip_range")
        conversion.unlist("use_pg_clip_range")
    else:
        conversion.take_back("algorithm.eps_clip_high", "use_pg_clip_range is off, so that pg_clip is both bounds")
        if "pg_clip_low" in conversion.flags:
            conversion.omit(conversion.flags["pg_clip_low"], "use_pg_clip_range is off")
        conversion.put_known("algorithm.eps_clip", clip, "pg_clip")
        if values.get("algorithm.name") in ("gspo", "cispo"):
            conversion.put_known("algorithm.eps_clip_high", clip, "pg_clip")
    if conversion.switch("dual_clip_loss"):
        conversion.put("algorithm.eps_clip_c", 1.0 + 2.0 * clip, "dual_clip_loss", "pg_clip")


CORRECTION = "train_infer_correction."
LEVELS = ("token", "sequence", "geometric")


def _settle_correction(conversion: Conversion) -> None:
    """Truncated importance weights, and one filter of the ratio, between the trainer and the engine."""
    weight = f"{CORRECTION}is_weight."
    level = conversion.text(f"{weight}weight_type", "token")
    if conversion.switch(f"{weight}enabled") and level in LEVELS:
        names = [f"{weight}{name}" for name in ("enabled", "weight_type", "upper_bound")]
        conversion.put("algorithm.use_tis", True, names[0])
        conversion.put("algorithm.tis_level", level, names[1])
        conversion.put_known("algorithm.tis_clip", conversion.real(names[2], 1.2), names[2])
        conversion.unlist(*names, f"{weight}detach")
    filters = sorted({name.split(".")[2] for name in conversion.flags if name.startswith(f"{CORRECTION}filters.")})
    rules = [place for place in filters if conversion.switch(f"{CORRECTION}filters.{place}.enabled")]
    for place in rules[:1]:
        rule = f"{CORRECTION}filters.{place}."
        level = conversion.text(f"{rule}agg_type", "token")
        has_ratio = f"{rule}ratio_enabled" not in conversion.flags or conversion.switch(f"{rule}ratio_enabled")
        if level not in LEVELS or not has_ratio or conversion.switch(f"{rule}diff_enabled"):
            continue
        conversion.put("algorithm.use_rs", True, f"{rule}enabled")
        conversion.put("algorithm.rs_level", level, f"{rule}agg_type")
        conversion.put_known("algorithm.rs_clip_low", conversion.real(f"{rule}ratio_low", 0.8), f"{rule}ratio_low")
        conversion.put_known("algorithm.rs_clip", conversion.real(f"{rule}ratio_high", 1.2), f"{rule}ratio_high")
        conversion.unlist(*(name for name in conversion.flags if name.startswith(rule)))
        conversion.note_equal(*(f"{rule}{key}" for key in ("ratio_enabled", "diff_enabled", "diff_low", "diff_high")))


def unlisted_correction(conversion: Conversion, flag: Flag) -> None:
    """List a key of the correction. Keys with an effect that settings do not have are left to the user."""
    is_needed = flag.name.rpartition(".")[2] in ("enabled", "diff_enabled") and is_on(flag)
    reason = "one filter of the ratio is algorithm.use_rs, and importance weights are algorithm.use_tis"
    conversion.omit(flag, reason, by_hand=is_needed)
