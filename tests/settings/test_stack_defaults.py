"""A default of another stack, written out, changes nothing: what `settings from` yields has it already.

`stack_defaults/STACK-PROGRAM.txt` holds the defaults of a program, one `key value` a line. They are facts of verl 0.9.1
(its YAML files), OpenRLHF 0.11.2 (its argparse) and alibaba/ROLL of 2026 (its dataclasses); switches that are off,
paths and names are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimectl.migrate.launch_scripts.conversion import Conversion
from slimectl.migrate.launch_scripts.reading import read

FOLDER = Path(__file__).parent / "stack_defaults"
PPO = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=/m data.train_files=/d.parquet"
ASYNC = PPO.replace("trainer.main_ppo", "experimental.fully_async_policy.fully_async_main")
ONE_STEP = PPO.replace("trainer.main_ppo", "experimental.one_step_off_policy.main_ppo")
SFT = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=/m data.train_files=/d.parquet"
EVAL = "data.val_files=/e.parquet actor_rollout_ref.rollout.temperature=0.7"
OPENRLHF = "python -m openrlhf.cli.{} {} --actor.model_name_or_path /m"
ROWS = "deepspeed --module openrlhf.cli.{} --model.model_name_or_path /m --data.dataset /d"
ROLL = """pretrain: /m
response_length: 256
actor_train:
  device_mapping: list(range(0,8))
  data_args: {file_name: /d.jsonl, messages: messages}
  strategy_args: {strategy_name: deepspeed_train}
actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: list(range(0,8))}
"""
AGENTIC = ROLL + "custom_envs: {Lake: {env_type: frozen_lake}}\ntrain_env_manager: {tags: [Lake]}\n"
GROUPED = "adv_estimator: grpo\nreward_normalization: {grouping: traj_group_id, method: mean_std}\n"
SCRIPTS: list[tuple[str, str]] = [
    ("verl-0.9.1-main_ppo", PPO),
    ("verl-0.9.1-main_ppo", f"{PPO} algorithm.adv_estimator=grpo {EVAL}"),
    ("verl-0.9.1-main_ppo", f"{PPO} algorithm.adv_estimator=rloo trainer.save_freq=5 actor_rollout_ref.rollout.n=4"),
    ("verl-0.9.1-main_ppo", f"{PPO} algorithm.adv_estimator=opo actor_rollout_ref.actor.use_kl_loss=true"),
    ("verl-0.9.1-main_ppo", f"{PPO} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo"),
    ("verl-0.9.1-main_ppo", f"{PPO} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=cispo"),
    ("verl-0.9.1-main_ppo", f"{PPO} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.rollout.name=sglang"),
    ("verl-0.9.1-main_ppo", f"{PPO} actor_rollout_ref.actor.clip_ratio_low=0.3 algorithm.adv_estimator=grpo"),
    ("verl-0.9.1-main_ppo", f"{PPO} algorithm.rollout_correction.rollout_is=token {EVAL}"),
    ("verl-0.9.1-fully_async", f"{ASYNC} algorithm.adv_estimator=grpo"),
    ("verl-0.9.1-one_step_off", f"{ONE_STEP} algorithm.adv_estimator=grpo"),
    ("verl-0.9.1-sft_trainer", SFT),
    ("verl-0.9.1-sft_trainer", f"{SFT} model.lora_rank=8 trainer.save_freq=10"),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--vllm.num_engines 2")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--algo.advantage.estimator group_norm")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--algo.advantage.estimator dr_grpo")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format(
        "train_ppo_ray", "--algo.advantage.estimator group_norm --actor.policy_loss_type gspo --algo.kl.use_loss")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--algo.advantage.is_correction_level token")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--algo.advantage.is_correction_level seq")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--ds.lora.rank 8 --ckpt.save_steps 5")),
    ("openrlhf-0.11.2-train_ppo_ray", OPENRLHF.format("train_ppo_ray", "--eval.dataset /e.jsonl --train.async_enable")),
    ("openrlhf-0.11.2-train_sft", ROWS.format("train_sft")),
    ("openrlhf-0.11.2-train_dpo", ROWS.format("train_dpo")),
    ("openrlhf-0.11.2-train_rm", ROWS.format("train_rm")),
    ("roll-rlvr", ROLL),
    ("roll-rlvr", ROLL + "adv_estimator: grpo\nvalidation: {data_args: {file_name: /e.jsonl}}\n"),
    ("roll-rlvr", ROLL + "adv_estimator: grpo\nuse_kl_loss: true\nadd_token_level_kl: true\ndual_clip_loss: true\n"),
    ("roll-rlvr", ROLL + "adv_estimator: reinforce\nwhiten_advantages: true\nuse_pg_clip_range: true\n"),
    ("roll-rlvr", ROLL + "pg_clip: 0.3\nactor_train.pg_variant: gspo\nadv_estimator: grpo\n"),
    ("roll-agentic", AGENTIC),
    ("roll-agentic", AGENTIC + GROUPED),
    ("roll-sft", ROLL.replace("actor_train", "sft_train").replace(", messages: messages", "")),
    ("roll-dpo", ROLL + "chosen_key: chosen\n"),
]  # fmt: skip


def defaults(table: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in (FOLDER / f"{table}.txt").read_text("utf-8").splitlines())


def conversion_of(folder: Path, text: str) -> Conversion:
    file = folder / ("run.yaml" if text.startswith("pretrain") else "run.sh")
    file.write_text(text, encoding="utf-8")
    return read(file, environ={}).conversion


def with_flags(text: str, flags: dict[str, str]) -> str:
    """The script with each flag written out, unless it has that flag already."""
    if text.startswith("pretrain"):
        import yaml

        tree: dict[str, Any] = yaml.safe_load(text)
        for name, value in flags.items():
            node = tree
            *tables, leaf = name.split(".")
            for table in tables:
                node = node.setdefault(table, {})
            node.setdefault(leaf, yaml.safe_load(value))
        return yaml.safe_dump(tree, sort_keys=False) if "pretrain" in tree else text
    dashed = "openrlhf" in text
    present = [word.removeprefix("--").split("=")[0] for word in text.split()]
    new = [(name, value) for name, value in flags.items() if name not in present]
    return " ".join([text, *(f"--{name} {value}" if dashed else f"{name}={value}" for name, value in new)])


MEMORY = ("train.max_tokens_per_gpu", "train.use_dynamic_batch_size", "train.micro_batch_size")
"""Settings that change no result: how much of a step is computed at once."""


def flat(conversion: Conversion) -> dict[str, Any]:
    """The settings by dotted key, without what has no effect, and with what follows from others."""
    sections = conversion.settings.model_dump(by_alias=True)
    values = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    values["vllm.args"] = values["vllm.args"].get("gpu_memory_utilization")  # its other arguments change no result
    if values.get("algorithm.eps_clip_high", 0) is None:
        values["algorithm.eps_clip_high"] = values["algorithm.eps_clip"]
    if values["score.rm_options"] == {"column": "data_source"}:
        values["score.rm_options"] = {}
    if values["run.save_interval"] is None:
        values["run.keep_checkpoints"] = None
    for key in ("top_p", "top_k", "temperature"):
        if values[f"eval.{key}"] is None:
            values[f"eval.{key}"] = values[f"rollout.{key}"]
    has_evaluation = bool(values["eval.data"])
    return {key: value for key, value in values.items() if key not in MEMORY and (has_evaluation or key[:5] != "eval.")}


@pytest.mark.parametrize(("table", "script"), SCRIPTS)
def test_a_default_that_is_written_out_changes_no_setting(table: str, script: str, tmp_path: Path):
    implied = flat(conversion_of(tmp_path, script))
    written = flat(conversion_of(tmp_path, with_flags(script, defaults(table))))
    assert {key: (implied.get(key), value) for key, value in written.items() if implied.get(key) != value} == {}
