"""A training script of TRL; it is parsed, and never run."""

import os

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen3-0.6B"
LENGTH = 2 * 1024
STAMP = os.popen("date +%s").read()

os.system("touch executed")


def reward(completions, **kwargs):
    return [1.0 for _ in completions]


dataset = load_dataset("org/prompts", split="train").map(lambda row: {"prompt": row["question"]})

config = GRPOConfig(
    output_dir=f"runs/{MODEL.split('/')[-1]}",
    run_name="small" + "-grpo",
    learning_rate=5e-6,
    adam_beta2=0.99,
    weight_decay=0.1,
    lr_scheduler_type="constant",
    warmup_steps=10,
    optim="adamw_8bit",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=8,
    num_generations=8,
    max_prompt_length=LENGTH // 4,
    max_completion_length=LENGTH,
    num_train_epochs=1,
    importance_sampling_level="sequence",
    epsilon=3e-4,
    epsilon_high=4e-4,
    max_grad_norm=0.1,
    seed=int(STAMP),
    report_to="none",
    logging_steps=1,
)
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[reward],
    args=config,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.05),
)
trainer.train()
