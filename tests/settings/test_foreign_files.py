"""Files and programs of other kinds are refused in one line that says what they are and what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import read

FLAGS = "--model_name_or_path /m --dataset_name /d --learning_rate 1e-6 --max_steps 3 --beta 0.1"
PAIRS, OPD, GRPO = "algorithm.name = dpo", "algorithm.name = opd", "algorithm.name = grpo"


def refusal(folder: Path, name: str, text: str) -> str:
    """The line with which a file is refused, without its folder."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        read(file, environ={})
    line = str(error.value)
    assert "\n" not in line
    return line.replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KTO", PAIRS), ("BCO", PAIRS), ("ORPO", PAIRS), ("CPO", PAIRS), ("TPO", PAIRS), ("GKD", OPD), ("GOLD", OPD),
        ("MiniLLM", OPD), ("Distillation", OPD), ("AsyncDistillation", OPD), ("ServerDistillation", OPD),
        ("IWOPD", OPD), ("SDFT", OPD), ("SDPO", OPD), ("SSD", OPD), ("OnlineDPO", GRPO), ("XPO", GRPO),
        ("NashMD", GRPO), ("PAPO", GRPO), ("A2PO", GRPO), ("GFPO", GRPO), ("GRPOWithReplayBuffer", GRPO),
        ("GSPOToken", "algorithm.name = gspo"), ("PRM", "algorithm.name = reward_model"), ("DDPO", "language models"),
    ],
)  # fmt: skip
def test_a_trainer_of_another_algorithm_is_refused_by_its_class(name: str, nearest: str, tmp_path: Path):
    config = f"config = {name}Config(learning_rate=1e-6, max_steps=3, per_device_train_batch_size=4, bf16=True)"
    line = refusal(tmp_path, "run.py", f"from trl.experimental import {name}Config, {name}Trainer\n{config}\n")
    assert line.startswith(f"run.py:2: {name}Config ")
    assert nearest in line
    line = refusal(tmp_path, "run.py", f"t = {name}Trainer(model='/m', args=args, train_dataset=rows)\n")
    assert line.startswith(f"run.py:1: {name}Trainer ")


@pytest.mark.parametrize(
    ("command", "named", "nearest"),
    [
        ("trl kto", "kto", PAIRS),
        ("trl distillation", "distillation", OPD),
        ("python examples/scripts/orpo.py", "examples/scripts/orpo.py", PAIRS),
        ("accelerate launch --num_processes 8 cpo.py", "cpo.py", PAIRS),
        ("accelerate launch examples/scripts/dpo_online.py", "examples/scripts/dpo_online.py", GRPO),
        ("python train_online_dpo.py", "train_online_dpo.py", GRPO),
        ("python -m trl.scripts.kto", "trl.scripts.kto", PAIRS),
        ("torchrun --nproc_per_node 8 nash_md.py", "nash_md.py", GRPO),
        ("python xpo.py", "xpo.py", GRPO),
        ("python run_gkd.py", "run_gkd.py", OPD),
        ("python prm.py", "prm.py", "reward_model"),
        ("deepspeed --module openrlhf.cli.train_kto --pretrain /m", "openrlhf.cli.train_kto", PAIRS),
        ("deepspeed --module openrlhf.cli.train_prm --pretrain /m", "openrlhf.cli.train_prm", "reward_model"),
        ("deepspeed --module openrlhf.cli.train_kd --pretrain /m", "openrlhf.cli.train_kd", OPD),
        ("python src/train.py --stage sft --finetuning_type lora --template qwen", "src/train.py", "LLaMA-Factory"),
        ("python3 -m recipe.prime.main_prime data.train_files=/d", "recipe.prime.main_prime", GRPO),
        ("python3 -m recipe.spin.main_spin data.train_files=/d", "recipe.spin.main_spin", GRPO),
        ("python train.py --rlhf_type kto --model /m", "train.py", "ms-swift"),
    ],
)
def test_a_command_of_another_algorithm_is_refused_by_its_program(
    command: str, named: str, nearest: str, tmp_path: Path
):
    line = refusal(tmp_path, "run.sh", f"{command} {FLAGS} --prompt_data /d --n_samples_per_prompt 4\n")
    assert line.startswith(f"run.sh:1: {named} ")
    assert nearest in line


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("vllm serve org/model --port 8000", "engine.url"),
        ("trl vllm-serve --model org/model", "engine.url"),
        ("python -m vllm.entrypoints.openai.api_server --model org/model", "engine.url"),
        ("python3 -m sglang.launch_server --model-path org/model --tp 8", "engine.url"),
        ("python -m openrlhf.cli.serve_rm --reward_pretrain org/rm --port 5000", "remote_rm"),
        ("lm_eval --model hf --model_args pretrained=/m --tasks gsm8k", "eval.data"),
        ("python -m lighteval accelerate pretrained=/m", "eval.data"),
        ("llamafactory-cli train examples/train_lora/llama3_lora_dpo.yaml", "LLaMA-Factory"),
        ("llamafactory-cli chat examples/inference/llama3.yaml", "slimectl rollout"),
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type kto --model org/model", "ms-swift"),
        ("swift rlhf --rlhf_type grpo --model org/model --dataset d", "ms-swift"),
        ("megatron sft --load mcore --dataset d", "ms-swift"),
        ("axolotl train config.yaml", "axolotl"),
        ("accelerate launch -m axolotl.cli.train config.yaml", "axolotl"),
        ("tune run lora_dpo_single_device --config llama3", "torchtune"),
        ("python3 -m verl.trainer.main_eval data.path=/d data.response_key=responses", "slimectl score"),
        ("python3 -m verl.trainer.main_generation_server data.path=/d model.path=/m", "slimectl rollout"),
        ("python3 -m verl.model_merger merge --backend fsdp", "slimectl convert"),
        ("python -m openrlhf.cli.lora_combiner --model_path /m --lora_path /l", "slimectl convert"),
        ("python3 examples/data_preprocess/gsm8k.py --local_dir /d", "rollout.data"),
        ("huggingface-cli download org/model --local-dir /m", "rollout.data"),
    ],
)
def test_a_script_without_training_is_refused_by_the_command_that_it_has(command: str, remedy: str, tmp_path: Path):
    line = refusal(tmp_path, "run.sh", f"set -e\n{command}\n")
    assert line.startswith("run.sh:2: `")
    assert remedy in line


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("zero3.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: bf16\n", "Accelerate"),
        ("fsdp.yaml", "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 8\nmachine_rank: 0\n", "Accelerate"),
        ("ds.json", '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}', "DeepSpeed"),
        ("ci.yaml", "on: push\njobs:\n  a:\n    runs-on: x\n    steps: [{run: trl grpo}]\n", "GitHub Actions"),
        (".github/workflows/gpu.yml", "name: a\n", "GitHub Actions"),
        (".gitlab-ci.yml", "stages: [test]\nvariables: {A: b}\n", "GitLab"),
        ("docker-compose.yml", "services:\n  a: {image: x, command: trl grpo}\n", "Docker Compose"),
        ("job.yaml", "apiVersion: batch/v1\nkind: Job\nspec: {a: 1}\n", "Kubernetes"),
        ("two.yaml", "apiVersion: v1\nkind: Service\n---\napiVersion: v1\nkind: Pod\n", "Kubernetes"),
        ("sky.yaml", "resources: {accelerators: H100}\nrun: trl grpo\n", "SkyPilot"),
        ("sft.yaml", "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: /m\nlearning_rate: 1e-4\n"
         "max_steps: 3\n", "LLaMA-Factory"),
        ("axolotl.yml", "base_model: org/m\nrl: dpo\nlearning_rate: 1e-6\nmicro_batch_size: 2\n"
         "num_epochs: 3\ngradient_accumulation_steps: 4\nsequence_len: 2048\n", "axolotl"),
        ("swift.yaml", "rlhf_type: grpo\nmodel: org/m\nlearning_rate: 1e-6\nnum_generations: 8\n", "ms-swift"),
        ("nemo.yaml", "grpo: {num_prompts_per_step: 32}\npolicy: {model_name: /m}\n", "NeMo-RL"),
        ("README.md", "# A model card\n", "README"),
        ("dataset_infos.yaml", "dataset_info:\n  features: [{name: a}]\n", "rollout.data"),
        ("tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "x"}', "tokenizer"),
        ("config.json", '{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}', "model.path"),
        ("fsdp.yaml", "_target_: verl.workers.config.FSDPEngineConfig\nmixed_precision: bf16\nseed: 42\n", "Hydra"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 16, "lora_alpha": 32}', "train.lora_load"),
        ("trainer_state.json", '{"log_history": [{"loss": 1}], "max_steps": 3, "save_steps": 4}', "training that ran"),
        ("pyproject.toml", "[project]\nname = 'a'\n", "TOML"),
        ("rows.jsonl", '{"prompt": "a"}\n', "rollout.data"),
        ("Dockerfile", "FROM x\nCMD trl grpo\n", "image"),
        ("Makefile", "a:\n\ttrl grpo\n", "make"),
        ("a.ipynb", "{}", "notebook"),
        ("task.yaml", "task: gsm8k\ndataset_path: gsm8k\ndoc_to_text: x\n", "lm-evaluation-harness"),
        ("filter.yaml", "model_name_or_path: /m\nnum_generations: 8\noutput_dataset_name: o\n", "prepares"),
        ("evaluation.yaml", "data: {path: /d, prompt_key: a, response_key: b}\n"
         "custom_reward_function: {path: null, name: f}\n", "slimectl score"),
        ("_generated_ppo_trainer.yaml", "trainer: {nnodes: 1}\ndata: {seed: 1}\n", "defaults of verl"),
        ("ref.yaml", "rollout_n: 4\nstrategy: fsdp\nppo_epochs: 1\nuse_kl_loss: true\nmax_steps: 3\n", "is a part of"),
        ("envs.yaml", "max_tokens_per_step: 9\nmax_actions_per_traj: 2\ncustom_env: {A: {env_type: a}}\n",
         "is a part of"),
        ("gym.yaml", "task: a\ndataset_path: b\noutput_type: c\n", "lm-evaluation-harness"),
        (".pre-commit-config.yaml", "repos:\n  - repo: a\n", "pre-commit"),
        ("prepare.py", "from datasets import load_dataset\nload_dataset('a').to_json('b')\n", "rollout.data"),
        ("eval.py", "import lm_eval\nlm_eval.simple_evaluate(model='hf')\n", "eval.data"),
        ("optimizer.py", "OptimizerConfig(lr=lr, min_lr=0, clip_grad=1.0, weight_decay=0.1)\n", "has no trainer"),
        ("sample.py", "from vllm import LLM\nLLM('a').generate('b')\n", "slimectl rollout"),
    ],
)  # fmt: skip
def test_a_document_of_another_kind_is_refused_by_what_it_is(name: str, text: str, kind: str, tmp_path: Path):
    line = refusal(tmp_path, name, text)
    assert line.startswith(f"{name}: ")
    assert kind in line


def test_a_trainer_of_transformers_has_a_loss_of_the_model(tmp_path: Path):
    text = "a = TrainingArguments(learning_rate=1e-5, max_steps=3, bf16=True)\nTrainer(model=model, args=a)\n"
    assert "algorithm.name = sft" in refusal(tmp_path, "run.py", f"from transformers import Trainer\n{text}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from trl import ABCTrainer\nABCTrainer(model=m)\n", "run.py:2: ABCTrainer is not a trainer that is read. "),
        ("from transformers import Trainer\nclass Mine(Trainer): ...\nclass MyTrainer(Trainer): ...\nMyTrainer()\n",
         "run.py:4: MyTrainer is not a trainer that is read. "),
        ("def main():\n    from openrlhf.trainer import PPOTrainer\n    PPOTrainer.remote(a)\n",
         "run.py:3: PPOTrainer is of openrlhf, "),
        ("from verl.trainer.ppo import RayPPOTrainer\nRayPPOTrainer(config)\n", "run.py:2: RayPPOTrainer is of verl, "),
    ],
)  # fmt: skip
def test_a_trainer_that_is_not_read_is_named(text: str, line: str, tmp_path: Path):
    text += "from datasets import load_dataset\nload_dataset('a')\n"  # by itself this prepares data
    assert refusal(tmp_path, "run.py", text).startswith(line)


@pytest.mark.parametrize("command", ["trl kto --config a.yaml", "python orpo.py", "accelerate launch cpo.py a.yaml"])
def test_a_program_without_flags_is_refused_by_its_name(command: str, tmp_path: Path):
    assert PAIRS in refusal(tmp_path, "run.sh", f"{command}\n")


def test_of_two_commands_the_one_that_trains_here_is_read(tmp_path: Path):
    (tmp_path / "run.sh").write_text(f"vllm serve /m &\ntrl kto {FLAGS}\ntrl dpo {FLAGS}\n")
    assert read(tmp_path / "run.sh", environ={}).conversion.values["algorithm.name"] == "dpo"


@pytest.mark.parametrize(
    ("name", "text", "named", "nearest"),
    [
        ("run.sh", "deepspeed --module openrlhf.cli.train_sft --pretrain /m --dataset /d --pretrain_mode",
         "--pretrain_mode", "algorithm.name = sft"),
        ("run.sh", "python3 -m recipe.dapo.main_dapo data.train_files=/d algorithm.filter_sample.enable=True",
         "algorithm.filter_sample.enable", GRPO),
    ],
)  # fmt: skip
def test_a_flag_of_another_algorithm_is_refused(name: str, text: str, named: str, nearest: str, tmp_path: Path):
    line = refusal(tmp_path, name, f"{text}\n")
    assert named in line
    assert nearest in line


def test_the_supervised_configuration_of_verl_is_not_ppo(tmp_path: Path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "fsdp.yaml").write_text("lr: 1.0e-3\n")
    text = "defaults: [optim@optim: fsdp, _self_]\ndata: {train_files: /d}\ntrainer: {total_epochs: 4, nnodes: 1}\n"
    (tmp_path / "sft_trainer_engine.yaml").write_text(text)
    conversion = read(tmp_path / "sft_trainer_engine.yaml", environ={}).conversion
    assert conversion.values["algorithm.name"] == "sft"
    assert conversion.sources["train.lr"].startswith("optim.lr: 1.0e-3")
