"""Constructs of real launch scripts, each once: what a script starts is found, and its values are right or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import Reading, read

TRAIN = (
    "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 4 --rm-type math "
    "--rollout-max-response-len 64"
)
"""The beginning of a training command, for which `START` stands below."""


def reading(folder: Path, text: str, name: str = "run.sh", **options: Any) -> Reading:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text.replace("START", TRAIN), encoding="utf-8")
    return read(folder / name, **{"environ": {}, **options})


def by_hand(result: Reading) -> dict[str, str]:
    """The flags whose values the user sets, with the reasons."""
    return {item.flag: item.reason for item in result.conversion.omissions if item.by_hand and not item.first}


@pytest.mark.parametrize(
    "script",
    [
        "declare -A P=([s]=30 [l]=2); S=s; START --num-rollout ${P[$S]}",
        'A=(); START --num-rollout 30 "${A[@]+"${A[@]}"}"',
        'A=(--num-rollout 30); START "${A[@]+"${A[@]}"}"',
        "IFS=, read -r -a A <<< 10,20,30; START --num-rollout ${A[2]}",
        'read -r A B <<< "1 30"; START --num-rollout $B',
        "mapfile -t A <<< $'--num-rollout\\n30'; START \"${A[@]}\"",
        "N=$(echo 0,1,2 | tr ',' '\\n' | wc -l); START --num-rollout ${N}0",
        "N=$(echo Qwen-30B | sed 's/Qwen-//; s/B//'); START --num-rollout $N",
        "N=$(echo a/30 | cut -d/ -f2); START --num-rollout $N",
        "N=$(awk -F, '{print NF}' <<< 1,2,3); START --num-rollout ${N}0",
        "N=$(printf '%s\\n' 7 30 | tail -n 1); START --num-rollout $N",
        "bash child.sh 30",
        'srun --nodes=1 bash "$(dirname "$0")/child.sh" 30 2>&1 | tee log',
        "source /elsewhere/lib/m.sh; START --num-rollout $((N - 1))",
        "cd /elsewhere && source lib/m.sh; START --num-rollout $((N - 1))",
        "PY=$(which python3); ${PY/x/y} train.py --hf-checkpoint /m --prompt-data /d --rollout-batch-size 4"
        " --num-rollout 30",
        'IP=$(hostname); bash -lc "export IP=$IP; START --num-rollout 30 --sglang-router-ip $IP"',
        'A=(--num-rollout 30 --wandb-dir "$(date)"); printf -v Q " %q" "${A[@]}"; srun bash -c "START$Q"',
        'ray job submit --runtime-env-json=\'{"env_vars": {}}\' -- bash -lc "cd /x && START --num-rollout 30"',
        'CMD="START --num-rollout 30"; eval $CMD',
        "sbatch <<EOF\n#!/bin/bash\nSTART --num-rollout 30\nEOF",
        "cat <<EOF | sbatch\nSTART --num-rollout 30\nEOF",
        'sbatch --wrap="START --num-rollout 30"',
        'ssh host "cd x; START --num-rollout 30"',
        'KEY=<your key>\nexport OTHER=<another>\nSTART --num-rollout 30 --wandb-host "$KEY"',
        "if [[ $1 == --check ]]; then exec START --num-rollout 1 --help; fi; START --num-rollout 30",
        'usage() { echo "usage"; exit 2; }; [ $# -ge 0 ] || usage; START --num-rollout 30',
    ],
)
def test_a_construct_of_launch_scripts_is_followed(script: str, tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "m.sh").write_text("N=31\n")
    (tmp_path / "child.sh").write_text(f"{TRAIN} --num-rollout $1\n")
    assert reading(tmp_path, script).conversion.values["run.num_rollout"] == "30"


def test_a_guard_that_would_end_the_script_is_passed_over_and_said(tmp_path: Path):
    script = 'if [ -z "$DATA" ]; then\n  exit 1\nfi\n[ "$DATA" ] || exit 2\nSTART --save $DATA/out --num-rollout 30'
    result = reading(tmp_path, script)
    assert [str(note.place).rpartition(":")[2] for note in result.notes] == ["2", "4"]
    assert result.notes[0].text.startswith("exit 1: is skipped")
    assert by_hand(result) == {
        "--save /out": "DATA is not set in the script or in the environment. Set run.dir by hand"
    }
    assert reading(tmp_path, script, environ={"DATA": "/x"}).notes == []
    with pytest.raises(SettingsError, match="no training command"):
        reading(tmp_path, "exit 0\nSTART")


def test_of_a_text_for_another_shell_what_is_not_known_is_left_and_the_rest_is_read(tmp_path: Path):
    script = 'HOSTS=($(scontrol show hostnames))\nsrun bash -c "\nSTART --wandb-host ${HOSTS[1]} --num-rollout 30\n"'
    result = reading(tmp_path, script)
    reason = "$(scontrol show hostnames) is a command, and nothing of the script is executed. Set track.host by hand"
    assert by_hand(result) == {"--wandb-host '$(scontrol show hostnames)'": reason}
    assert result.conversion.values["run.num_rollout"] == "30"


def test_a_command_under_an_unknown_condition_is_read_and_the_condition_is_noted(tmp_path: Path):
    result = reading(tmp_path, "if nvidia-smi; then\n  START --num-rollout 30\nfi")
    assert result.conversion.values["run.num_rollout"] == "30"
    assert [note.text for note in result.notes] == [
        f"whether this command is started: it depends on a condition that is not evaluated ({tmp_path}/run.sh:1)"
    ]


def test_where_no_command_is_seen_the_line_says_what_was_not_read(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"starts the training; [^\n]*run\.sh:1: source /else/env: is not read, as"):
        reading(tmp_path, "source /else/env")


ACCELERATE = "mixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\n"
RECIPE = "model_name: /m\ndataset_name: /d\nnum_generations: 4\nproject_name: p\n"


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --config_file configs/two.yaml src/grpo.py --config recipe.yaml",
        "accelerate launch --num_processes 8 --num_machines 2 src/grpo.py --config recipe.yaml",
        "CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model /m &\nnohup trl grpo --config recipe.yaml --num_processes 8 "
        "--num_machines 2 > log &",
    ],
)
def test_processes_of_accelerate_are_those_of_all_machines(command: str, tmp_path: Path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "two.yaml").write_text(ACCELERATE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    values = reading(tmp_path, command).conversion.settings.model_dump()
    assert values["model"]["path"] == "/m"
    assert {name: values["cluster"][name] for name in ("actor_num_nodes", "actor_num_gpus_per_node", "executor")} == {
        "actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "executor": "ray",
    }  # fmt: skip


def test_a_data_set_that_a_program_derives_step_by_step_is_the_one_it_loads(tmp_path: Path):
    program = (
        'rows = load_dataset("org/rows", split="train")\nrows = rows.map(f).train_test_split(0.1)\n'
        'GRPOTrainer(model="/m", args=GRPOConfig(beta=0.1, max_steps=3), train_dataset=rows["train"])\n'
    )
    assert reading(tmp_path, program, "run.py").conversion.values["rollout.data"] == ["org/rows"]


def test_devices_of_roll_may_be_a_sum_of_ranges(tmp_path: Path):
    text = "pretrain: /m\nrollout_batch_size: 4\nactor_train: {device_mapping: 'list(range(0,2)) + list(range(4,8))'}\n"
    assert reading(tmp_path, text, "run.yaml").conversion.settings.cluster.actor_num_gpus_per_node == 6


@pytest.mark.parametrize(("level", "expected"), [("token", (True, "token")), ("null", (False, "token"))])
def test_a_correction_of_verl_is_on_where_its_level_is_named(level: str, expected: tuple[bool, str], tmp_path: Path):
    words = "algorithm.adv_estimator=grpo data.train_files=/d actor_rollout_ref.model.path=/m"
    correction = f"algorithm.rollout_correction.rollout_is={level}"
    settings = reading(tmp_path, f"python3 -m verl.trainer.main_ppo {words} {correction}").conversion.settings
    algorithm = settings.model_dump()["algorithm"]
    assert (algorithm["use_tis"], algorithm["tis_level"]) == expected


ROWS = "--pretrain /m --dataset /d.jsonl --max_len 64 --train_batch_size 8"
KTO = (
    "learns from responses that are marked good or bad one by one. The nearest is algorithm.name = dpo, which learns "
    "from pairs (docs/algorithms.md)"
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", f"deepspeed --module openrlhf.cli.train_kto {ROWS}", f"run.sh:1: openrlhf.cli.train_kto {KTO}"),
        ("run.sh", "trl kto --model_name_or_path /m --dataset_name /d --max_steps 3", f"run.sh:1: kto {KTO}"),
        (
            "run.sh",
            "accelerate launch a/kto.py --model_name_or_path /m --beta 0.1 --max_steps 3",
            f"run.sh:1: a/kto.py {KTO}",
        ),
        ("run.py", "a = KTOConfig(max_steps=3, bf16=True, learning_rate=1e-6, beta=0.1)", f"run.py:1: KTOConfig {KTO}"),
        (
            "run.sh",
            "python3 -m verl.trainer.main_generation data.path=/d model.path=/m trainer.nnodes=1 data.n_samples=2 "
            "trainer.n_gpus_per_node=8 rollout.temperature=1",
            "run.sh:1: verl.trainer.main_generation samples responses and trains nothing. "
            "That is `slimectl rollout` or `slimectl serve`",
        ),
    ],
)
def test_a_program_that_does_what_nothing_here_does_is_refused(name: str, text: str, message: str, tmp_path: Path):
    with pytest.raises(SettingsError) as error:
        reading(tmp_path, text, name, stack="verl" if "verl" in text else None)
    assert str(error.value).replace(f"{tmp_path}/", "") == message


def test_of_two_programs_the_one_that_has_a_counterpart_is_read(tmp_path: Path):
    text = f"deepspeed ../batch_inference.py {ROWS} --eval_task rm\ndeepspeed ../train_sft.py {ROWS}"
    assert reading(tmp_path, text).conversion.values["algorithm.name"] == "sft"


def test_an_estimator_without_a_counterpart_is_left_to_the_user(tmp_path: Path):
    result = reading(tmp_path, "START --advantage-estimator new")
    reason = by_hand(result)["--advantage-estimator new"]
    assert reason.startswith("new has no counterpart. Available: ")
    assert reason.endswith(". Set algorithm.name by hand")


def test_a_configuration_is_read_from_the_folder_that_config_dir_names(tmp_path: Path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 64}\n")
    words = "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=/m data.train_files=/d trainer.nnodes=1"
    result = reading(tmp_path, f"python3 -m verl.trainer.main_ppo --config-dir c --config-name mine {words}")
    assert (result.conversion.values["rollout.max_prompt_len"], result.notes) == ("64", [])
