"""Functions with the signatures of slime's documents, which tests run as they stand."""

import torch
from slime.utils.types import Sample


class ListSource:
    """Gives a sample for each prompt; keeps nothing, and has no length."""

    def __init__(self, dataset, args):
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples):
        return [Sample(prompt=prompt) for prompt in self.dataset.sample(num_samples)]


class BufferedSource(ListSource):
    """Gives the best group that came back first."""

    def __init__(self, dataset, args):
        super().__init__(dataset, args)
        self.buffer = []

    def add_samples(self, samples):
        self.buffer.extend(samples)

    def buffer_filter(self, args, buffer, num_samples):
        assert args.n_samples_per_prompt == 2
        return sorted(buffer, key=lambda group: group.reward, reverse=True)[:num_samples]


async def custom_generate(args, samples, evaluation=False):
    """Set responses as text, without tokens."""
    for sample in samples:
        sample.response = "yes" if sample.index % 2 else "maybe"
        sample.loss_mask = [0] + [1] * (len(sample.response) - 1)
        sample.reward = float(args.max_turns + len(samples) * (sample.index % 2))
    return samples


def generate(args, sample):
    """Set the response of one sample, after a turn that stands in its chat."""
    if isinstance(sample.prompt, list):
        sample.prompt.append({"role": "assistant", "content": "hm"})
        sample.prompt.append({"role": "user", "content": "well?"})
    sample.response = "yes"
    return sample


def generate_rollout(prompts, model, temperature=0.7, **kwargs):
    """Ask the model for a text of each sample."""
    results = []
    for group in prompts:
        texts = [model.generate(group[0].prompt, temperature=temperature) for _ in group]
        results.append([Sample(prompt=group[0].prompt, response=text, tokens=[...]) for text in texts])
    return results


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """REINFORCE over the entries of the batch."""
    assert isinstance(batch, dict)
    targets = torch.cat([row[-n:] for row, n in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)])
    log_probs = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * log_probs)
    return loss, {"entries": torch.tensor(float(len(batch))), "reward": torch.tensor(sum(batch["rewards"]))}


def reward_func(args, sample):
    return len(sample.response)


async def batched_custom_rm(args, samples):
    return [len(sample.response) for sample in samples]


def custom_reward_post_process(args, samples):
    """Weigh the parts of rewards that are dicts."""
    assert [sample.get_reward_value(args) for sample in samples] == [sample.reward["right"] for sample in samples]
    rewards = [sample.reward["right"] - 0.5 * sample.reward["long"] for sample in samples]
    return rewards, [2 * reward for reward in rewards]


logged = []


def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """Read the samples as groups."""
    rollout_extra_metrics["rollout/first"] = sum(group[0].reward for group in samples) / len(samples)
    logged.append([len(group) for group in samples])
    return False


def log_flat(samples, rollout_extra_metrics):
    logged.append(["before"])
    rollout_extra_metrics["rollout/mean"] = sum(sample.reward for sample in samples) / len(samples)


def log_eval_rollout_data(rollout_id, args, data, extra_metrics):
    extra_metrics["eval/first"] = sum(group[0].reward for name in data for group in data[name]["samples"])
    return False
