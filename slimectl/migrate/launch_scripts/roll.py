"""ROLL's configurations: keys beyond the table, and settings that several keys decide together."""

from __future__ import annotations

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.conversion import ROWS, Conversion, Dialect, Row, is_on, omit_unlisted, take, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.megatron import hand_over
from slimectl.migrate.launch_scripts.roll_algorithm import (
    CORRECTION,
    settle_algorithm,
    settle_loss,
    unlisted_correction,
)
from slimectl.migrate.launch_scripts.roll_keys import GROUPS, INFER, LAYOUT, TRAIN, devices
from slimectl.migrate.launch_scripts.roll_rewards import settle_domains, settle_reward, unlisted_reward
from slimectl.migrate.launch_scripts.values import secret
from slimectl.migrate.launch_scripts.verl_keys import SIZES
from slimectl.settings.run import KEY_VARIABLES

FILES = (
    "distils from a teacher's probabilities of the responses in a file. Sample the teacher with its likeliest tokens "
    "and train on that file (docs/guides/distillation.md), or set algorithm.name = opd"
)
ENVIRONMENTS = ("custom_envs.", "custom_env.", "train_env_manager.", "val_env_manager.")


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
    elif name.startswith("rewards."):
        unlisted_reward(conversion, flag)
    elif name.startswith(CORRECTION):
        unlisted_correction(conversion, flag)
    elif name.startswith(("reward.", "reference.", "critic.", "system_envs.", "reward_model.")):
        conversion.omit(flag, LAYOUT)
    else:
        omit_unlisted(conversion, flag)


def _take_field(conversion: Conversion, flag: Flag, leaf: str) -> None:
    """Convert a key of the trainer's strategy, which is a field of Megatron if Megatron trains."""
    if conversion.text(f"{TRAIN}strategy_args.strategy_name") != "megatron_train":
        conversion.omit(flag, "training is sharded by train.backend, not by DeepSpeed")
    elif leaf == "save_only_model":
        take(conversion, flag, Row(leaf, "train.no_save_optim", convert=is_on))
    elif leaf in ("bf16", "is_lora_optimizer_offload"):
        conversion.omit(flag, "train.dtype is the precision, and train.offload moves weights to host memory")
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
            raise SettingsError(f"{flag.place}: {name} has no counterpart: it {FILES}")
    kind = pipeline(conversion)
    if kind != "agentic":
        conversion.put("rollout.shuffle", True, "ROLL reads rows in random order")
    _settle_run(conversion, kind)
    _settle_sizes(conversion)
    _settle_devices(conversion)
    if kind in ROWS:
        _settle_rows(conversion, kind)
        return
    settle_algorithm(conversion, kind)
    if kind == "agentic":
        _settle_environment(conversion)
    else:
        _settle_prompts(conversion)
        settle_domains(conversion)
        if kind == "rlvr":
            settle_reward(conversion)
    settle_loss(conversion)


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
    if (more := "max_additional_running_prompts") in conversion.flags:
        prompts = conversion.number("rollout_batch_size", 128) + conversion.number(more, 0)
        conversion.put_known("rollout.over_sampling_batch_size", prompts, "rollout_batch_size", more)
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
    turn, length = f"{INFER}generating_args.max_new_tokens", "sequence_length"
    if "rollout.max_response_len" in conversion.values:
        names = [name for name in (turn, "max_tokens_per_step", "response_length") if name in conversion.flags]
        conversion.put_known("rollout.env_turn_tokens", conversion.values["rollout.max_response_len"], *names)
    conversion.drop("rollout.max_response_len")
    if length in conversion.flags:
        conversion.put_known("rollout.max_response_len", conversion.number(length, 0), length)
    groups = "train_env_manager.num_env_groups"
    if groups in conversion.flags:
        conversion.put_known("rollout.env_concurrency", conversion.number(groups, 1) * size, groups, group)
    flag = conversion.flags.get("train_env_manager.tags")
    tags = flag.texts if flag else []
    tables = [name for tag in tags for table in ("custom_envs.", "custom_env.")
              if f"{(name := f'{table}{tag}.')}env_type" in conversion.flags]  # fmt: skip
    kinds = list(dict.fromkeys(conversion.text(f"{table}env_type") for table in tables))
    if len(kinds) == 1 and kinds[0] in GAMES:
        _put_game(conversion, tables[0], *GAMES[kinds[0]])
        return
    named = ", ".join(dict.fromkeys([*tags, *kinds])) or "those of custom_envs"
    conversion.ask_for("rollout.env", f"the environments of the file are {named}. Choose one of docs/environments.md")


GAMES = {
    "frozen_lake": ("gymnasium:FrozenLake-v1", "is_slippery"),
    "sokoban": ("textarena:Sokoban-v0", "dim_room num_boxes"),
}
"""The same games in other libraries, with the arguments that have the same names."""
OWN_TEXTS = "is the same game with its own prompts, answers and rewards (docs/environments.md)"


def _put_game(conversion: Conversion, table: str, game: str, arguments: str) -> None:
    """Set the environment of a game, with the arguments of its first variant, and evaluate held-out episodes."""
    conversion.put("rollout.env", game, f"{table}env_type")
    for argument in arguments.split():
        if (flag := conversion.flags.get(f"{table}env_config.{argument}")) and not flag.problem:
            conversion.put(f"rollout.env_args.{argument}", typed(flag), flag.name)
            conversion.unlist(flag.name)
    conversion.unlist(f"{table}env_type")
    conversion.omit(conversion.flags[f"{table}env_type"], f"{game} {OWN_TEXTS}")
    if any(name.startswith("val_env_manager.") for name in conversion.flags):
        count = conversion.number("val_batch_size", 128)
        conversion.put("eval.data.games", f"env:eval@[0:{count}]" if count > 0 else "env:eval", "val_batch_size")
        conversion.unlist("val_batch_size")


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
