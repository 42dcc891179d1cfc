"""Functions as people write them for slime: its imports, signatures, shapes and habits. Tests run them unmodified."""

import copy
import json
from itertools import count

import torch
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample
from slime_tools import note


class CountingSource(DataSource):
    """Prompts that count on; a label is a list of answers."""

    def __init__(self, args):
        self.args = args
        self.offset = 0
        self.buffer = []

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            self.offset += 1
            sample = Sample(prompt=f"count {self.offset}", label=[str(self.offset), "x"])
            sample.difficulty = self.offset % 2
            groups.append([copy.deepcopy(sample) for _ in range(self.args.n_samples_per_prompt)])
        return groups

    def add_samples(self, samples):
        self.buffer += samples

    def save(self, rollout_id):
        with open(f"{self.args.save}/source-{rollout_id}.json", "w") as file:
            json.dump(self.offset, file)

    def load(self, rollout_id=None):
        with open(f"{self.args.load}/source-{rollout_id}.json") as file:
            self.offset = json.load(file)

    def __len__(self):
        return 100


async def generate(args, sample, sampling_params, evaluation=False):
    """Two turns with a tool between them, asked of the router."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    for turn in range(args.max_turns):
        params = dict(sampling_params)
        params["max_new_tokens"] = min(params["max_new_tokens"], 4)
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        async with state.semaphore:
            output = await post(url, payload)
        items = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in items],
            log_probs=[item[0] for item in items],
            trainable=True,
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if sample.status == Sample.Status.ABORTED:
            return sample
        if turn + 1 < args.max_turns:
            tool_ids = state.tokenizer(" tool: 42 ", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=tool_ids, trainable=False, text=" tool: 42 ")
    sample.tool_call_count = args.max_turns - 1
    return sample


def canned(args, sample):
    """An answer that stands in a file, without log-probabilities of an engine."""
    tokenizer = GenerateState(args).tokenizer
    prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.response = "yes" if sample.index % 2 else "maybe"
    answer_ids = tokenizer(sample.response, add_special_tokens=False)["input_ids"]
    sample.tokens = prompt_ids + answer_ids
    sample.response_length = len(answer_ids)
    sample.loss_mask = [1] * len(answer_ids)
    sample.status = Sample.Status.COMPLETED
    return sample


async def canned_rollout(args, rollout_id, data_source):
    groups = data_source.get_samples(args.rollout_batch_size)
    return [[canned(args, sample) for sample in group] for group in groups]


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        samples = [canned(args, group[0]) for group in data_buffer.get_samples(2)]
        rewards = [float(sample.response == "yes") for sample in samples]
        truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
        return RolloutFnEvalOutput(data={"small": {"rewards": rewards, "truncated": truncated, "samples": samples}})
    groups = run(canned_rollout(args, rollout_id, data_buffer))
    return RolloutFnTrainOutput(samples=groups, metrics={"own_metric": rollout_id})


async def reward_func(args, sample, **kwargs):
    """The share of tokens below 64, with a bonus for a label that stands in the answer."""
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    answer = sample.tokens[-sample.response_length :]
    share = sum(token < 64 for token in answer) / max(1, len(answer))
    return {"score": share + args.bonus * any(word in sample.response for word in sample.label or []), "share": share}


async def batched_reward_func(args, samples, **kwargs):
    assert len({sample.group_index for sample in samples}) == 1 or not args.group_rm
    return [float(sample.response == "yes") for sample in samples]


def check_spread(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float64).std() > 1e-9
    if samples[0].group_index == 0:
        keep = torch.tensor(False)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"spread_{samples[0].group_index}")


def pop_newest(args, rollout_id, buffer, num_samples):
    groups = [buffer.pop() for _ in range(min(len(buffer), num_samples))]
    note("pop_newest", rollout_id=rollout_id, groups=len(groups))
    return groups


def remove_truncated(args, groups):
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status == Sample.Status.TRUNCATED and sample.index % 4 == 0


def process_all(args, samples, data_source):
    note("process_all", groups=[group[0].group_index for group in samples], size=len(data_source))


def hide_first_token(args, samples):
    for group in samples:
        for sample in group:
            if sample.response_length:
                sample.loss_mask[0] = 0


def mark(args, sample, rollout_id, evaluation):
    sample.round_number = rollout_id
    sample.train_metadata = {"evaluation": evaluation}


def post_process_rewards(args, samples, **kwargs):
    rewards = torch.tensor([sample.get_reward_value(args) for sample in samples], dtype=torch.float)
    return rewards.tolist(), (rewards - rewards.mean()).tolist()


def group_advantages(args, rollout_data):
    advantages = []
    for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True):
        advantages.append(torch.full((length,), float(reward)))
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = advantages


def truncated_weights(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    weights = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    clipped = weights.clamp(args.tis_clip_low, args.tis_clip)
    assert len(clipped) == sum(response_lengths)
    assert len(total_lengths) == len(loss_masks)
    return pg_loss * clipped.detach(), loss_masks, {"own_weight": weights}


def get_pg_loss_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    def sum_of_sample(x):
        parts = x.split(response_lengths, dim=0)
        return sum((part * mask).sum() / 10.0 for part, mask in zip(parts, loss_masks, strict=False))

    return sum_of_sample


def reinforce_loss(args, batch, logits, sum_of_sample_mean):
    """Log-probabilities from logits, as a loss without the older names of this project computes them."""
    advantages = torch.cat(batch["advantages"], dim=0)
    old_log_probs = torch.cat(batch["log_probs"], dim=0)
    assert batch.get("max_seq_lens", None) is None
    assert len(advantages) == sum(batch["response_lengths"])
    log_probs = torch.log_softmax(logits, dim=-1).gather(-1, batch.targets_T[:, None])[:, 0]
    loss = sum_of_sample_mean(-advantages * log_probs)
    kl = sum_of_sample_mean((old_log_probs - log_probs).detach())
    return loss - args.entropy_coef, {"loss": loss.clone().detach(), "ppo_kl": kl}


def convert_samples_to_train_data(args, samples):
    rows = [sample for group in samples for sample in group] if isinstance(samples[0], list) else samples
    return {
        "tokens": [sample.tokens for sample in rows],
        "response_lengths": [sample.response_length for sample in rows],
        "rewards": [2.0 * sample.get_reward_value(args) for sample in rows],
        "raw_reward": [sample.get_reward_value(args) for sample in rows],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in rows],
        "sample_indices": [sample.index for sample in rows],
        "loss_masks": [sample.loss_mask for sample in rows],
    }


def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["rollout/own"] = sum(sample.get_reward_value(args) for sample in samples)
    note("log_rollout_data", rollout_id=rollout_id, samples=len(samples), wandb=args.use_wandb)
    return False


def log_eval_rollout_data(rollout_id, args, data, extra_metrics):
    note("log_eval_rollout_data", rollout_id=rollout_id, rewards=len(data["small"]["rewards"]))
    return True


def megatron_init(args):
    note("megatron_init", checkpoint=args.hf_checkpoint is not None, tensor=args.tensor_model_parallel_size)


def before_log_prob(args, model, store_prefix):
    note("before_log_prob", prefix=store_prefix, chunks=len(model))


steps = count()


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note("before_train_step", rollout_id=rollout_id, step_id=step_id, call=next(steps))
