"""A reward of your own: a function of a sample, by path on the command line or as an object in Python.

slimectl score samples.jsonl --custom-rm-path examples/custom_reward.py:reward
python examples/custom_reward.py
"""

from __future__ import annotations

from slimectl import Sample, load_settings, score

SENTENCES = 2


def reward(sample: Sample) -> float:
    """1.0 for the label in at most two sentences; half of it in more; 0.0 without the label."""
    if str(sample.label).casefold() not in sample.response.casefold():
        return 0.0
    return 1.0 if sample.response.count(".") <= SENTENCES else 0.5


ANSWERS = ["Paris. It lies on the Seine.", "It is old. It is large. It lies on the Seine. Paris.", "Lyon."]


def main() -> list[float]:
    """Score three answers, print them, and return their rewards."""
    samples = [Sample(prompt="The capital of France?", response=answer, label="Paris") for answer in ANSWERS]
    rewards = []
    for sample in score(samples, load_settings(), reward=reward):
        print(f"{sample.reward:.1f}  {sample.response}")
        rewards.append(sample.reward)
    return rewards


if __name__ == "__main__":
    main()
