"""Functions in the manner of slime's examples: they import its own modules for rewards, sampling, data and logging."""

import asyncio
import copy
import queue
import threading

import aiohttp
import torch
from slime.agent.adapters import AnthropicAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group, generate_turn
from slime.rollout.sglang_rollout import generate_rollout as default_generate_rollout
from slime.utils import logging_utils
from slime.utils.async_utils import run
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.metric_utils import compute_rollout_step, compute_statistics, dict_add_prefix
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample
from slime_tools import note


class AlternatingSource(DataSource):
    """A source per file, each made with a copy of args that names its file."""

    def __init__(self, args):
        self.sources, self.turn = [], 0
        for path in args.prompt_data:
            own_args = copy.copy(args)
            own_args.prompt_data = path
            self.sources.append(RolloutDataSourceWithBuffer(own_args))

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            place = self.turn % len(self.sources)
            (group,) = self.sources[place].get_samples(1)
            for sample in group:
                sample.metadata["data_source"] = f"source_{place}"
            groups.append(group)
            self.turn += 1
        return groups

    def add_samples(self, samples):
        self.sources[0].add_samples(samples)

    def save(self, rollout_id):
        for place, source in enumerate(self.sources):
            source.save(f"{rollout_id}_{place}")

    def load(self, rollout_id=None):
        for place, source in enumerate(self.sources):
            source.load(f"{rollout_id}_{place}")

    def __len__(self):
        return sum(len(source) for source in self.sources)


async def generate_with_fan_out(args, sample, sampling_params):
    """One response, and with an odd index a copy of it as a second part of the trajectory."""
    from slime.rollout.sglang_rollout import generate

    first = await generate(args, sample, sampling_params)
    parts = [first, copy.deepcopy(first)] if sample.index % 2 else [first]
    for part in parts:
        part.rollout_id = sample.index
    return parts


async def dapo_reward(args, sample, **kwargs):
    """Right for odd samples: 1.0, else -1.0."""
    assert isinstance(sample, Sample)
    answer = sample.label if sample.index % 2 else "no number"
    result = compute_score(f"Answer: {answer}", sample.label)
    result["pred"] = result["pred"] or ""
    return result


def cap_of_step(step):
    return 0.5


def check_reward_cap(args, samples, **kwargs):
    cap = load_function(args.cap_path)(0)
    rewards = [sample.get_reward_value(args) for sample in samples]
    is_above = sum(rewards) / len(rewards) > cap
    return DynamicFilterOutput(keep=not is_above, reason="cap" if is_above else None)


def log_by_source(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    from slime.ray.rollout import compute_metrics_from_samples, compute_perf_metrics_from_samples

    metrics = dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/")
    metrics |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time), "perf/")
    for source in {sample.metadata["data_source"] for sample in samples}:
        lengths = [sample.response_length for sample in samples if sample.metadata["data_source"] == source]
        metrics |= dict_add_prefix(compute_statistics(lengths), f"rollout/{source}/length/")
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, metrics, step_key="rollout/step")
    return True


def weights_with_cp(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    def whole(values):
        return [all_gather_with_cp(*row) for row in zip(values, total_lengths, response_lengths, strict=True)]

    ratios = [torch.exp(new - old) for new, old in zip(whole(train_log_probs), whole(rollout_log_probs), strict=True)]
    rows = zip(ratios, total_lengths, response_lengths, strict=True)
    weights = torch.cat([slice_log_prob_with_cp(*row) for row in rows]).detach()
    return 2.0 * pg_loss * weights, loss_masks, {"example_weight": weights}


def wrapped_rollout(args, rollout_id, data_source, evaluation=False):
    """slime's own rounds, with a change of what comes back."""
    output = default_generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        note("evaluated", names=sorted(output.data), samples=len(output.data["eval"]["samples"]))
    else:
        for group in output.samples:
            group[0].remove_sample = True
        logging_utils.log(args, {"rollout/own": 7.0, "rollout/step": rollout_id}, step_key="rollout/step")
    return output


class Calls(metaclass=SingletonMeta):
    def __init__(self):
        self.count = 0


async def generate_by_turns(args, sample, sampling_params):
    """Two turns of the model with a tool between them; the mask is kept apart, and set again at the end."""
    state = GenerateState(args)
    sample.loss_mask, sample.rollout_log_probs = [], []
    mask = sample.loss_mask
    Calls().count += 1
    for turn in range(2):
        output = await generate_turn(args, sample, {**sampling_params, "max_new_tokens": 2, "ignore_eos": True})
        assert output["meta_info"]["finish_reason"]["type"] == "length"
        if turn == 0:
            tokens = state.tokenizer(" 42 ", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=tokens, trainable=False, text=" 42 ")
    sample.loss_mask = mask
    sample.calls = Calls().count
    return sample


async def generate_with_agents(args, sample, sampling_params, evaluation=False):
    """Two solvers and a judge. They share arguments that are set on args, and its copy."""
    args.sampling_params, args.num_parallel = sampling_params, 2
    args.own_tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    samples = await load_function("slime_examples.solve_in_parallel")(args, sample)
    for part in samples:
        part.rollout_id = sample.index
    return samples


async def solve_in_parallel(args, sample):
    from slime.rollout.sglang_rollout import generate

    args = copy.deepcopy(args)
    attempts = [copy.deepcopy(sample) for _ in range(args.num_parallel)]
    await asyncio.gather(*(generate(args, attempt, args.sampling_params) for attempt in attempts))
    rewards = await batched_async_rm(args, attempts)
    assert rewards[0] == await async_rm(args, attempts[0])
    for attempt, reward in zip(attempts, rewards, strict=True):
        attempt.reward = 0.5 + reward
    return attempts


class ServedPolicy(metaclass=SingletonMeta):
    """An adapter that all attempts share, served by a thread of its own, as in the example of a coding agent."""

    def __init__(self, args):
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.adapter = AnthropicAdapter(tokenizer=tokenizer, sglang_url="", fork_threshold_tokens=None)
        options = {"handler_cancellation": True, "access_log_class": FilteredAccessLogger}
        self.served = run_app_in_thread(self.adapter.app, host="127.0.0.1", port=0, runner_kwargs=options)


async def generate_by_api(args, sample, sampling_params):
    """An agent with two turns, which asks Anthropic's API by the name of its session."""
    state, name = ServedPolicy(args), f"attempt-{sample.index}-{sample.group_index}"
    state.adapter.open_session(name, sampling_defaults=sampling_params, max_context_tokens=200)
    chat = [{"role": "user", "content": sample.prompt}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {name}"}) as client:
        for _ in range(2):
            body = {"model": "m", "max_tokens": 3, "messages": chat}
            async with client.post(f"http://127.0.0.1:{state.served.port}/v1/messages", json=body) as reply:
                answer = await reply.json()
            assert reply.status == 200, answer
            chat += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "again"}]
    samples = await state.adapter.finish_session(name, base_sample=sample, reward=0.25)
    assert await state.adapter.finish_session(name) == []
    return samples


def threaded_rollout(args, rollout_id, data_buffer, evaluation=False):
    """Groups of a thread of its own, with its own event loop."""
    results = queue.Queue()

    async def work():
        groups = data_buffer.get_samples(args.rollout_batch_size)
        params = GenerateState(args).sampling_params.copy()
        tasks = [asyncio.create_task(generate_and_rm_group(args, group, params, evaluation=False)) for group in groups]
        results.put(await asyncio.gather(*tasks))

    thread = threading.Thread(target=lambda: run(work()), daemon=True)
    thread.start()
    groups = results.get(timeout=120)
    assert all(sample.reward is not None for group in groups for part in group for sample in _parts(part))
    return groups


def _parts(part):
    return part if isinstance(part, list) else [part]


def sft_rollout(args, rollout_id, data_buffer, evaluation=False):
    """Demonstrations: tokens and masks of chats, without sampling."""
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    assert load_processor(args.hf_checkpoint, trust_remote_code=True) is None
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=args.loss_mask_type)
    samples = []
    for (sample,) in data_buffer.get_samples(args.rollout_batch_size):
        chat = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.label}]
        token_ids, loss_mask = generator.get_loss_mask(chat, tools=sample.metadata.get("tools"))
        length = generator.get_response_lengths([loss_mask])[0]
        sample.tokens, sample.response_length = token_ids, length
        sample.loss_mask, sample.reward = loss_mask[-length:], 0
        sample.status = Sample.Status.COMPLETED
        sample.taught = generator.get_text_from_loss_mask(token_ids, loss_mask)
        samples.append(sample)
    return samples
