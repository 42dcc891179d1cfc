"""Flags that change what is learned and have no setting: of other algorithms, which are refused, and all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.conversion import Conversion, Omission, is_on
from slimectl.settings.launch_scripts.flags import Flag
from slimectl.settings.launch_scripts.foreign import absent_algorithm

ANY = ""
"""Stands for every value of a switch that is on."""
ALGORITHMS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "slime": {"opd_type": ("self", "sdft")},
    "roll": {"opsd_mode": (ANY, "sdft")},
    "openrlhf": {"pretrain_mode": (ANY, "pretrain")},
    "verl": {"algorithm.filter_sample.enable": (ANY, "gfpo")},
}
"""Flags of another algorithm by stack: the value that switches it on, and its name."""
OFF = "false off no none null 0 0.0"
ONCE, WHOLE, NO_VALUE = "1", "1 1.0", "none null"
REUSE = "slimectl trains on a sample once. Set train.num_steps_per_rollout to divide a round into more steps"
LOSS = "the loss has no such part. Write it as train.custom_loss_function_path (docs/hooks.md), or leave it out"
MASK = "the mask has no such part. Write it as rollout.sample_filter_path (docs/hooks.md), or leave it out"
REWARD = "rewards are taken as they are. Write it as score.custom_reward_post_process_path, or leave it out"
FILTERED = "groups are filtered by rollout.dynamic_sampling_filter_path (docs/agents.md). Set it to a function of yours"
TURNS = "each prompt gets one response. Set rollout.custom_generate_function_path or rollout.agent (docs/agents.md)"
REFERENCE = "set algorithm.ref_update_interval to renew the reference; it is not mixed"
LAYERS = "set train.lora_targets to the names of the layers"
TEACHERS = "there is one teacher, asked about the sampled token. Set algorithm.opd_teacher_load, or leave it out"
TEMPLATE = "put the template into the prompts, or set rollout.apply_chat_template"
ROWS = "the program changes the rows. Save the rows that it makes as a file, and set rollout.data to that file"
MIXTURE = "set rollout.data to its parts, as org/name/CONFIG@SPLIT, and rollout.data_weights to their weights"

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref"))
CHANGES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "slime": {
        "lora_target_preset": (OFF, LAYERS),
        "topk_level_opd": (OFF, TEACHERS),
        "enable_mtp_training": (OFF, LOSS),
        "use_score_centering": (OFF, LOSS),
        "pg_loss_type": ("ppo", LOSS),
    },
    "verl": {
        f"{ACTOR}ppo_epochs": (ONCE, REUSE),
        f"{ACTOR}use_gpg_loss": (OFF, LOSS),
        f"{ROLLOUT}multi_turn.enable": (OFF, TURNS),
        f"{REF}sync_ref_model": (OFF, REFERENCE),
    },
    "trl": {
        "num_iterations": (ONCE, REUSE),
        "num_ppo_epochs": (ONCE, REUSE),
        "top_entropy_quantile": (WHOLE, LOSS),
        "off_policy_mask_threshold": (OFF, LOSS),
        "dataset_mixture.datasets": (OFF, MIXTURE),
        "mtp_enabled": (OFF, LOSS),
        "trainer.dataset_changes": (OFF, ROWS),
    },
    "openrlhf": {
        "max_epochs": (ONCE, REUSE),
        "normalize_reward": (OFF, REWARD),
        "stop_properly_penalty_coef": (NO_VALUE, REWARD),
        "overlong_buffer_len": (OFF, REWARD),
        "ptx_coef": (OFF, LOSS),
        "nll_loss_coef": (OFF, LOSS),
        "margin_loss": (OFF, LOSS),
        "ipo": (OFF, LOSS),
        "dynamic_filtering_reward_range": ("0,1 0.0,1.0 none", FILTERED),
        "input_template": (OFF, TEMPLATE),
    },
    "roll": {
        "ppo_epochs": (ONCE, REUSE),
        "reward_norm": (OFF, REWARD),
        "reward_shift": (OFF, REWARD),
        "reward_scale": (OFF, REWARD),
        "whiten_rewards": (OFF, REWARD),
        "advantage_clip": (OFF, LOSS),
        "difficulty_mask": (OFF, MASK),
        "error_max_len_clip": (OFF, MASK),
        "difficulty_loss_weight": (OFF, LOSS),
        "length_loss_weight": (OFF, LOSS),
        "ipo": (OFF, LOSS),
        "query_filter_config.type": ("no_filter", FILTERED),
    },
}
"""Flags that change the training and have no setting, by stack: values that change nothing, and what to do instead."""


PROGRAMS: Mapping[str, str] = {
    "verl": r"verl|((.*/)?verl[./])?(trainer|experimental)[./].*|(.*[./])?recipe[./](dapo|\w+_policy)[./].*|"
    r"(main|\w*sft)_\w+\.py",
}
"""Patterns of the programs whose flags say all that they do. Others bring an agent or a loss of their own."""


def refuse_other_algorithms(conversion: Conversion) -> None:
    """Raise SettingsError for a flag that switches another algorithm on."""
    for name, (value, algorithm) in ALGORITHMS.get(conversion.dialect.name, {}).items():
        flag = conversion.flags.get(name)
        if flag is not None and is_on(flag) and value in (ANY, conversion.text(name)):
            raise SettingsError(f"{flag.place}: {flag} {absent_algorithm(algorithm)}")


def ask_for_changes(conversion: Conversion) -> None:
    """Move flags that change the training and have no setting to those that the user must set by hand."""
    _ask_for_program(conversion)
    remedies = {
        str(flag): remedy
        for name, (neutral, remedy) in CHANGES.get(conversion.dialect.name, {}).items()
        if (flag := conversion.flags.get(name)) is not None and _changes(flag, neutral)
    }
    conversion.omissions = [
        replace(item, reason=remedies[item.flag], by_hand=True) if item.flag in remedies and not item.by_hand else item
        for item in conversion.omissions
    ]


def _ask_for_program(conversion: Conversion) -> None:
    """List the program first if it is not one of the stack."""
    pattern, launcher = PROGRAMS.get(conversion.dialect.name), conversion.flags.get("launcher")
    if pattern and launcher and not re.fullmatch(pattern, launcher.texts[0]):
        title = conversion.dialect.title
        reason = f"is no program of {title} and is not read. Set what it changes by hand: reward, rollout, loss"
        item = Omission(launcher.texts[0], str(launcher.place), reason, by_hand=True, first=True)
        conversion.omissions.insert(0, item)


def _changes(flag: Flag, neutral: str) -> bool:
    return bool(flag.problem) or (",".join(flag.texts) or "true").lower() not in neutral.split()
