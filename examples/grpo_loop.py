"""GRPO by hand: sample, score, train, push, in a loop of your own. A CPU needs a few seconds.

python examples/grpo_loop.py
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from slimectl import Sample, Sampler, Trainer, create_model, load_settings, prompts, score


def reward(sample: Sample) -> float:
    """The share of the answer's tokens that are lower-case letters: the model has one token for each byte."""
    answer = sample.tokens[-sample.response_length :]
    return sum(ord("a") <= token <= ord("z") for token in answer) / len(answer)


def main(folder: str = "runs/grpo_loop", rounds: int = 30) -> list[float]:
    """Train the model of the quickstart from random weights; return the mean reward of every round."""
    model = create_model("tiny", Path(folder) / "model")
    settings = load_settings("quickstart", {"model.path": str(model), "run.rollout_batch_size": 16, "train.lr": 1e-3})
    questions, rewards = prompts(settings, epochs=None), []
    with Sampler(settings) as sampler, Trainer(settings) as trainer:
        for number in range(1, rounds + 1):
            samples = sampler.rollout(islice(questions, settings.run.rollout_batch_size))
            for report in trainer.train(score(samples, settings, reward=reward)):
                rewards.append(report.metrics["rollout/raw_reward"])
                print(f"round {number}: mean reward {rewards[-1]:.3f}")
            trainer.push(sampler)
        trainer.save(Path(folder) / "trained", force=True)
    return rewards


if __name__ == "__main__":
    main()
