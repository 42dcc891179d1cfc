"""ROLL's configurations: keys beyond the table, and settings that several keys decide together."""

from __future__ import annotations

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.conversion import ROWS, Conversion, Dialect, Row, omit_unlisted, take, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.megatron import hand_over
from slimectl.migrate.launch_scripts.roll_keys import GROUPS, INFER, LAYOUT, TRAIN, devices
from slimectl.migrate.launch_scripts.values import secret
from slimectl.migrate.launch_scripts.verl_keys import SIZES
from slimectl.settings.run import KEY_VARIABLES

FILES = "distils from a teacher's probabilities of the responses in a file; opd asks a teacher about the policy's own"
ENVIRONMENTS = ("custom_envs.", "custom_env.", "train_env_manager.", "val_env_manager.")
WHITENING = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def unlisted(conversion: Conversion, flag: Flag) -> None:
    """Pass on arguments of engines, Megatron and trackers. List any other key."""
    name = flag.name
    fields = f"{TRAIN}strategy_args.strategy_config."
    if name.startswith(fields) and "." not in (leaf := name.removeprefix(fields).removeprefix("additional_configs.")):
        _take_field(conversion, flag, leaf)
        return
    engine = conversion.text(f"{INFER}strategy_args.strategy_name")
    tracker = conversion.text("track_with", "wandb")
    prefixes = {
        f"{INFER}strategy_args.strategy_config.": f"{engine}.args." if engine in ("vllm", "sglang") else "",
        "tracker_kwargs.": f"track.kwargs.{tracker}.",
    }
    prefix = next((item for item in prefixes if name.startswith(item)), "")
    leaf = name.removeprefix(prefix)
    if leaf.rpartition("_")[2] == "key" and prefix == "tracker_kwargs." and tracker in KEY_VARIABLES:
        conversion.put("track.api_key", secret(KEY_VARIABLES[tracker])(flag), name)
    elif prefix and prefixes[prefix] and "." not in leaf:
        take(conversion, flag, Row(name, f"{prefixes[prefix]}{leaf}", convert=typed))
    elif prefix and prefixes[prefix]:
        conversion.omit(flag, f"it is in a table. Give that as JSON text in [{prefixes[prefix].rstrip('.')}]")
    elif name.startswith(("rewards.", "reward.", "reference.", "critic.", "system_envs.")):
        conversion.omit(flag, LAYOUT)
    else:
        omit_unlisted(conversion, flag)


def _take_field(conversion: Conversion, flag: Flag, leaf: str) -> None:
    """Convert a key of the trainer's strategy, which is a field of Megatron if Megatron trains."""
    if conversion.text(f"{TRAIN}strategy_args.strategy_name") != "megatron_train":
        conversion.omit(flag, "training is sharded by train.backend, not by DeepSpeed")
    elif leaf in ("bf16", "save_only_model", "is_lora_optimizer_offload"):
        conversion.omit(flag, "train.dtype is the precision, and a checkpoint has all that a run needs to resume")
    else:
        hand_over(conversion, flag, leaf)


def pipeline(conversion: Conversion) -> str:
    """The pipeline of a configuration: rlvr, agentic, sft, dpo or opd."""
    spellings = [flag.spelling for flag in conversion.flags.values()]
    if any(spelling.startswith("student_train") for spelling in spellings):
        return "opd"
    if any(spelling.startswith("sft_") for spelling in spellings):
        return "sft"
    if "beta" in conversion.flags or "chosen_key" in conversion.flags:
        return "dpo"
    return "agentic" if any(name.startswith(ENVIRONMENTS) for name in conversion.flags) else "rlvr"


def settle(conversion: Conversion) -> None:
    """Set what depends on several of ROLL's keys. Raises SettingsError for a pipeline without a counterpart."""
    for name in ("student_pretrain", "teacher_pretrain"):
        if flag := conversion.flags.get(name):
            raise SettingsError(f"{flag.place}: {name} has no counterpart: it {FILES} (docs/algorithms.md)")
    kind = pipeline(conversion)
    if kind != "agentic":
        conversion.put("rollout.shuffle", True, "ROLL reads rows in random order")
    _settle_run(conversion, kind)
    _settle_sizes(conversion)
    _settle_devices(conversion)
    if kind in ROWS:
        _settle_rows(conversion, kind)
        return
    _settle_algorithm(conversion, kind)
    _settle_loss(conversion)
    if kind == "agentic":
        _settle_environment(conversion)
    else:
        _settle_prompts(conversion)
        if kind == "rlvr":
            settle_reward(conversion)


def _settle_run(conversion: Conversion, kind: str) -> None:
    """Settings of the run: all checkpoints are kept, adapters have rank 8, and the tracker is TensorBoard."""
    values = conversion.values
    if "max_ckpt_to_keep" not in conversion.flags:
        conversion.put("run.keep_checkpoints", None, "the default of ROLL for max_ckpt_to_keep")
    if "train.lora_targets" in values and "train.lora_rank" not in values:
        conversion.put("train.lora_rank", 8, f"the default of ROLL for {TRAIN}model_args.lora_rank")
    if "track_with" not in conversion.flags:
        conversion.note_default("track_with", "tensorboard", 'add "tensorboard" to track.with')
    if "megatron.recompute_granularity" in values:
        conversion.settled.add("train.gradient_checkpointing")
    if kind in ROWS and "max_steps" not in conversion.flags:
        conversion.program_defaults["max_steps"] = None
    if kind == "dpo" and "max_steps" not in conversion.flags:
        conversion.note_default("max_steps", 500, "the run ends after its epochs")


def _settle_rows(conversion: Conversion, kind: str) -> None:
    """Pipelines that read demonstrations or preferences have no engine, and train for epochs."""
    conversion.put("algorithm.name", kind, f"the keys of ROLL's {kind} pipeline")
    name = f"{TRAIN}training_args.num_train_epochs"
    epochs = conversion.flags.get(name)
    if "run.num_rollout" not in conversion.values and (epochs is None or not epochs.problem):
        conversion.put("run.num_epoch", epochs.texts[0] if epochs else 1, name)
        conversion.unlist(name)
    if kind == "sft":
        conversion.put_default("prompt_key", "rollout.input_key", "instruction")
        conversion.put_default("response_key", "rollout.label_key", "output")
    conversion.skip_sampling()


def _settle_algorithm(conversion: Conversion, kind: str) -> None:
    """The estimator sets the algorithm, unless the loss does. The normalization of rewards sets its baseline."""
    if kind == "opd":
        conversion.put("algorithm.name", "opd", "student_train learns from the teacher")
        return
    variant = conversion.text("pg_variant", conversion.text("actor_train.pg_variant"))
    estimator = conversion.converted("adv_estimator")
    if "adv_estimator" not in conversion.flags:
        conversion.put("algorithm.name", "ppo", "adv_estimator")
    elif estimator is not None and variant in ("", "vanilla", "ppo"):
        conversion.put("algorithm.name", estimator, "adv_estimator")
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


WORKERS = {
    "MathRuleRewardWorker": "math",
    "GSM8KMathRewardWorker": "math",
    "Geo3kRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "ifeval",
    "CrossThinkQARuleRewardWorker": "boxed_gpqa",
    "MultipleChoiceBoxedRuleRewardWorker": "boxed_gpqa",
    "GeneralValRuleRewardWorker": "gpqa",
}
"""The verifier of each class of workers."""
NOTES = {
    "code": "give rows metadata.tests, which `code` reads in place of test_cases",
    "ifeval": "give rows metadata.instruction_id_list and kwargs, which `ifeval` reads in place of ground_truth",
}


def settle_reward(conversion: Conversion) -> None:
    """Set the verifier of every domain. A domain without a counterpart is listed first."""
    domains = dict.fromkeys(name.split(".")[1] for name in conversion.flags if name.startswith("rewards."))
    types: dict[str, str] = {}
    sources: list[str] = []
    for domain in domains:
        worker, tags = f"rewards.{domain}.worker_cls", f"rewards.{domain}.tag_included"
        kind = conversion.text(worker).rpartition(".")[2]
        listed = conversion.flags[tags].texts if tags in conversion.flags and not conversion.is_unknown(tags) else []
        sources += [name for name in (worker, tags) if name in conversion.flags]
        if kind in WORKERS:
            types |= dict.fromkeys(listed or [domain], WORKERS[kind])
            continue
        place = ", ".join(listed) or domain
        key = "score.rm_options.types" if len(domains) > 1 else "score.rm_type"
        worker_class = f"{kind or 'no class'} of rewards.{domain}"
        conversion.ask_for(key, f"{worker_class} grades {place}. Give its verifier or function (docs/verifiers.md)")
    conversion.unlist(*sources)
    if len(domains) == 1 and types:
        conversion.put("score.rm_type", next(iter(types.values())), *sources)
    elif types:
        conversion.put("score.rm_type", "by_column", "the rewards of the file go by the tag of a row")
        column = conversion.text(f"{TRAIN}data_args.tag", "tag")
        conversion.put("score.rm_options.column", column, "the tag of a row names its reward")
        conversion.put("score.rm_options.types", types, *(name for name in sources if name.endswith("tag_included")))
    for kind in dict.fromkeys(types.values()):
        if kind in NOTES:
            conversion.ask_for("rollout.data", NOTES[kind], first=False)


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


def _settle_loss(conversion: Conversion) -> None:
    """In ROLL, switches turn divergences on, and other keys read the bounds."""
    for switch, coefficient, key, default in (
        ("use_kl_loss", "kl_loss_coef", "algorithm.kl_loss_coef", "0"),
        ("add_token_level_kl", "init_kl_coef", "algorithm.kl_coef", "0.2"),
    ):
        conversion.put_switched(key, switch, coefficient, default)
    values = conversion.values
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
    if values.get("algorithm.name") == "ppo" and "value_clip" not in conversion.flags:
        conversion.put("algorithm.value_clip", 1e6, "ROLL clips no values without value_clip")
    if conversion.switch("dual_clip_loss"):
        conversion.put("algorithm.eps_clip_c", 1.0 + 2.0 * clip, "dual_clip_loss", "pg_clip")
    if conversion.text("loss_agg_mode") == "seq-mean-token-sum":
        conversion.put("algorithm.fixed_length", 1, "loss_agg_mode")


def _settle_prompts(conversion: Conversion) -> None:
    """Prompts are chats of a file. Their lengths limit the response, whatever the engine's arguments are."""
    count = "num_return_sequences_in_group"
    if count in conversion.flags or f"{INFER}generating_args.num_return_sequences" in conversion.flags:
        conversion.put_known("rollout.n_samples_per_prompt", conversion.number(count, 1), count)
    lengths = ("sequence_length", "prompt_length")
    if "response_length" in conversion.flags and not conversion.is_unknown("response_length"):
        conversion.put("rollout.max_response_len", conversion.text("response_length"), "response_length")
    elif "sequence_length" in conversion.flags and not conversion.is_unknown(*lengths):
        length = conversion.number("sequence_length", 0) - conversion.number("prompt_length", 1024)
        conversion.put("rollout.max_response_len", length, *lengths)
    conversion.put("rollout.label_key", "ground_truth", "ROLL's rows have their label there")
    if f"{TRAIN}data_args.messages" not in conversion.flags:
        conversion.put("rollout.apply_chat_template", True, "ROLL renders prompts by data_args.template")


def _settle_environment(conversion: Conversion) -> None:
    """Episodes of environments. The episodes of one start are a group, and a round counts episodes."""
    size = conversion.number("train_env_manager.group_size", 1)
    episodes = conversion.number("rollout_batch_size", 128)
    group, rows = "train_env_manager.group_size", "rollout_batch_size"
    conversion.program_defaults |= {"prompt_length": None, "num_return_sequences_in_group": None}
    conversion.put_known("rollout.n_samples_per_prompt", size, group)
    conversion.put_known("run.rollout_batch_size", max(1, episodes // size), rows, group)
    groups = "train_env_manager.num_env_groups"
    if groups in conversion.flags:
        conversion.put_known("rollout.env_concurrency", conversion.number(groups, 1) * size, groups, group)
    tags = conversion.flags.get("train_env_manager.tags")
    kinds = [conversion.text(f"{table}{tag}.env_type") for tag in (tags.texts if tags else [])
             for table in ("custom_envs.", "custom_env.") if f"{table}{tag}.env_type" in conversion.flags]  # fmt: skip
    named = ", ".join(dict.fromkeys([*(tags.texts if tags else []), *kinds])) or "those of custom_envs"
    conversion.ask_for("rollout.env", f"the environments of the file are {named}. Choose one of docs/environments.md")


def _mapping(conversion: Conversion, name: str) -> list[int]:
    flag = conversion.flags.get(name)
    try:
        return devices(flag) if flag and not flag.problem else []
    except ValueError:
        return []


def _settle_sizes(conversion: Conversion) -> None:
    """Steps have data-parallel ranks x per_device_train_batch_size x gradient_accumulation_steps samples in ROLL."""
    names = [f"{TRAIN}training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    mapping = f"{TRAIN}device_mapping"
    if "train_batch_size" in conversion.flags:
        return
    if conversion.is_unknown(*names) or not (ranks := len(_mapping(conversion, mapping))):
        conversion.values.pop("train.global_batch_size", None)
        reason = "ranks x per_device_train_batch_size x gradient_accumulation_steps, which is not in the file"
        conversion.ask_for("train.global_batch_size", reason, first=False)
        return
    for size in (f"{TRAIN}strategy_args.strategy_config.{size}" for size in SIZES[:3]):
        ranks //= conversion.number(size, 1)
    ranks //= conversion.number(f"{TRAIN}model_args.ulysses_size", 1)
    samples = max(1, ranks) * conversion.number(names[0], 8) * conversion.number(names[1], 1)
    present = [name for name in names if name in conversion.flags]
    source = f"the default of ROLL for {names[0]}"
    conversion.put("train.global_batch_size", samples, *(present or [source]), mapping)


def _settle_devices(conversion: Conversion) -> None:
    training, sampling = (_mapping(conversion, f"{role}device_mapping") for role in (TRAIN, INFER))
    if training and sampling and set(training) & set(sampling):
        conversion.put("cluster.colocate", True, f"{TRAIN}device_mapping", f"{INFER}device_mapping")
    per_node = conversion.number("num_gpus_per_node", 8)
    if len(training) > per_node and not len(training) % per_node:
        sources = (f"{TRAIN}device_mapping", "num_gpus_per_node")
        conversion.put("cluster.actor_num_nodes", len(training) // per_node, *sources)
        conversion.put("cluster.actor_num_gpus_per_node", per_node, *sources)


ROLES = {"sft_train.": TRAIN, "student_train.": TRAIN, "student_infer.": INFER}
"""Workers of other pipelines, by the matching workers of reinforcement learning."""
PROGRAMS = r"start_\w*pipeline"
ROLL = Dialect("roll", "ROLL", GROUPS, settle, unlisted, form="hydra", programs=PROGRAMS, aliases=ROLES)
