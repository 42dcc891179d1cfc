"""ROLL's estimators, losses, masks and corrections."""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Conversion, is_on
from slimectl.migrate.launch_scripts.flags import Flag

WHITENING = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
PLAIN = ("", "vanilla", "ppo")
"""Variants of the loss that leave the algorithm to the estimator."""


def settle_algorithm(conversion: Conversion, kind: str) -> None:
    """The estimator sets the algorithm, unless the loss does. The normalization of rewards sets its baseline."""
    if kind == "opd" and not conversion.switch("use_opd"):
        conversion.put("algorithm.name", "opd", "student_train learns from the teacher")
        return
    of_loss = "pg_variant" if "pg_variant" in conversion.flags else "actor_train.pg_variant"
    variant = conversion.text(of_loss)
    estimator = conversion.converted("adv_estimator")
    if variant not in PLAIN:
        conversion.drop("algorithm.name")
        if loss := conversion.converted(of_loss):
            conversion.put("algorithm.name", loss, of_loss)
    elif "adv_estimator" not in conversion.flags:
        conversion.put("algorithm.name", "ppo", "adv_estimator")
    elif estimator is not None:
        conversion.put("algorithm.name", estimator, "adv_estimator")
    if conversion.text("importance_sampling") == "seq" and variant in PLAIN:
        conversion.put("algorithm.name", "gspo", "importance_sampling", "adv_estimator")
    flag = conversion.flags.get("adv_estimator")
    name = conversion.values.get("algorithm.name")
    if kind == "agentic" and name in ("grpo", "reinforce_plus_plus"):
        _settle_normalization(conversion)
    elif kind == "rlvr" and name == "reinforce_plus_plus" and flag:
        mean, std = (conversion.text(f"norm_{kind}_type", "None") for kind in ("mean", "std"))
        if (mean, std) == ("group", "group"):
            conversion.put("algorithm.name", "grpo", "norm_mean_type", "norm_std_type", "adv_estimator")
        elif mean == "group":
            conversion.put("algorithm.name", "reinforce_plus_plus_baseline", "norm_mean_type", "adv_estimator")
    name = conversion.values.get("algorithm.name")
    if name in WHITENING and not conversion.switch("whiten_advantages"):
        conversion.take_back("algorithm.normalize_advantages", f"{name} always whitens advantages")
        reason = f"advantages are not whitened there, and {name} always whitens them. Set algorithm.name by hand"
        if flag:
            conversion.omit(flag, reason, by_hand=True)


def _settle_normalization(conversion: Conversion) -> None:
    """Compare episodes within their group if ROLL does. Other comparisons are left to the user."""
    grouping = conversion.text("reward_normalization.grouping", "state")
    method = conversion.text("reward_normalization.method", "identity")
    names = [name for item in ("grouping", "method") if (name := f"reward_normalization.{item}") in conversion.flags]
    if grouping == "traj_group_id" and method in ("mean_std", "mean"):
        conversion.put("algorithm.name", "grpo", "adv_estimator", *names)
        if method == "mean":
            conversion.put("algorithm.grpo_std_normalization", False, "reward_normalization.method")
        conversion.unlist(*names)
    elif conversion.values.get("algorithm.name") == "grpo" or (method, grouping) != ("identity", "state"):
        flag = conversion.flags[names[-1] if names else "adv_estimator"]
        reason = f"rewards are normalized by {grouping} with {method} there; grpo compares the episodes of one start"
        conversion.omit(flag, f"{reason}. Set algorithm.name by hand", by_hand=True)


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
    _settle_correction(conversion)


def _settle_bounds(conversion: Conversion) -> None:
    """Set the bounds of the ratio. The variants cispo and tis have bounds of their own."""
    values, actor = conversion.values, "actor_train."
    variant = conversion.text("pg_variant", conversion.text("actor_train.pg_variant"))
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
            conversion.put_known(key, conversion.real(name, 0.2), name)
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
    enabled = [place for place in filters if conversion.switch(f"{CORRECTION}filters.{place}.enabled")]
    for place in enabled[:1]:
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


def unlisted_correction(conversion: Conversion, flag: Flag) -> None:
    """List a key of the correction. Keys with an effect that settings do not have are left to the user."""
    is_needed = flag.name.rpartition(".")[2] in ("enabled", "diff_enabled") and is_on(flag)
    reason = "one filter of the ratio is algorithm.use_rs, and importance weights are algorithm.use_tis"
    conversion.omit(flag, reason, by_hand=is_needed)
