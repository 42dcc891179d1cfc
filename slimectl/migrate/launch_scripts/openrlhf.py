"""OpenRLHF's scripts: its programs, and settings that several flags decide together."""

from __future__ import annotations

from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.conversion import ROWS, Conversion, Dialect, stem
from slimectl.migrate.launch_scripts.openrlhf_flags import GROUPS, aliases
from slimectl.migrate.launch_scripts.values import secret

SCRIPTS = {"train_sft": "sft", "train_dpo": "dpo", "train_rm": "reward_model", "train_opd": "opd"}
"""Programs whose algorithm is not set by flags."""
SAMPLING = ("train_ppo_ray", "train_ppo")
"""Programs whose flags set the algorithm."""
RATES = {"sft": 5e-6, "dpo": 1e-5, "reward_model": 9e-6}
THRESHOLD = "vllm_is_truncated_threshold"
LEVEL, MODE, GATE = (f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "gating"))
UNBOUNDED = 1e6
"""A bound that no importance weight reaches."""


def settle(conversion: Conversion) -> None:
    """Set what depends on several of OpenRLHF's flags together. Raises SettingsError for an unknown program."""
    _settle_program(conversion)
    conversion.put("rollout.shuffle", True, "OpenRLHF reads rows in random order")
    _settle_algorithm(conversion)
    _settle_engines(conversion)
    _settle_lengths(conversion)
    _settle_optimizer(conversion)
    if conversion.values.get("algorithm.name") in ROWS:
        _settle_rows(conversion)
    else:
        _settle_loss(conversion)
        _settle_correction(conversion)
        _settle_reward(conversion)
    _settle_run(conversion)


def _settle_program(conversion: Conversion) -> None:
    """Reject a program of OpenRLHF whose algorithm is unknown."""
    launcher = conversion.flags.get("launcher")
    program = conversion.text("launcher")
    if launcher and ".cli." in program and stem(program) not in (*SCRIPTS, *SAMPLING):
        names = ", ".join([*SAMPLING, *SCRIPTS])
        raise SettingsError(f"{launcher.place}: {program} is not known. Programs of openrlhf.cli that are: {names}")


def _settle_algorithm(conversion: Conversion) -> None:
    """The program decides the algorithm, or else the estimator. gspo is the loss of group_norm."""
    text = conversion.text
    script = stem(text("launcher"))
    estimator = conversion.converted("advantage_estimator")
    if script in SCRIPTS:
        conversion.put("algorithm.name", SCRIPTS[script], "launcher")
    elif "advantage_estimator" not in conversion.flags:
        conversion.put("algorithm.name", "ppo", "advantage_estimator")
    elif estimator is not None:
        conversion.put("algorithm.name", estimator, "advantage_estimator")
    if script not in SCRIPTS and text("policy_loss_type") == "gspo":
        if estimator == "grpo":
            conversion.put("algorithm.name", "gspo", "policy_loss_type", "advantage_estimator")
        else:
            reason = "gspo compares responses within a group, as group_norm does. Set algorithm.name by hand"
            conversion.omit(conversion.flags["policy_loss_type"], reason, by_hand=True)
    if conversion.switch("use_kl_loss"):
        conversion.values.pop("algorithm.kl_coef", None)
        conversion.put("algorithm.kl_loss_coef", text("init_kl_coef", "0.01"), "use_kl_loss", "init_kl_coef")
        conversion.settled.add("algorithm.kl_coef")
        conversion.unlist("use_kl_loss")
    if conversion.values.get("algorithm.name") == "opd":
        conversion.settled.add("algorithm.kl_coef")
        if not conversion.is_unknown("train_batch_size"):
            samples = conversion.number("n_samples_per_prompt", 1)
            rows = max(1, conversion.number("train_batch_size", 128) // samples)
            conversion.put("run.rollout_batch_size", rows, "train_batch_size")


def _settle_loss(conversion: Conversion) -> None:
    """Bounds and sums whose defaults depend on the algorithm here."""
    name = conversion.values.get("algorithm.name")
    has_bounds = conversion.put_pair("eps_clip_low_high", "algorithm.eps_clip", "algorithm.eps_clip_high")
    if name == "gspo" and not has_bounds:
        conversion.put_known("algorithm.eps_clip_high", conversion.real("eps_clip", 0.2), "eps_clip")
    if name == "gspo":
        conversion.put("algorithm.calculate_per_token_loss", False, "gspo takes the mean of each response")
    if name == "dr_grpo":
        conversion.put("algorithm.fixed_length", None, "OpenRLHF's dr_grpo has the mean over tokens")


def _settle_correction(conversion: Conversion) -> None:
    """The mismatch correction between engine and trainer: per token, or per response by the geometric mean."""
    level, kind = conversion.text(LEVEL, "off"), conversion.text("vllm_is_correction_type", "tis")
    is_old = conversion.switch("enable_vllm_is_correction")
    pair = conversion.flags.get(THRESHOLD)
    bounds = [0.5, 5.0] if pair is None else [float(text) for text in pair.texts if not pair.problem]
    bounds = [0.0, *bounds] if len(bounds) == 1 else bounds
    keys = [f"algorithm.{key}" for key in ("use_tis", "tis_clip", "tis_clip_low", "tis_mode", "tis_level")]
    flags = [name for name in (LEVEL, "enable_vllm_is_correction", "vllm_is_correction_type", MODE, THRESHOLD)
             if name in conversion.flags]  # fmt: skip
    if (not is_old and level == "off") or not flags:
        for key in keys:
            conversion.take_back(key, "the correction is off")
        return
    if conversion.text(GATE, "ratio") != "ratio" or len(bounds) != 2:
        conversion.drop(*keys)
        reason = "the gate is the ratio of probabilities, within two bounds. Set algorithm.use_tis or use_rs by hand"
        for name in dict.fromkeys((GATE, *flags) if GATE in conversion.flags else (THRESHOLD, *flags)):
            if name in conversion.flags:
                conversion.unlist(name)
                conversion.omit(conversion.flags[name], reason, by_hand=name in (GATE, THRESHOLD))
        return
    low, high = bounds
    if conversion.values.get("algorithm.name") == "gspo":
        conversion.drop(*keys)
        settings: dict[str, Any] = {"use_rollout_logprobs": True}
    elif level == "seq" or (is_old and kind == "seq-mask-tis"):
        conversion.drop(*keys)
        settings = {"use_tis": True, "tis_clip": UNBOUNDED, "use_rs": True, "rs_level": "geometric",
                    "rs_clip_low": low, "rs_clip": high}  # fmt: skip
    else:
        settings = {"use_tis": True, "tis_clip_low": low, "tis_clip": high}
        if not is_old and MODE not in conversion.flags:
            conversion.put("algorithm.tis_mode", "mask", f"the default of OpenRLHF for --{MODE}")
    for key, value in settings.items():
        conversion.put(f"algorithm.{key}", value, *flags)


def _settle_engines(conversion: Conversion) -> None:
    """Engines have their own GPUs, unless all models share them."""
    engines = conversion.number("vllm_num_engines", 0)
    if engines > 0:
        conversion.put("engine.backend", "vllm", "vllm_num_engines")
        conversion.put("engine.dtype", "bfloat16", "the default of OpenRLHF for its engine")
        size = conversion.number("vllm_tensor_parallel_size", 1)
        conversion.put("cluster.rollout_num_gpus", engines * size, "vllm_num_engines", "vllm_tensor_parallel_size")
    else:
        conversion.settled.add("vllm.args.gpu_memory_utilization")
    if conversion.switch("use_dynamic_batch"):
        conversion.put_default("train_max_tokens_per_gpu", "train.max_tokens_per_gpu", 16192)
    if not conversion.switch("async_train"):
        conversion.take_back("run.async_level", "has no effect there without --async_train")
    else:
        conversion.take_back("cluster.colocate", "with --async_train engines have GPUs of their own there")
        conversion.take_back("rollout.partial_rollout", "responses in progress always continue after a weight push")


def _settle_rows(conversion: Conversion) -> None:
    """Programs that read rows do not sample, and train for epochs."""
    name = str(conversion.values["algorithm.name"])
    conversion.skip_sampling()
    if "max_len" in conversion.flags:
        conversion.take_back("rollout.max_context_len", "rows are not cut")
    else:
        conversion.note_default("max_len", 2048 if name == "sft" else 512, "rows are not cut")
    if name == "sft":
        conversion.put_default("input_key", "rollout.input_key", "input")
    conversion.program_defaults |= {"actor_learning_rate": RATES[name], "reward_clip_range": None}
    conversion.drop("train.ppo_epochs")
    if "max_epochs" not in conversion.flags:
        conversion.put("run.num_epoch", 2 if name == "sft" else 1, "max_epochs")
    elif not conversion.is_unknown("max_epochs"):
        conversion.put("run.num_epoch", conversion.text("max_epochs"), "max_epochs")
        conversion.unlist("max_epochs")


def _settle_lengths(conversion: Conversion) -> None:
    """Dotted flags have a single limit for prompt and response together."""
    if conversion.values.get("algorithm.name") in ROWS:
        return
    if not any("." in flag.spelling for flag in conversion.flags.values()):
        return
    conversion.settled.add("rollout.max_prompt_len")
    length = conversion.number("max_len", 2048)
    conversion.put_known("rollout.max_context_len", length, "max_len")
    if "generate_max_len" not in conversion.flags:
        conversion.put_known("rollout.max_response_len", length, "max_len")


def _settle_optimizer(conversion: Conversion) -> None:
    """Settings of AdamW and its schedule. Its minimum is a fraction of the learning rate."""
    name = str(conversion.values.get("algorithm.name"))
    if conversion.text("lr_scheduler", "cosine_with_min_lr") == "cosine_with_min_lr":
        default = RATES.get(name, 1e-6)
        rate = conversion.real("actor_learning_rate", conversion.real("learning_rate", default))
        share = conversion.real("actor.min_lr_ratio", 0.1)
        if not conversion.is_unknown("actor_learning_rate", "learning_rate", "lr_scheduler"):
            conversion.put("train.min_lr", float(f"{share * rate:.6g}"), "actor.min_lr_ratio", "lr_scheduler")
    if not conversion.put_pair("adam_betas", "train.adam_beta1", "train.adam_beta2"):
        conversion.put_default("adam_betas", "train.adam_beta2", 0.95)
    if "train.lora_rank" in conversion.values:
        conversion.put_default("lora_alpha", "train.lora_alpha", 16)


def _settle_run(conversion: Conversion) -> None:
    """Trackers, and the run's folder."""
    values, text = conversion.values, conversion.text
    if "use_wandb" in conversion.flags:
        conversion.put("track.api_key", secret("WANDB_API_KEY")(conversion.flags["use_wandb"]), "use_wandb")
        if text("use_wandb").lower() in ("true", "1", ""):
            conversion.values.pop("track.api_key")
    if "use_tensorboard" in conversion.flags:
        trackers = [*values.get("track.with", ["stdout"]), "tensorboard"]
        conversion.put("track.with", trackers, "use_wandb", "use_tensorboard")
    if "run.save_interval" not in values:
        conversion.settled.add("run.keep_checkpoints")
    conversion.name_run("save_path")


def _settle_reward(conversion: Conversion) -> None:
    """A reward comes from a model, a server, a function in a file, or an agent."""
    address = conversion.flags.get("remote_rm_url")
    agent = conversion.flags.get("agent_func_path")
    if agent is not None:
        conversion.values.pop("rollout.custom_generate_function_path", None)
        reason = "brings the reward. Write it as rollout.custom_generate_function_path (docs/agents.md)"
        conversion.omit(agent, reason, first=True)
        conversion.take_back("score.rm_url", "--agent_func_path overrides it")
        conversion.take_back("score.rm_options.path", "--agent_func_path overrides it")
    elif address is not None and "score.rm_url" in conversion.values:
        if conversion.text("remote_rm_url").endswith(".py"):
            conversion.values.pop("score.rm_url")
            conversion.put("score.custom_rm_path", f"{conversion.text('remote_rm_url')}:reward_func", "remote_rm_url")
        else:
            conversion.put("score.rm_type", "remote_rm", "remote_rm_url")
        conversion.take_back("score.rm_options.path", "--remote_rm_url overrides it")
    elif "score.rm_options.path" in conversion.values:
        conversion.put("score.rm_type", "reward_model", "reward_pretrain")


PROGRAMS = r"(openrlhf|molt)\.cli\.train_"
OPENRLHF = Dialect("openrlhf", "OpenRLHF", GROUPS, settle, programs=PROGRAMS, aliases=aliases())
