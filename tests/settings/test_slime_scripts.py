"""Scripts in slime's style: each becomes the right settings, is refused, or names what is left to the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import Reading, read
from slimectl.migrate.launch_scripts.values import SOLUTION

FLAGS = (
    "--hf-checkpoint /r/Qwen3-4B --prompt-data /d.jsonl --rollout-batch-size 4 --rm-type math "
    "--rollout-max-response-len 8"
)
START = f"python3 train.py {FLAGS}"
"""The beginning of a training command, for which START stands below; FLAGS are its flags alone."""
ROUNDS = {"run.num_rollout": "30"}

FILES = {
    "child.sh": 'START --num-rollout "$1"\n',
    "models/small.sh": "MODEL_ARGS=(\n  --num-layers 6\n  --num-experts 8\n)\n",
    "launch.py": """\
import slime.utils.external_utils.command_utils as U
from dataclasses import dataclass
import typer

@dataclass
class Options(U.ExecuteTrainConfig):
    rounds: int = 30
    lr: float = 1e-5
    fast: bool = False

@U.dataclass_cli
def main(options: Options):
    flags = f"--num-rollout {options.rounds} --lr {options.lr} "
    if options.fast:
        flags += "--colocate "
    U.execute_train(train_args="FLAGS " + flags, num_gpus_per_node=8, megatron_model_type="qwen3-4B", config=options)

if __name__ == "__main__":
    typer.run(main)
""",
}
"""Files beside each script."""


def reading(folder: Path, text: str, name: str = "run.sh") -> Reading:
    for file, content in {**FILES, name: text}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content.replace("START", START).replace("FLAGS", FLAGS), encoding="utf-8")
    return read(folder / name, environ={"LR": "3e-6"})


def check(result: Reading, expected: dict[str, Any]) -> None:
    """Compare settings by key; `hand FLAG` and `listed FLAG` with a part of the reason, `note` with a part of one."""
    conversion = result.conversion
    for name, value in expected.items():
        kind, _, flag = name.partition(" ")
        if kind in ("hand", "listed"):
            reasons = [
                item.reason
                for item in conversion.omissions
                if item.flag.startswith(flag) and item.by_hand == (kind == "hand")
            ]
            assert [reason for reason in reasons if value in reason], (name, conversion.omissions)
        elif name == "note":
            assert [note for note in result.notes if value in f"{note.place} {note.text}"], result.notes
        else:
            assert conversion.values.get(name) == value, name


STARTED = {
    "exec": "exec START --num-rollout 30",
    "exec a file": "exec bash child.sh 30",
    "exec under a name": "exec -a train bash child.sh 30",
    "a traced shell": "bash -x child.sh 30",
    "an option with a value": "bash -euo pipefail child.sh 30",
    "a file by itself": "./child.sh 30",
    "exec of a file by itself": "cd . && exec ./child.sh 30",
    "arguments of source": "source child.sh 30",
    "arguments that source takes over": "set -- 30\n. ./child.sh",
    "in the background": "nohup bash child.sh 30 > log 2>&1 &\nwait",
    "a step of Slurm": "srun --ntasks=1 bash -c 'exec bash child.sh 30'",
    "a job of Slurm": "sbatch --nodes=2 child.sh 30",
    "a job whose number is kept": 'JOB="$(\n  sbatch --parsable -A me child.sh 30\n)"\necho "$JOB"',
    "a job of Ray": 'ray job submit --address=x --runtime-env-json=\'{"env_vars": {"A": "1"}}\' -- bash child.sh 30',
    "a container": "docker run --gpus all -v /a:/b image bash -c 'cd /x && START --num-rollout 30'",
    "a file in a container": "docker run image bash child.sh 30",
    "the environment": "env A=1 PYTHONPATH=/x bash child.sh 30",
    "a clock": "time START --num-rollout 30",
    "an array": "A=(\n  --num-rollout 30 # rounds\n  # --num-rollout 40\n)\nSTART \\\n  ${A[@]}",
    "an array that grows": "A=()\nA+=(--num-rollout 30)\nSTART ${A[@]}",
    "a runtime environment": 'E="{\\"env_vars\\": {\\"P\\": \\"${P:-1}\\"}}"\n'
    'ray job submit --runtime-env-json="$E" -- START --num-rollout 30',
    "a document": "read -r -d '' A <<EOF\n--num-rollout 30\nEOF\nSTART $A",
    "a loop": "A=()\nfor n in 10 20 30; do N=$n; done\nSTART --num-rollout $N",
    "a condition": "if [ -n '' ]; then N=1; else N=30; fi\nSTART --num-rollout $N",
    "a case": "case qwen-30 in *-30) N=30 ;; *) N=1 ;; esac\nSTART --num-rollout $N",
    "a function": "train() {\n  local n=$1\n  START --num-rollout $n\n}\ntrain 30",
    "a launcher": "python launch.py",
    "a launcher with options": "python3 launch.py --rounds 30 --lr 1e-5",
    "a launcher as a job": "ray job submit -- python launch.py --rounds 30",
}


@pytest.mark.parametrize("script", STARTED.values(), ids=STARTED)
def test_the_training_command_is_found_however_it_is_started(script: str, tmp_path: Path):
    check(reading(tmp_path, script), ROUNDS)


CUT = {
    "no backslash": ("START \\\n  --num-rollout 30\n  --lr 1e-5 \\\n  --seed 7", 2, "ends without a backslash", 3),
    "comment": ("START \\\n  --num-rollout 30 \\\n  # --x \\\n  --lr 1e-5 --seed 7", 3, "is a comment", 4),
    "comment behind": ("START \\\n  --num-rollout 30 # n \\\n  --lr 1e-5 --seed 7", 2, "is in a comment", 3),
    "empty line": ("START \\\n  --num-rollout 30 \\\n\n  --lr 1e-5 --seed 7", 3, "is empty", 4),
    "blank": ("START --num-rollout 30 \\ \n  --lr 1e-5 --seed 7", 1, "a blank follows the backslash", 2),
    "array": ("A=(--lr 1e-5)\nSTART \\\n  --num-rollout 30\n  ${A[@]} \\\n  --seed 7", 3, "without a backslash", 4),
}


@pytest.mark.parametrize(("script", "line", "cause", "place"), CUT.values(), ids=CUT)
def test_flags_that_a_line_cuts_off_are_counted(script: str, line: int, cause: str, place: int, tmp_path: Path):
    result = reading(tmp_path, script)
    note = f"run.sh:{place} 2 flags after line {line} are not part of the command: "
    check(result, ROUNDS | {"note": note, "train.lr": None, "run.seed": None})
    assert [cause in item.text and item.text.endswith("The first is --lr") for item in result.notes] == [True]


FP8 = "START --num-rollout 30 --hf-checkpoint /r/Qwen3-4B-FP8"
CONVERT = "slimectl convert {} DIR --config {}"
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 engine": (
        f"{FP8} --ref-load /r/Qwen3-4B_torch_dist --load /r/run --save /r/run",
        {"model.path": None, "engine.load": "/r/Qwen3-4B-FP8", "engine.dtype": "bfloat16",
         "hand --ref-load": CONVERT.format("/r/Qwen3-4B_torch_dist", "/r/Qwen3-4B-FP8")},
    ),
    "fp8 engine beside a Hugging Face directory": (
        f"{FP8} --ref-load /r/Qwen3-4B --megatron-to-hf-mode bridge",
        {"model.path": "/r/Qwen3-4B", "engine.load": "/r/Qwen3-4B-FP8"},
    ),
    "fp8 by the model": (
        "START --num-rollout 30 --hf-checkpoint /r/DeepSeek-R1 --ref-load /r/DeepSeek-R1_torch_dist",
        {"model.path": None, "engine.load": "/r/DeepSeek-R1"},
    ),
    "not fp8 by its name": (
        "START --num-rollout 30 --hf-checkpoint /r/DeepSeek-R1-Distill-Qwen-7B --ref-load "
        "/r/DeepSeek-R1-Distill-Qwen-7B_torch_dist",
        {"model.path": "/r/DeepSeek-R1-Distill-Qwen-7B", "engine.load": None},
    ),
    "int4 engine": (
        "START --num-rollout 30 --hf-checkpoint /r/M-INT4 --ref-load /r/M-INT4_torch_dist --int4-params-rollout",
        {"model.path": None, "engine.load": None, "hand --hf-checkpoint": "--quantize fp8",
         "hand --ref-load": CONVERT.format("/r/M-INT4_torch_dist", "/r/M-INT4")},
    ),
    "unknown folder": (
        "START --num-rollout 30 --hf-checkpoint $BASE/M-FP8 --ref-load $BASE/M_torch_dist",
        {"model.path": None, "engine.load": None, "hand --hf-checkpoint": "Set engine.load by hand",
         "hand --ref-load": "Set model.path"},
    ),
    "the same weights": (
        "START --num-rollout 30 --ref-load /r/Qwen3-4B_torch_dist --use-kl-loss --kl-loss-coef 0.01",
        {"model.path": "/r/Qwen3-4B", "algorithm.ref_load": None, "algorithm.kl_loss_coef": "0.01"},
    ),
    "other weights": (
        "START --num-rollout 30 --ref-load /r/Qwen3-4B_torch_dist --load /r/sft/iter_10 --use-kl-loss "
        "--kl-loss-coef 0.01",
        {"model.path": None, "algorithm.ref_load": "/r/Qwen3-4B",
         "hand --load": CONVERT.format("/r/sft/iter_10", "/r/Qwen3-4B")},
    ),
    "another reference": (
        "START --num-rollout 30 --load /r/Qwen3-4B_torch_dist --ref-load /r/Big_torch_dist --kl-coef 0.01",
        {"model.path": "/r/Qwen3-4B", "hand --ref-load": "slimectl convert /r/Big_torch_dist DIR"},
    ),
    "teacher": (
        "START --num-rollout 30 --use-opd --opd-type megatron --opd-teacher-load /r/T_torch_dist",
        {"algorithm.opd_teacher_load": None, "hand --opd-teacher-load": "slimectl convert /r/T_torch_dist DIR"},
    ),
    "fp8 training": (
        "START --num-rollout 30 --transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe blockwise",
        {"megatron.args.fp8": "e4m3", "megatron.args.fp8_recipe": "blockwise",
         "megatron.args.transformer_impl": "transformer_engine"},
    ),
    "fp8 training of experts": (
        "source models/small.sh\nSTART --num-rollout 30 ${MODEL_ARGS[@]} --fp8-format e4m3 --fp8-recipe blockwise",
        {"megatron.args.fp8": None, "listed --fp8-format": "dense models", "listed --fp8-recipe": "dense models"},
    ),
    "fp8 training of experts by their name": (
        "START --num-rollout 30 --hf-checkpoint /r/Qwen3-30B-A3B --fp8-format e4m3",
        {"megatron.args.fp8": None, "listed --fp8-format": "dense models"},
    ),
    "fp4 training": (
        "START --num-rollout 30 --fp4-format e2m1 --fp4-recipe nvfp4",
        {"listed --fp4-format": "does not train in 4 bits"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_what_is_trained_and_what_engines_load_is_right_or_named(script: str, expected: dict[str, Any], tmp_path: Path):
    check(reading(tmp_path, script), ROUNDS | expected)


DISTILLATION = "examples.on_policy_distillation.on_policy_distillation"
TEACHER = "slime.rollout.on_policy_distillation"
HELPERS = "examples.on_policy_distillation.topk_opd_helpers"
LOSS = "slime.backends.megatron_utils.loss"
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "asynchronous": (f"python3 train_async.py {FLAGS}", {"run.async_level": 1}),
    "a folder with async in its name": (f"python3 /x/async-runs/train.py {FLAGS}", {"run.async_level": None}),
    "fully asynchronous": (
        "START --rollout-function-path fully_async_rollout.generate_rollout_fully_async", {"run.async_level": 2}),
    "supervised": (
        "START --loss-type sft_loss --num-epoch 3 --debug-train-only --disable-compute-advantages-and-returns "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout",
        {"algorithm.name": "sft", "run.num_epoch": "3", "rollout.function_path": None, "engine.backend": None,
         "listed --debug-train-only": "never samples"}),
    "a loss of one's own": (
        "START --loss-type custom_loss --custom-loss-function-path my.losses.loss",
        {"train.custom_loss_function_path": "my.losses:loss", "algorithm.name": None}),
    "an unknown estimator": ("START --advantage-estimator new", {"hand --advantage-estimator": "algorithm.name"}),
    "a teacher on a server": (
        f"START --advantage-estimator on_policy_distillation --custom-rm-path {DISTILLATION}.reward_func "
        f"--custom-reward-post-process-path {DISTILLATION}.post_process_rewards --rm-url http://10.0.0.1:131/generate",
        {"algorithm.name": "opd", "algorithm.opd_teacher_url": ["http://10.0.0.1:131"], "score.custom_rm_path": None}),
    "a teacher of another vocabulary": (
        f"START --use-opd --opd-type sglang --custom-rm-path {TEACHER}.reward_func_cross_vocab "
        f"--custom-reward-post-process-path {TEACHER}.post_process_rewards_cross_vocab --opd-teacher-retries 2 "
        "--rm-url http://10.0.0.1:131/generate",
        {"algorithm.name": "opd", "algorithm.opd_teacher_url": ["http://10.0.0.1:131"], "score.rm_url": None,
         "listed --opd-teacher-retries": "engine.request_timeout_s"}),
    "a teacher whose address another program knows": (
        f"START --custom-rm-path {TEACHER}.reward_func --rm-url http://$(hostname):131/generate",
        {"algorithm.name": "opd", "hand algorithm.opd_teacher_url": "the address of a teacher"}),
    "stand-ins for a reward beside a teacher": (
        f"START --use-opd --opd-type megatron --opd-teacher-load /t --custom-rm-path {HELPERS}.zero_reward_func "
        f"--custom-reward-post-process-path {HELPERS}.zero_reward_post_process "
        f"--custom-advantage-function-path {HELPERS}.placeholder_advantage_function",
        {"algorithm.name": "opd", "algorithm.opd_teacher_load": "/t", "score.custom_rm_path": None,
         "score.custom_reward_post_process_path": None, "train.custom_advantage_function_path": None}),
    "a teacher that slime serves": (
        "python3 -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint /t --load /t "
        f"--teacher-port 7999 --no-megatron-server-warmup &\npython3 train.py {FLAGS}",
        {"model.path": "/r/Qwen3-4B"}),
    "flags of such a teacher": ("START --teacher-port 7999", {"listed --teacher-port": "slimectl serve"}),
    "adapters": (
        "START --use-lora --lora-rank 8 --lora-alpha 16 --lora-learning-rate 3e-5 --lr 1e-6 --weight-decay 0.1",
        {"train.lora_rank": "8", "train.lr": "3e-5", "train.weight_decay": None,
         "listed --weight-decay": "decides train.weight_decay"}),
    "several teachers without their addresses": (
        "START --use-mopd --mopd-alpha 0.0", {"algorithm.name": "opd", "hand algorithm.opd_teachers": "a table"}),
    "several teachers": (
        "START --use-mopd --mopd-teacher-mode sglang --mopd-distill-type top_k --mopd-topk-k 96 --mopd-eps-low 0.2 "
        "--mopd-eps-high 5.0 --custom-rm-path slime.rollout.mopd.reward_func --mopd-teachers "
        """'[{"name": "m", "domain": "math", "rm_url": "http://h:1/generate"}, {"name": "c", "load": "/c"}]'""",
        {"algorithm.name": "opd", "algorithm.opd_divergence": "reverse_kl", "algorithm.opd_top_k": "96",
         "algorithm.opd_teachers": {"m": {"domains": ["math"], "url": ["http://h:1"]}, "c": {"load": "/c"}},
         "algorithm.tis_mode": "mask", "algorithm.tis_clip_low": "0.2", "algorithm.tis_clip": "5.0"}),
    "the policy as its teacher": (
        "START --use-opd --opd-type self --opd-teacher-load /r/Qwen3-4B_torch_dist --opsd-beta 0.3 "
        "--opsd-jsd-clip 0.05 --opsd-privileged-info-key solution",
        {"algorithm.name": "opd", "algorithm.opd_self_teacher": "start", "algorithm.opd_divergence": "jsd",
         "algorithm.opd_jsd_beta": "0.3", "algorithm.opd_top_k": 64, "algorithm.opd_teacher_load": None,
         "algorithm.opd_teacher_template": SOLUTION.format("solution")}),
    "likeliest tokens": (
        f"START --use-opd --opd-type megatron --topk-level-opd --loss-type topk_opd_loss --opd-top-k 100 "
        f"--opd-teacher-loads /t --custom-rm-path {HELPERS}.zero_reward_func",
        {"algorithm.name": "opd", "algorithm.opd_divergence": "reverse_kl", "algorithm.opd_top_k": "100",
         "algorithm.opd_teacher_load": "/t"}),
    "checkpoints": (
        "START --async-save --no-save-optim --no-load-optim --reset-optimizer-states",
        {"run.async_save": True, "train.no_save_optim": True, "train.no_load_optim": True,
         "train.reset_optimizer_states": True}),
    "muon": ("START --train-backend fsdp --optimizer muon --muon-momentum 0.9",
             {"train.optimizer": "muon", "train.muon_momentum": "0.9"}),
    "supervised by the asynchronous program": (
        f"python3 train_async.py {FLAGS} --loss-type sft_loss --num-epoch 1 --sglang-dtype bfloat16",
        {"run.async_level": None, "engine.dtype": None, "listed --sglang-dtype": "never samples"}),
    "no model": ("python3 train.py --prompt-data /d --rollout-batch-size 4 --num-rollout 30",
                 {"hand --hf-checkpoint": "Set model.path by hand"}),
    "no prompts": ("python3 train.py --hf-checkpoint /m --rollout-batch-size 4 --rm-type math",
                   {"hand --prompt-data": "Set rollout.data by hand"}),
    "rounds before epochs": ("START --num-rollout 30 --num-epoch 2", ROUNDS | {"run.num_epoch": None}),
    "no rounds": ("START --num-rollout 0", {"listed --num-rollout": "slimectl eval"}),
    "turns of a function": ("START --max-turns 5", {"custom.max_turns": 5}),
    "a flag of no table": ("START --my-flag 5", {"listed --my-flag": "Set custom.my_flag"}),
    "typographic quotes": ("START --hf-checkpoint “/r/x”", {"model.path": None, "hand --hf-checkpoint": "quotes"}),
    "a boxed verifier": ("START --rm-type boxed_gpqa", {"score.rm_type": "boxed_gpqa"}),
    "a random reward": ("START --rm-type random", {"score.rm_type": "random"}),
    "a remote reward": ("START --rm-type remote_rm --rm-url http://h:1/rm", {"score.rm_url": "http://h:1/rm"}),
    "an unknown verifier": ("START --rm-type opencua_click", {
        "hand --rm-type": "is not a verifier here"}),
    "a reward of one's own": ("START --custom-rm-path my.rewards.judge", {"score.custom_rm_path": "my.rewards:judge"}),
    "a function without a stand-in": (
        f"START --custom-tis-function-path {LOSS}.binary_kl --custom-rm-path slime.rollout.rm_hub.async_rm",
        {"hand --custom-tis-function-path": "no stand-in", "train.custom_tis_function_path": None,
         "score.custom_rm_path": "slime.rollout.rm_hub:async_rm"}),
    "a reward without a stand-in": (
        "START --custom-rm-path slime.rollout.rm_hub.pictures.grade",
        {"hand --custom-rm-path": "score.custom_rm_path", "score.rm_type": None, "score.custom_rm_path": None}),
    "no reward": (
        "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 4",
        {"hand score.rm_type": "has no reward", "hand --rollout-max-response-len": "by hand"}),
    "a value of the environment": ("START --lr ${LR:-1}", {"train.lr": "3e-6"}),
    "a value of a command": ("START --num-rollout $(wc -l < list)", {"hand --num-rollout": "is a command"}),
}  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_flags_become_what_slime_does_with_them(script: str, expected: dict[str, Any], tmp_path: Path):
    check(reading(tmp_path, script), expected)


def test_the_reward_that_is_missing_is_the_first_line_of_what_is_set_by_hand(tmp_path: Path):
    result = reading(tmp_path, "python3 train.py --hf-checkpoint $M --prompt-data $D --rollout-batch-size 4 --lr $R")
    assert [item.flag.split()[0] for item in result.conversion.omissions if item.by_hand] == [
        "score.rm_type", "--hf-checkpoint", "--prompt-data", "--lr", "--rollout-max-response-len",
    ]  # fmt: skip


REFUSED = {
    "an evaluation": ("python eval.py FLAGS", "eval.py evaluates a model and trains nothing"),
    "two rounds of a loop": ("for n in 1 2; do START --num-rollout $n; done", "is started 2 times with other flags"),
    "two commands": ("START --num-rollout 1\nSTART --num-rollout 2", r"has 2 training commands \(lines 1, 2\)"),
    "a server": ("python3 -m sglang.launch_server --model-path /m --tp 8 --port 3000", "server|no training command"),
    "a teacher": (
        "python3 -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint /m --teacher-port 7999",
        "starts a teacher of slime. Start it with `slimectl serve MODEL`"),
    "a conversion": (
        "torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --hf-checkpoint /m --save /x",
        "convert|no training command"),
    "a file that is not there": ("bash other.sh", r"run.sh:1: other.sh: is not read, as no such file lies in"),
}  # fmt: skip


@pytest.mark.parametrize(("script", "message"), REFUSED.values(), ids=REFUSED)
def test_what_trains_nothing_is_refused(script: str, message: str, tmp_path: Path):
    with pytest.raises(SettingsError, match=message):
        reading(tmp_path, script)
