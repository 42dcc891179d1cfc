"""A reward of your own: a function of a sample.

slimectl run -s score.custom_rm_path=reward.py:reward
python reward.py        # the rewards of three responses
"""

from __future__ import annotations

from slimectl import Sample


def reward(sample: Sample) -> float:
    """Return the reward of a response, here the share of its letters that are right. Higher is better.

    `sample.response` is the text of the model, `sample.label` the label of the row, `sample.prompt` its prompt, and
    `sample.metadata` has its other columns. Partial credit helps: responses to a prompt that all get the same reward
    teach nothing.
    """
    response, label = sample.response.strip(), str(sample.label)
    matches = sum(letter == right for letter, right in zip(response, label, strict=False))
    return matches / max(len(response), len(label))


RESPONSES = ["abc", "acb", "I cannot sort."]


def main() -> list[float]:
    """Print the rewards of three responses, and return them."""
    rewards = [reward(Sample(prompt="cab>", response=response, label="abc")) for response in RESPONSES]
    for value, response in zip(rewards, RESPONSES, strict=True):
        print(f"{value:.2f}  {response}")
    return rewards


if __name__ == "__main__":
    main()
