"""slime's `generate` and the functions built on it, using the run's engine or the router of `args`."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from slimectl.errors import HookError
from slimectl.hooks.generation_context import current_generation
from slimectl.migrate.slime.arguments import load_function
from slimectl.migrate.slime.grading import async_rm, batched_async_rm
from slimectl.migrate.slime.requests import get_rollout_num_engines, post, run
from slimectl.migrate.slime.results import RolloutFnEvalOutput, RolloutFnTrainOutput
from slimectl.migrate.slime.tokens import encode_image_for_rollout_engine, load_processor, load_tokenizer
from slimectl.migrate.slime_shapes import sampling_params as sampling_params_of
from slimectl.stages.generation import GroupGenerator
from slimectl.types import FINISHED, Sample, Status

POLICY = ("actor", "default", "policy")
"""Names that mean the model being trained."""
COMPLETE = (Status.COMPLETED, Status.TRUNCATED)


class GenerateState:
    """State that generate functions share: tokenizer, processor, sampling parameters, semaphore and running tasks.

    Each event loop has its own, because a semaphore belongs to one loop.
    """

    aborted = False
    """Always False: an interrupted response is marked by its status."""

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, GenerateState]] = WeakKeyDictionary()

    def __new__(cls, args: Any) -> GenerateState:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a function that is not async
            return super().__new__(cls)
        if loop not in cls._of_loops:
            cls._of_loops[loop] = super().__new__(cls)
        return cls._of_loops[loop]

    def __init__(self, args: Any) -> None:
        if hasattr(self, "args"):
            return
        self.args = args
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * get_rollout_num_engines(args))
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": list(args.rollout_stop),
            "stop_token_ids": list(args.rollout_stop_token_ids),
            "skip_special_tokens": args.rollout_skip_special_tokens,
            **args.rollout.penalties,
        }
        self.dp_rank = 0
        self.reset()

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.args.hf_checkpoint)

    @cached_property
    def processor(self) -> Any:
        return load_processor(self.args.hf_checkpoint)

    def reset(self) -> None:
        """Forget the running tasks."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Return rank 0: the engine distributes requests itself."""
        yield 0

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start to generate and grade these groups. `pendings` holds their tasks."""
        for group in samples:
            work = generate_and_rm_group(self.args, group, sampling_params=self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of an endpoint of the engine, or of a model of args.sglang_model_routers.

    Raises HookError for any other model, because the engine serves only the policy.
    """
    routers = args.sglang_model_routers or {}
    if model_name not in (*routers, *POLICY):
        raise HookError(
            f"get_model_url: no model {model_name!r}. The engine has the policy only. Name the server of another model "
            f'as in custom.sglang_model_routers = {{{model_name} = ["127.0.0.1", 30000]}}.'
        )
    if model_name in routers:
        ip, port = routers[model_name]
    else:  # an engine in this process has no address
        ip, port = args.sglang_router_ip, args.sglang_router_port
    return f"http://{ip}:{port}{endpoint}"


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """Append one response of the engine to a sample. A sample with a partial response is continued."""
    if not sample.tokens:
        sample.tokens = load_tokenizer(args.hf_checkpoint).encode(sample.prompt, add_special_tokens=False)
    parameters = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length}
    if parameters["max_new_tokens"] <= 0:
        sample.status = Status.TRUNCATED
        return sample
    await generate_turn(args, sample, parameters)
    return sample


async def generate_turn(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Append a turn of the engine to a sample that has tokens, set its status, and return SGLang's response.

    `max_new_tokens` limits this turn.
    """
    context = current_generation()
    if context is None:
        return await _turn_by_router(args, sample, sampling_params)
    completion = await context.generate(list(sample.tokens), dict(sampling_params))
    sample.append_response_tokens(completion.tokens, log_probs=completion.log_probs, text=completion.text)
    sample.status = FINISHED[completion.finish_reason]
    items = zip(completion.log_probs, completion.tokens, strict=True)
    meta_info = {
        "finish_reason": {"type": completion.finish_reason},
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in items],
        "completion_tokens": len(completion.tokens),
    }
    return {"text": completion.text, "output_ids": completion.tokens, "meta_info": meta_info}


async def _turn_by_router(args: Any, sample: Sample, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the router of `args`, if the function runs outside slimectl."""
    payload = {"input_ids": sample.tokens, "sampling_params": dict(parameters), "return_logprob": True}
    if images := (sample.multimodal_inputs or {}).get("images"):
        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
    output: dict[str, Any] = await post(get_model_url(args, "actor"), payload)
    items = output["meta_info"].get("output_token_logprobs", [])
    tokens, log_probs = [item[1] for item in items], [item[0] for item in items]
    sample.append_response_tokens(tokens, log_probs=log_probs, text=output["text"], meta_info=output["meta_info"])
    return output


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate a sample as set in [rollout] and grade it as set in [score].

    Returns a list if the generate function does. With group_rm the sample is not graded, because its group is.
    """
    if sample.status in COMPLETE:
        return sample
    parts = await _attempt(args, sample, sampling_params, evaluation)
    ungraded = [part for part in parts if part.reward is None and part.status not in (Status.ABORTED, Status.FAILED)]
    if ungraded and not args.group_rm:
        rewards = [await async_rm(args, part) for part in ungraded]
        for part, reward in zip(ungraded, rewards, strict=True):
            part.reward = reward
    return parts[0] if len(parts) == 1 else parts


async def _attempt(args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool) -> list[Sample]:
    """Return the samples of one attempt, from the user's generate function if there is one."""
    context = current_generation()
    if context is not None and context.attempts is not None:
        return await _with_parameters(context.attempts, sampling_params, evaluation).complete([sample])
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return [await generate(args, sample, sampling_params)]
    function = load_function(path)
    options = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    result = await function(args, sample, sampling_params, **options)
    return result if isinstance(result, list) else [result]


def _with_parameters(attempts: GroupGenerator, values: Mapping[str, Any], evaluation: bool) -> GroupGenerator:
    params = sampling_params_of(values, attempts.unseeded_params)
    return dataclasses.replace(attempts, params=params, evaluation=evaluation)


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: Mapping[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and grade the samples of a group concurrently."""
    attempts = (generate_and_rm(args, sample, dict(sampling_params), evaluation) for sample in group)
    members = list(await asyncio.gather(*attempts))
    if args.group_rm:
        samples = _flat(members)
        for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
            sample.reward = reward
    return members


def _flat(members: list[Any]) -> list[Sample]:
    """Return the samples of a group. The parts of one attempt are a list among its members."""
    return [part for member in members for part in (member if isinstance(member, list) else [member])]


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Callable[[int], list[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Return a round of graded groups, and the leftover groups, of which there are none here.

    `data_source` returns the given number of groups, or fewer if it runs out. Group filters only apply to slimectl's
    own rounds. The settings do not allow them together with a function for whole rounds.
    """
    parameters = GenerateState(args).sampling_params
    groups = data_source(args.rollout_batch_size)
    members = await asyncio.gather(*(generate_and_rm_group(args, group, parameters) for group in groups))
    return RolloutFnTrainOutput(list(members), {}), []


async def _evaluate(args: Any, data_source: Any) -> RolloutFnEvalOutput:
    groups = data_source.get_samples(len(data_source))
    parameters = GenerateState(args).sampling_params
    members = await asyncio.gather(*(generate_and_rm_group(args, group, parameters, True) for group in groups))
    samples = [sample for group in members for sample in _flat(group)]
    key = args.eval_reward_key or args.reward_key
    rewards = [sample.reward[key] if key and isinstance(sample.reward, dict) else sample.reward for sample in samples]
    truncated = [sample.status is Status.TRUNCATED for sample in samples]
    return RolloutFnEvalOutput({"eval": {"rewards": rewards, "truncated": truncated, "samples": samples}})


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return a round of graded groups, or with `evaluation` the graded samples of all prompts of the source."""
    if evaluation:
        result: RolloutFnEvalOutput = run(_evaluate(args, data_source))
        return result
    output: RolloutFnTrainOutput = run(generate_rollout_async(args, rollout_id, data_source.get_samples))[0]
    return output
