"""Launch files in TRL's styles: every value is the one that TRL would train with, or the file asks for it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import read
from slimectl.migrate.launch_scripts.writing import settings_file
from slimectl.settings.layers import from_file
from slimectl.settings.loading import resolve

IDS = "--model_name_or_path org/m --dataset_name org/d"
REWARD = "def reward(completions, **columns):\n    return [0.0 for _ in completions]\n\n\n"
MAIN = "if __name__ == '__main__':\n    "


def python(config: str, trainer: str = "", before: str = "", name: str = "GRPO") -> str:
    """A program that trains under its main guard."""
    trainer = trainer or "reward_funcs=reward, train_dataset='org/d'"
    call = f"{name}Trainer(model='org/m', args={name}Config({config}), {trainer})"
    return f"from trl import {name}Config, {name}Trainer\n{before}\n{REWARD}{MAIN}{call}.train()\n"


FOLDER = {
    "rewards.py": REWARD,
    "recipe.yaml": "model_name_or_path: org/m\ndataset_name: org/d\nlearning_rate: 2.0e-6\nnum_generations: 4\n",
    "zero2.yaml": "compute_environment: LOCAL_MACHINE\nnum_processes: 4\nnum_machines: 1\n",
    "program.py": "import argparse\nfrom rewards import reward\nfrom trl import RLOOConfig, RLOOTrainer\n"
    "parser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float, default=1e-5)\n"
    "args = parser.parse_args()\nconfig = RLOOConfig(learning_rate=args.lr, num_generations=4)\n"
    "RLOOTrainer('org/m', reward, config, train_dataset='org/d').train()\n",
    "switches.py": "import argparse\nfrom trl import SFTConfig, SFTTrainer\n"
    "p = argparse.ArgumentParser()\np.add_argument('--no_cap', action='store_true')\n"
    "p.add_argument('--warm', action=argparse.BooleanOptionalAction, default=True)\nargs = p.parse_args()\n"
    "steps = 7 if args.no_cap else 3\nseed = 1 if args.warm else 2\n"
    "SFTTrainer('org/m', SFTConfig(max_steps=steps, seed=seed), train_dataset='org/d').train()\n",
}
"""Files that lie beside every launch file below."""

SCRIPTS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    # subcommands of trl
    ("run.sh", f"trl grpo {IDS} --reward_funcs accuracy_reward",
     {"algorithm.name": "grpo", "score.rm_type": "math", "rollout.label_key": "solution",
      "rollout.max_response_len": 512}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs accuracy_reward think_format_reward --reward_weights 1.0 0.5",
     {"score.rm": [{"type": "math"}, {"path": "trl.rewards:think_format_reward", "weight": 0.5}]}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs get_soft_overlong_punishment",
     {"score.rm_type": "overlong", "score.rm_options": {"limit": 1280, "buffer": 256}}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs my_lib.rewards.custom",
     {"score.custom_rm_path": "my_lib.rewards:custom"}, []),
    ("run.sh", f"trl grpo {IDS} --reward_model_name_or_path org/judge",
     {"score.rm_type": "reward_model", "score.rm_options": {"path": "org/judge"}}, []),
    ("run.sh", f"trl grpo {IDS} --reward_model_name_or_path org/judge --reward_funcs accuracy_reward",
     {"score.rm": [{"type": "math"}, {"type": "reward_model", "path": "org/judge"}]}, []),
    ("run.sh", f"trl grpo {IDS}", {"score.rm_type": None}, ["this file has no reward"]),
    ("run.sh", f"trl grpo {IDS} --reward_funcs accuracy format", {"score.rm": []},
     ["format is a name that only the program knows"]),
    ("run.sh", f"trl rloo {IDS} --reward_funcs a.b",
     {"algorithm.name": "rloo", "rollout.n_samples_per_prompt": 2, "algorithm.kl_coef": 0.05,
      "run.rollout_batch_size": 4, "algorithm.use_tis": False}, []),
    ("run.sh", f"trl rloo {IDS} --reward_funcs a.b --beta 0.0 --normalize_advantages --num_generations 4",
     {"algorithm.kl_coef": 0.0, "algorithm.normalize_advantages": True, "run.rollout_batch_size": 2}, []),
    ("run.sh", f"trl sft {IDS} --use_peft",
     {"algorithm.name": "sft", "train.lr": 2e-5, "train.lora_rank": 16, "train.lora_alpha": 32.0,
      "train.lora_targets": ["q_proj", "v_proj"], "rollout.max_context_len": 1024, "run.name": "trainer_output"}, []),
    ("run.sh", f"trl sft {IDS} --learning_rate 2.0e-4 --max_length 2048 --max_steps 100 --warmup_ratio 0.03",
     {"train.lr": 2e-4, "rollout.max_context_len": 2048, "run.num_rollout": 100, "train.lr_warmup_fraction": 0.03,
      "run.num_epoch": None}, []),
    ("run.sh", f"trl sft {IDS} --loss_type nll --num_train_epochs 1 --packing --eos_token '<|im_end|>'",
     {"algorithm.calculate_per_token_loss": True, "run.num_epoch": 1}, []),
    ("run.sh", f"trl dpo {IDS} --beta 0.3 --learning_rate 5e-7 --label_smoothing 0.1",
     {"algorithm.name": "dpo", "algorithm.beta": 0.3, "train.lr": 5e-7, "algorithm.label_smoothing": 0.1}, []),
    ("run.sh", f"trl dpo {IDS} --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules all-linear",
     {"train.lora_rank": 32, "train.lora_alpha": 16.0, "train.lr": 1e-6,
      "train.lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}, []),
    ("run.sh", f"trl reward {IDS} --gradient_checkpointing False --gradient_accumulation_steps 4 --num_processes 2",
     {"algorithm.name": "reward_model", "train.lr": 1e-4, "train.gradient_checkpointing": False,
      "train.global_batch_size": 64}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --num_iterations 2 --loss_type grpo",
     {"algorithm.calculate_per_token_loss": False, "train.ppo_epochs": 2}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --optim paged_adamw_8bit --save_only_model",
     {"train.optimizer_state_dtype": "int8", "train.no_save_optim": True}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --optim adamw_torch_fused", {"train.optimizer": "adamw"}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --optim adafactor", {}, ["has no counterpart"]),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b c.d --multi_objective_aggregation normalize_then_sum",
     {"algorithm.name": "gdpo"}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --num_iterations 1 --mask_truncated_completions",
     {"rollout.sample_filter_path": "slimectl.stages.filters:leave_out_truncated"}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --mask_truncated_completions False",
     {"rollout.sample_filter_path": None}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --lora_rank 0", {"train.lora_rank": None}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --use_peft --lora_r 0", {"train.lora_rank": None}, []),
    ("run.yaml", "model_name_or_path: org/m\ndataset_mixture: {datasets: [{id: org/d, weight: 1.0}]}\n"
     "max_length: 64\npacking: true\n", {"algorithm.name": "sft"}, ["set rollout.data to its parts"]),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --loss_type dr_grpo",
     {"algorithm.name": "dr_grpo", "algorithm.fixed_length": 512, "algorithm.grpo_std_normalization": True}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --loss_type dr_grpo --scale_rewards none",
     {"algorithm.name": "dr_grpo", "algorithm.grpo_std_normalization": False}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --loss_type cispo --epsilon_high 5.0",
     {"algorithm.name": "cispo", "algorithm.eps_clip": 1.0, "algorithm.eps_clip_high": 4.0}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --loss_type cispo", {}, ["TRL bounds the ratio by 0.2"]),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --loss_type sapo --sapo_temperature_neg 1.2",
     {"algorithm.name": "sapo", "algorithm.tau_pos": 1.0, "algorithm.tau_neg": 1.2}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --importance_sampling_level sequence --loss_type grpo"
     " --epsilon 3e-4",
     {"algorithm.name": "gspo", "algorithm.eps_clip": 3e-4, "algorithm.eps_clip_high": 3e-4,
      "algorithm.calculate_per_token_loss": False}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --beta 0.04 --delta 1.5 --use_bias_correction_kl False",
     {"algorithm.kl_loss_coef": 0.04, "algorithm.eps_clip_c": 1.5, "algorithm.use_unbiased_kl": False}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --use_vllm --vllm_importance_sampling_mode token_truncate"
     " --vllm_importance_sampling_clip_min 0.5",
     {"engine.backend": "vllm", "cluster.colocate": True, "algorithm.tis_level": "token",
      "algorithm.tis_mode": "clip", "algorithm.tis_clip_low": 0.5}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --use_vllm --vllm_mode server --vllm_server_host 10.0.0.7",
     {"engine.url": ["http://10.0.0.7:8000"], "cluster.colocate": False}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --vllm_importance_sampling_correction true",
     {"algorithm.use_tis": False, "engine.backend": "auto"}, []),
    ("run.sh", f"trl grpo {IDS} --dataset_config main --reward_funcs a.b --top_k 0 --min_p 0.05",
     {"rollout.data": ["org/d/main"], "rollout.top_k": -1, "rollout.min_p": 0.05}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --model_init_kwargs '{{\"dtype\": \"bfloat16\"}}' --bf16 false",
     {"train.dtype": "bfloat16"}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --chat_template_kwargs '{{\"enable_thinking\": false}}'",
     {"rollout.apply_chat_template_kwargs": {"enable_thinking": False}}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --lr_scheduler_type cosine_with_min_lr --learning_rate 1e-5"
     " --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'",
     {"train.lr_decay_style": "cosine", "train.min_lr": pytest.approx(1e-6)}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --gradient_accumulation_steps 2 --steps_per_generation 8"
     " --num_processes 2 --max_steps 100 --save_steps 20",
     {"train.global_batch_size": 32, "run.rollout_batch_size": 16, "run.num_rollout": 25, "run.save_interval": 5}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --save_strategy epoch", {"run.save_interval": None},
     ["run.save_interval by hand"]),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --warmup_ratio 0.1", {"train.lr_warmup_fraction": 0.1},
     []),
    # accelerate, torchrun, recipes and programs beside the script
    ("run.sh", "accelerate launch --config_file zero2.yaml -m trl.scripts.grpo --config recipe.yaml --reward_funcs a.b",
     {"train.lr": 2e-6, "rollout.n_samples_per_prompt": 4, "train.global_batch_size": 32,
      "cluster.actor_num_gpus_per_node": 4}, []),
    ("run.sh", "trl rloo --config recipe.yaml --reward_funcs a.b --learning_rate 3e-6",
     {"algorithm.name": "rloo", "train.lr": 3e-6, "run.rollout_batch_size": 2}, []),
    ("run.sh", f"torchrun --nproc_per_node 8 --nnodes 2 sft.py {IDS} --per_device_train_batch_size 2",
     {"algorithm.name": "sft", "train.global_batch_size": 32, "cluster.actor_num_nodes": 2}, []),
    ("run.sh", "accelerate launch --num_processes 2 program.py --lr 4e-6",
     {"algorithm.name": "rloo", "train.lr": 4e-6, "train.global_batch_size": 16, "model.path": "org/m",
      "score.custom_rm_path": "rewards.py:reward"}, []),
    ("run.sh", "python program.py", {"algorithm.name": "rloo", "train.lr": 1e-5}, []),
    ("run.sh", "python switches.py --no_cap --no-warm", {"run.num_rollout": 7, "run.seed": 2}, []),
    ("run.sh", "python switches.py", {"run.num_rollout": 3, "run.seed": 1}, []),
    ("run.sh", f"accelerate launch gspo.py {IDS} --importance_sampling_level sequence --reward_funcs a.b --epsilon 0.1",
     {"algorithm.name": "gspo", "algorithm.eps_clip": 0.1, "algorithm.eps_clip_high": 0.1}, []),
    ("run.sh", f"accelerate launch run_dpo.py {IDS} --max_steps 10", {"algorithm.name": "dpo"}, []),
    ("run.sh", f"accelerate launch reward_modeling.py {IDS} --max_steps 10", {"algorithm.name": "reward_model"}, []),
    ("run.sh", f"python ppo/ppo.py {IDS} --reward_model_path org/judge --kl_coef 0.02 --lam 0.9 --cliprange 0.3",
     {"algorithm.name": "ppo", "algorithm.kl_coef": 0.02, "algorithm.lambd": 0.9, "algorithm.eps_clip": 0.3,
      "rollout.max_response_len": 53, "rollout.temperature": 0.7, "score.rm_type": "reward_model"}, []),
    ("run.sh", f"accelerate launch train.py {IDS} --num_generations 4 --max_steps 9",
     {"rollout.n_samples_per_prompt": 4}, ["Set it by hand: grpo (as written here) or rloo", "has no reward"]),
    ("run.sh", f"accelerate launch train.py {IDS} --scale_rewards none --num_generations 4 --reward_funcs a.b",
     {"algorithm.name": "grpo", "algorithm.grpo_std_normalization": False}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --eval_dataset_path e.jsonl --eval_strategy steps --eval_steps 20"
     " --num_generations 4",
     {"eval.interval": 20, "eval.n_samples_per_prompt": 4}, []),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --eval_dataset_path e.jsonl", {"eval.data": {}}, []),
    # recipes
    ("run.yaml", "model_name_or_path: org/m\ndataset_name: org/d\nlearning_rate: 1.0e-5\npacking: true\n"
     "max_length: 4096\nmax_steps: -1\n",
     {"algorithm.name": "sft", "train.lr": 1e-5, "rollout.max_context_len": 4096, "run.num_epoch": 3}, []),
    ("run.yaml", "model_name_or_path: org/m\ndataset_name: org/d\nlearning_rate: 1.0e-5\nmax_steps: 10\n",
     {"train.lr": 1e-5}, ["determines it. Set it by hand: sft, dpo, reward_model, grpo or rloo"]),
    ("run.yaml", "model_name_or_path: org/m\ndatasets: [{path: org/d}]\nf_divergence_type: reverse_kl\nbeta: 0.2\n",
     {"algorithm.name": "dpo", "algorithm.beta": 0.2, "rollout.data": ["org/d"]}, []),
    ("run.yaml", "model_name_or_path: org/m\ndataset_name: org/d\nloss_type: bnpo\nuse_peft: true\n"
     "peft_config: {r: 4, lora_alpha: 12, target_modules: [q_proj]}\nreward_funcs: [accuracy]\n",
     {"train.lora_rank": 4, "train.lora_alpha": 12.0, "train.lora_targets": ["q_proj"], "score.rm_type": "math",
      "algorithm.calculate_per_token_loss": True}, []),
    # Python
    ("run.py", python("learning_rate=3e-6, beta=0.01"),
     {"algorithm.name": "grpo", "train.lr": 3e-6, "score.custom_rm_path": "run.py:reward", "model.path": "org/m"}, []),
    ("run.py", python("max_steps=8", "reward_funcs=[reward, 'org/judge', r.score], reward_weights=[1, 2, 3]",
                      "import rewards as r"),
     {"score.rm": [{"path": "run.py:reward"}, {"type": "reward_model", "path": "org/judge"},
                   {"path": "rewards.py:score"}]}, []),
    ("run.py", python("reward_weights=[1.0, 0.2]", "reward_funcs=[accuracy_reward, long_punishment(96, 32)]",
                      "from trl.rewards import accuracy_reward, get_soft_overlong_punishment as long_punishment"),
     {"score.rm": [{"type": "math"}, {"type": "overlong", "limit": 96, "buffer": 32, "weight": 0.2}]}, []),
    ("run.py", python("max_steps=8", "reward_funcs=lambda completions: [0]"), {"score.custom_rm_path": None},
     ["is made when the program runs"]),
    ("run.py", python("max_steps=8").replace(MAIN, ""), {"score.custom_rm_path": None},
     ["importing this file would start its training"]),
    ("run.py", python("max_steps=8", "reward_funcs=reward, peft_config=LoraConfig()", "from peft import LoraConfig"),
     {"train.lora_rank": 8, "train.lora_alpha": 8.0, "train.lora_targets": ["q_proj", "v_proj"]}, []),
    ("run.py", python("**COMMON, max_steps=8", before="COMMON = dict(learning_rate=4e-6, num_generations=4)"),
     {"train.lr": 4e-6, "rollout.n_samples_per_prompt": 4, "run.num_rollout": 8}, []),
    ("run.py", python("**table()", before="def table(): return json.load(open('t.json'))"), {"train.lr": 1e-6},
     ["is a table that the program makes"]),
    ("run.py", python("max_steps=8", before="class Own(GRPOTrainer):\n    pass\n").replace("GRPOTrainer(m", "Own(m"),
     {"algorithm.name": "grpo", "run.num_rollout": 8}, ["is a trainer of your own"]),
    ("run.yaml", "model_name_or_path: org/m\ndataset_name: org/d\nloss_type: dapo\nnum_generations: 14\n"
     "reward_funcs: [a.b]\nper_device_train_batch_size: 16\n", {"train.global_batch_size": 16},
     ["16 samples per round are not a multiple of 14 responses. Set run.rollout_batch_size by hand"]),
    ("run.py", "from rewards import reward\nlr = 1e-5\n\n\ndef build(lr, n=4):\n"
     "    return GRPOConfig(learning_rate=lr, beta=0.5)\n\n\n"
     "def main():\n    GRPOTrainer('org/m', reward, build(3e-6), train_dataset='org/d').train()\n",
     {"train.lr": 1e-6, "algorithm.kl_loss_coef": 0.5}, ["lr is known when the program runs. Set train.lr by hand"]),
    ("run.py", python("scale_rewards='mean'"), {"algorithm.name": "maxrl"}, []),
    ("run.py", python("max_steps=8", "reward_funcs=reward, environment_factory=Env"), {"run.num_rollout": 8},
     ["set by hand: an agent is rollout.custom_generate"]),
    ("run.sh", f"trl grpo {IDS} --reward_funcs a.b --scale_rewards batch", {},
     ["TRL divides by the batch's deviation"]),
    ("run.py", python("learning_rate=1e-5, max_length=256", "train_dataset=load_dataset('json', data_files='a.jsonl')",
                      name="SFT"),
     {"algorithm.name": "sft", "rollout.data": ["a.jsonl"], "rollout.max_context_len": 256}, []),
    ("run.py", python("beta=0.2", "train_dataset=load_dataset('org/d', 'main', split='train')", name="DPO"),
     {"algorithm.name": "dpo", "algorithm.beta": 0.2, "rollout.data": ["org/d/main"]}, []),
    ("run.py", python("max_steps=8", "train_dataset='org/d'", name="Reward"), {"train.lr": 1e-4}, []),
    ("run.py", python("epsilon=0.4", name="GMPO"), {"algorithm.name": "gmpo", "algorithm.eps_clip": 0.4}, []),
    ("run.py", python("max_steps=8", name="AsyncGRPO"),
     {"algorithm.name": "grpo", "run.async_level": 1, "run.max_staleness": 4, "rollout.max_response_len": 2048,
      "engine.url": ["http://localhost:8000"]}, []),
    ("run.py", "from rewards import reward\nGRPOTrainer('org/m', reward, train_dataset='d')",
     {"algorithm.name": "grpo", "model.path": "org/m", "score.custom_rm_path": "rewards.py:reward"}, []),
    ("run.py", "from unsloth import FastLanguageModel\n"
     "model, tokenizer = FastLanguageModel.from_pretrained(model_name='org/m', max_seq_length=512)\n"
     "model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64, target_modules=['q_proj'])\n"
     "SFTTrainer(model=model, args=SFTConfig(max_steps=60, learning_rate=2e-4), train_dataset='org/d').train()\n",
     {"model.path": "org/m", "train.lora_rank": 32, "train.lora_alpha": 64.0, "train.lora_targets": ["q_proj"],
      "train.lr": 2e-4, "algorithm.name": "sft"}, []),
    ("run.py", "@dataclass\nclass Own(GRPOConfig):\n    learning_rate: float = 7e-6\n    beta: float = 0.5\n\n\n"
     "from rewards import reward\nGRPOTrainer('org/m', reward, Own(num_generations=4), train_dataset='org/d')\n",
     {"train.lr": 7e-6, "algorithm.kl_loss_coef": 0.5, "rollout.n_samples_per_prompt": 4}, []),
    ("run.py", "parser = TrlParser((Own, GRPOConfig, ModelConfig))\n"
     "own, config, model = parser.parse_args_and_config()\n"
     "config.beta = 0.5\nfrom rewards import reward\n"
     "GRPOTrainer(model=model.model_name_or_path, reward_funcs=reward, args=config)\n",
     {"algorithm.name": "grpo", "algorithm.kl_loss_coef": 0.5, "score.custom_rm_path": "rewards.py:reward"},
     ["Set model.path by hand"]),
    # Python that is followed through functions and classes
    ("run.py", "import argparse\nfrom rewards import reward\n\n\ndef parse():\n    p = argparse.ArgumentParser()\n"
     "    p.add_argument('--lr', type=float, default=2e-6)\n    p.add_argument('--model', required=True)\n"
     "    return p.parse_args()\n\n\ndef train(args):\n    c = GRPOConfig(learning_rate=args.lr, max_steps=2 * 5)\n"
     "    GRPOTrainer(model=args.model, reward_funcs=reward, args=c, train_dataset='d')\n\n\n"
     "def unused():\n    return GRPOConfig(learning_rate=1)\n\n\ntrain(parse())\n",
     {"train.lr": 2e-6, "run.num_rollout": 10}, ["Set model.path by hand"]),
    ("run.py", "@dataclass\nclass Options(ScriptArguments):\n"
     "    names: list = field(default_factory=lambda: ['a', 'b'])\n\n\n"
     "from rewards import a, b\nALL = {'a': a, 'b': b}\ndef main(options, config):\n"
     "    GRPOTrainer('org/m', [ALL[name] for name in options.names], config, train_dataset=rows('org/d'))\n\n\n"
     "def rows(path):\n    return load_dataset(path, 'main')['train'].map(lambda row: row)\n\n\n"
     "main(*TrlParser((Options, GRPOConfig)).parse_args_and_config())\n",
     {"score.rm": [{"path": "rewards.py:a"}, {"path": "rewards.py:b"}], "rollout.data": ["org/d/main"]},
     ["the program changes the rows"]),
    ("run.py", "@dataclass\nclass Own(SFTConfig):\n    learning_rate: float = 7e-6\n\n\n"
     "(config,) = HfArgumentParser(Own).parse_args_into_dataclasses()\n"
     "class Run:\n    def __init__(self, steps):\n        config.max_steps = steps\n"
     "        self.model = AutoModel.from_pretrained('org/m').to('cuda')\n"
     "    def train(self):\n        SFTTrainer(self.model, config, train_dataset='org/d').train()\n\n\n"
     "Run(20).train()\n",
     {"train.lr": 7e-6, "run.num_rollout": 20, "model.path": "org/m"}, []),
    ("run.py", "def build(lr):\n    return SFTConfig(learning_rate=lr, max_steps=3)\n\n\n"
     "for lr in (1e-5, 2e-5):\n    SFTTrainer('org/m', build(lr), train_dataset='org/d').train()\n",
     {"run.num_rollout": 3}, ["Set train.lr by hand"]),
    ("run.py", "lr, steps = 1e-5, 5\n\n\ndef change():\n    global lr\n    if torch.cuda.is_available():\n"
     "        lr = 3e-5\n\n\nchange()\ntable = {'seed': 1, 'max_steps': 3, 'beta': 2}\ndel table['seed']\n"
     "table.pop('beta')\ntable.update(max_steps=4)\n"
     "SFTTrainer('org/m', SFTConfig(learning_rate=lr, **table), train_dataset='org/d')\n",
     {"run.num_rollout": 4},
     ["it depends on a condition that is not evaluated (line 6). Set train.lr", "it is deleted. Set run.seed by hand"]),
    ("run.py", "def make():\n    lr = 1e-5\n    def change():\n        nonlocal lr\n        lr = 3e-5\n    change()\n"
     "    return SFTConfig(learning_rate=lr, max_steps=3)\n\n\n"
     "SFTTrainer('org/m', make(), train_dataset='org/d')\n",
     {"run.num_rollout": 3}, ["an inner function sets it. Set train.lr by hand"]),
]  # fmt: skip


def launch(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for file, content in FOLDER.items():
        (folder / file).write_text(content, encoding="utf-8")
    (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return read(Path(name), environ={})


def value(settings: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return settings[section][name]


@pytest.mark.parametrize(("name", "text", "expected", "by_hand"), SCRIPTS)
def test_a_launch_file_of_trl_is_right_or_asks(
    name: str, text: str, expected: dict[str, Any], by_hand: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reading = launch(tmp_path, name, text, monkeypatch)
    conversion = reading.conversion
    settings = conversion.settings.model_dump()
    assert {key: value(settings, key) for key in expected} == expected
    own = [item.reason for item in conversion.omissions if item.by_hand and "per_device" not in item.flag]
    sized = [reason for reason in own if "is multiplied by the number of processes" not in reason]
    assert len(sized) == len(by_hand)
    assert [part for part, reason in zip(by_hand, sized, strict=True) if part not in reason] == []
    (tmp_path / "written.toml").write_text(settings_file(conversion, Path(name), reading.notes), encoding="utf-8")
    assert conversion.problems == []
    resolve([from_file(tmp_path / "written.toml")])


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("sft", ["assistant_only_loss", "truncation_mode"]), ("dpo", ["truncation_mode"]), ("reward", [])],
)
def test_defaults_that_settings_cannot_have_are_listed(
    command: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    omissions = launch(tmp_path, "run.sh", f"trl {command} {IDS} --use_peft", monkeypatch).conversion.omissions
    shown = [item.flag.removeprefix("the default of TRL for ") for item in omissions]
    assert sorted(shown) == sorted([*arguments, "lora_dropout"])


def test_the_reward_is_asked_for_before_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = f"trl grpo {IDS} --per_device_train_batch_size 4 --num_generations 4 --output_dir $(date)"
    conversion = launch(tmp_path, "run.sh", text, monkeypatch).conversion
    assert next(item.flag for item in conversion.omissions if item.by_hand) == "score"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.sh", f"trl grpo {IDS} --loss_type vespo", "run.sh:1: loss_type vespo has no counterpart. Give one of"),
        ("run.sh", f"trl dpo {IDS} --loss_type ipo", "run.sh:1: loss_type ipo has no counterpart. Give one of"),
        ("run.yaml", "model_name_or_path: m\ndataset_name: d\nloss_type: [sigmoid, bco_pair]\nbeta: 0.1\n",
         "run.yaml:3: loss_type sigmoid, bco_pair has no counterpart. Give one of"),
        ("run.py", "class GRPOConfig:\n    pass\n\n\nGRPOConfig(learning_rate=1e-6, num_generations=8)\n",
         "run.py:5: GRPOConfig is a class of this file, not of TRL"),
        ("run.py", "from openrlhf.trainer import DPOTrainer\nDPOTrainer(model='m', beta=0.1)\n",
         "run.py:2: DPOTrainer is of openrlhf, not of TRL"),
        ("run.sh", f"trl sft {IDS} --loss_type dft", "run.sh:1: loss_type dft has no counterpart. Give one of"),
        ("run.py", f"{python('max_steps=1')}{python('max_steps=2', name='SFT')}",
         "run.py: has several trainings (GRPOConfig in line 8, GRPOTrainer in line 8, SFTConfig in line 16, SFTTrainer"
         " in line 16). Pick one by --line N"),
    ],
)  # fmt: skip
def test_a_training_that_is_not_here_or_not_one_is_refused(
    name: str, text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SettingsError) as error:
        launch(tmp_path, name, text, monkeypatch)
    assert str(error.value).startswith(line)


def test_of_several_trainings_in_a_program_one_is_picked_by_its_line(tmp_path: Path):
    (tmp_path / "run.py").write_text(python("max_steps=1") + python("max_steps=2", "train_dataset='d'", name="SFT"))
    values = read(tmp_path / "run.py", line=16, environ={}).conversion.values
    assert (values["algorithm.name"], values["run.num_rollout"]) == ("sft", 2)
    with pytest.raises(SettingsError, match=r"run\.py: --line 1 starts no training\. Lines that do: \d+, "):
        read(tmp_path / "run.py", line=1, environ={})
    (tmp_path / "run.yaml").write_text("model_name_or_path: /m\nnum_generations: 8\nlearning_rate: 1e-6\n")
    with pytest.raises(SettingsError, match="Leave --line out"):
        read(tmp_path / "run.yaml", line=2, environ={})


def test_an_option_gives_the_model_and_changed_rows_are_asked_for(tmp_path: Path):
    (tmp_path / "grpo.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser\n"
        "config, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "rows = load_dataset('org/d').filter(short)\nrows = rows.train_test_split(test_size=9).map(chat)['train']\n"
        "GRPOTrainer(model_args.model_name_or_path, 'reward', args=config, train_dataset=rows)\n"
    )
    (tmp_path / "run.sh").write_text("python grpo.py --model_name_or_path org/m --learning_rate 1e-5 --max_steps 3\n")
    conversion = read(tmp_path / "run.sh", environ={}).conversion
    assert (conversion.values["model.path"], conversion.values["rollout.data"]) == ("org/m", ["org/d"])
    flags = [item.flag for item in conversion.omissions if item.by_hand]
    assert "train_dataset: 'filter train_test_split map'" in flags
    assert not [flag for flag in flags if "model" in flag]
