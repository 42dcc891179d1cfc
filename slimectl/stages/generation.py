"""Generates responses to prompts: single turns and agents, groups, seeds, weight versions of tokens."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from slimectl.chats.model_tokens import unknown_token
from slimectl.data.chat import render, warn_of_raw_prompt
from slimectl.data.hashing import sample_seed
from slimectl.data.images import images_of
from slimectl.data.routed_experts import Routing, extended, set_routing
from slimectl.errors import HookError, RecordError, SettingsError, SlimectlError
from slimectl.protocols import Agent, Engine, OnTokens
from slimectl.rewards.thoughts import OPENED, opened_by
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.failed_attempts import warn_of_failure
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.long_prompts import drop_long, prompt_excess
from slimectl.stages.text_responses import fill_tokens
from slimectl.stages.tool_timeout import BlockedLoopWatchdog, ToolTimeout
from slimectl.system.redaction import redact_text
from slimectl.system.timeline import timeline
from slimectl.types import (
    FINISHED,
    VERSION_SPANS,
    Completion,
    PrefixCacheCounts,
    Prompt,
    Sample,
    SamplingParams,
    SpeculationCounts,
    Status,
    TopTokens,
    VersionSpan,
    json_copy,
)

PROMPT_END = 32
"""Number of tokens at the end of a rendered prompt in which an opening tag of a thought is searched."""

UNFINISHED = (Status.PENDING, Status.ABORTED)
DRAFTS = ("spec_verify_ct", "spec_accept_token_num", "spec_draft_token_num")
"""Counters of speculative decoding in `Completion.extras`."""


def sampling_params(settings: RolloutSettings) -> SamplingParams:
    """Return the sampling parameters of the settings, without a seed."""
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_response_len,
        min_tokens=settings.min_new_tokens,
        stop=tuple(settings.stop),
        stop_token_ids=tuple(settings.stop_token_ids),
        ignore_eos=settings.ignore_eos,
        skip_special_tokens=settings.skip_special_tokens,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        top_log_probs=settings.top_log_probs,
    )


async def single_turn(
    sample: Sample,
    sampling_params: SamplingParams,
    generate: Callable[[list[int], SamplingParams], Awaitable[Completion]],
) -> Sample:
    """Generate one response to one prompt. An interrupted response resumes where it stopped."""
    length = sample.response_length
    if length:
        max_tokens, min_tokens = sampling_params.max_tokens - length, max(0, sampling_params.min_tokens - length)
        sampling_params = dataclasses.replace(sampling_params, max_tokens=max_tokens, min_tokens=min_tokens)
    completion = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(completion.tokens, log_probs=completion.log_probs, text=completion.text)
    sample.status = FINISHED[completion.finish_reason]
    return sample


@dataclasses.dataclass
class GroupGenerator:
    """Generates the groups of a run or an evaluation. Holds the engine, settings and hooks that its samples share.

    An agent with `per_group` is called once with all samples of a group. `hooks.on_sample` is called with each
    generated sample, the number of its round (`rollout_id`, if known) and whether this is an evaluation.
    `hooks.agent_at` loads the agent of a sample with its own `generate_function_path`. `on_skipped` is called with
    prompts that leave no room for a response, or are longer than `settings.max_prompt_len`. Evaluations ignore this
    limit, because their prompts are the same for every model.

    While `interrupting` is set, running samples are interrupted and resumed later. An interrupted sample keeps its
    tokens if its agent can resume (`agent.resumes` is true, or it is a single turn). Other samples start over.
    """

    engine: Engine
    tokenizer: Any
    settings: RolloutSettings
    agent: Agent = single_turn
    hooks: Hooks = NO_HOOKS
    params: SamplingParams | None = None
    evaluation: bool = False
    on_skipped: Callable[[Prompt], object] = lambda prompt: None
    interrupting: bool = dataclasses.field(default=False, init=False)
    rollout_id: int | None = dataclasses.field(default=None, init=False)
    failures: int = dataclasses.field(default=0, init=False)
    """Number of attempts that have failed."""
    requests: list[tuple[Any, ...]] = dataclasses.field(default_factory=list, init=False)
    """Values of an EngineRequest for every finished request (stages/request_times.py), until they are taken."""
    _rendered: tuple[Prompt, list[int]] | None = dataclasses.field(default=None, init=False)
    """The last rendered prompt and its tokens."""

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        if self._rendered is None or self._rendered[0] is not prompt:  # otherwise the length check has rendered it
            settings = self.settings
            if not getattr(self.agent, "renders_chats", False):
                warn_of_raw_prompt(prompt, self.tokenizer, settings)
            tokens = render(
                prompt,
                self.tokenizer,
                apply_chat_template=settings.apply_chat_template,
                template_kwargs=settings.template_kwargs,
            )
            self._rendered = prompt, tokens
        return list(self._rendered[1])

    @property
    def context(self) -> int | None:
        """Maximum context of the engine in tokens, prompt and response together, or None if unknown."""
        return getattr(self.engine, "max_context", self.settings.max_context_len)

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens for which the engine's model has an embedding, or None if unknown."""
        return getattr(self.engine, "vocabulary", None)

    @functools.cached_property
    def watchdog(self) -> BlockedLoopWatchdog:
        """Interrupts agents that block the event loop of all attempts."""
        return BlockedLoopWatchdog(self.settings.tool_timeout_s)

    @functools.cached_property
    def unseeded_params(self) -> SamplingParams:
        """Sampling parameters of all responses, without a seed."""
        return self.params or sampling_params(self.settings)

    @functools.cached_property
    def engine_reports_tokens(self) -> bool:
        """Whether the engine can report tokens as it samples them."""
        return "on_tokens" in inspect.signature(self.engine.generate).parameters

    def excess(self, prompt: Prompt) -> str:
        """Return why the prompt is skipped (too long, or a token that the model lacks), or "" if it is not."""
        tokens = self.prompt_tokens(prompt)
        if unknown := unknown_token(tokens, self.tokenizer, self.vocabulary):
            return unknown
        return prompt_excess(len(tokens), self.settings, self.context, evaluation=self.evaluation)

    def fitting(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts that fit into the model's context and vocabulary. Raises RecordError if there are none."""
        longest = self.context if self.evaluation else self.context or self.settings.max_prompt_len
        if longest is None and self.vocabulary is None:
            return iter(prompts)
        mixed = bool(self.settings.data_weights or self.settings.domain_weights or self.settings.uses_pools)
        return drop_long(
            prompts, lambda prompt: prompt, self.excess, lambda prompt: self.on_skipped(prompt), mixed=mixed
        )

    def new_group(self, prompt: Prompt) -> list[Sample]:
        """Return n_samples_per_prompt samples of one prompt, with prompt tokens only."""
        tokens, n = self.prompt_tokens(prompt), self.settings.n_samples_per_prompt
        return [
            Sample(
                group_index=prompt.index,
                index=prompt.index * n + i,
                prompt=json_copy(prompt.text),  # users' functions change chats and tokens in place
                tokens=list(tokens),
                label=prompt.label,
                metadata=json_copy(prompt.metadata),
                extra=json_copy(prompt.extra),
                multimodal_inputs={"images": list(prompt.images)} if prompt.images else None,
            )
            for i in range(n)
        ]

    async def complete(self, group: list[Sample]) -> list[Sample]:
        """Generate the unfinished samples of a group. Finished ones do not change."""

        async def finish(agent: Agent | None, samples: list[Sample]) -> list[Sample]:
            return samples if agent is None else await self._run_agent(agent, samples)

        calls: dict[Any, tuple[Agent | None, list[Sample]]] = {}
        for sample in group:
            agent = self._agent_of(sample) if sample.status in UNFINISHED else None
            key = id(agent) if agent is not None and is_per_group(agent) else ("sample", id(sample))
            calls.setdefault(key, (agent, []))[1].append(sample)
        results = await asyncio.gather(*(finish(*call) for call in calls.values()))
        samples = [sample for samples in results for sample in samples]
        number_executions(samples)
        return samples

    def _agent_of(self, sample: Sample) -> Agent:
        """Return the agent that a sample names, or the agent of the settings."""
        path = sample.generate_function_path
        if path is None or self.hooks.agent_at is None:
            return self.agent
        try:
            return self.hooks.agent_at(path)
        except RecordError as error:
            raise RecordError(f"sample {sample.index}: {error}") from None

    async def _run_agent(self, agent: Agent, samples: list[Sample]) -> list[Sample]:
        """Call the agent once with these samples and return the samples that it produced."""
        for sample in samples:
            self._prepare(sample)
        snapshot = copy.deepcopy(samples) if self.settings.partial_rollout else None
        before = {} if agent is single_turn else {id(sample): _prompt_copy(sample) for sample in samples}
        session = _GenerationSession(self, samples)
        subject = {"samples": samples} if is_per_group(agent) else {"sample": samples[0]}
        arguments = {**subject, "sampling_params": session.params, "generate": session.generate}
        arguments |= {"evaluation": self.evaluation, "tokenizer": self.tokenizer, "context": self.context}
        try:
            result = await self._call_agent(agent, arguments)
            name = getattr(agent, "name", "rollout.custom_generate_function_path")
            outputs = _as_samples(result, name, len(samples))
            for sample in [] if agent is single_turn else outputs:
                original = before.get(id(sample))
                fill_tokens(sample, render=self.prompt_tokens, tokenizer=self.tokenizer, name=name, before=original)
                self._fail_beyond_context(sample)
        except SlimectlError:
            raise
        except Exception as error:
            place = getattr(agent, "error_location", lambda error: "")(error)
            for sample in samples:
                _fail(sample, f"{type(error).__name__}: {error}" + (f" ({place})" if place else ""))
            outputs = samples
        if session.aborted:
            if snapshot is not None and self.interrupting and not getattr(agent, "resumes", agent is single_turn):
                for sample in snapshot:
                    sample.status = Status.ABORTED
                return snapshot
            outputs[0].status = outputs[-1].status = Status.ABORTED
        outputs = session.attach_versions(outputs)
        for sample in outputs:
            self._note_opened_thought(sample)
            if sample.status is Status.FAILED:
                self.failures += 1
                warn_of_failure(sample, self.failures)
        on_sample = self.hooks.on_sample
        if on_sample is None or (session.aborted and self.interrupting):
            return outputs
        return [await on_sample(sample, self.rollout_id, self.evaluation) for sample in outputs]

    def _fail_beyond_context(self, sample: Sample) -> None:
        """Mark a sample as failed if its function appended trained tokens beyond the context of the engine."""
        excess = 0 if self.context is None else len(sample.tokens) - self.context
        if excess > 0 and sample.status is Status.COMPLETED and any((sample.loss_mask or [1])[-excess:]):
            _fail(sample, f"ContextFullError: {len(sample.tokens)} tokens do not fit into a context of {self.context}")

    def _note_opened_thought(self, sample: Sample) -> None:
        """Record in the metadata which thought the rendered prompt opens, because verifiers do not see that prompt.

        If the tags are special tokens, responses lack them, so a verifier cannot see where the thought ends.
        """
        prompt_end = sample.tokens[max(0, sample.prompt_length - PROMPT_END) : sample.prompt_length]
        skip = self.settings.skip_special_tokens
        tag = opened_by(self.tokenizer.decode(prompt_end, skip_special_tokens=skip)) if prompt_end else ""
        if tag or OPENED in sample.metadata or opened_by(sample.prompt):
            sample.metadata[OPENED] = tag

    async def _call_agent(self, agent: Agent, arguments: Mapping[str, Any]) -> Any:
        """Return the agent's result. Its tools are limited to rollout.tool_timeout_s, unless it limits its own time."""
        if agent is single_turn:
            return await single_turn(arguments["sample"], arguments["sampling_params"], arguments["generate"])
        if getattr(agent, "limits_time", False):
            return await agent(arguments)
        tools = ToolTimeout(arguments["generate"], self.settings.tool_timeout_s, self.watchdog)

        async def call() -> Any:
            result = agent({**arguments, "generate": tools.generate})
            return await result if inspect.isawaitable(result) else result

        return await tools.result(call())

    def _prepare(self, sample: Sample) -> None:
        if sample.response_length and self.settings.mask_offpolicy_in_partial_rollout:
            # Tokens from older weights stay in the context but get loss mask 0.
            sample.loss_mask = [0] * sample.response_length
            sample.rollout_log_probs = [0.0] * sample.response_length
        sample.status = Status.PENDING


def number_executions(group: Sequence[Sample]) -> None:
    """Set the rollout_id of samples whose group has several prompts, so that their file shows that this is intended."""
    if any(sample.prompt != group[0].prompt for sample in group):
        for sample in group:
            sample.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id


class ContextFullError(Exception):
    """Raised if an agent requests a response that does not fit into the context. The sample fails."""


class _GenerationSession:
    """Engine requests of one agent call. Derives seeds, and collects weight versions and cache statistics.

    Requests are sampled independently. The seed of each is derived from the sample and the number of the request,
    unless the agent sets one.
    """

    def __init__(self, attempts: GroupGenerator, samples: list[Sample]) -> None:
        self._attempts = attempts
        sample = self._sample = samples[0]
        self._together, self._draws = len(samples) > 1, 0
        self._images = _image_arguments(sample, attempts.engine)
        self._before = list(sample.weight_versions)
        self._spans_before: list[VersionSpan] = sample.metadata.get(VERSION_SPANS) or []
        if len(set(self._before)) == 1:
            self._spans_before = [[self._before[0], 0, sample.response_length]]
        self._versions: list[str] = []
        self._requests: list[tuple[list[int], Completion]] = []
        """Tokens and completion of each request."""
        self._cached_tokens = self._prompt_tokens = self._answers = 0
        self._is_full = False
        self._speculation_counts: Counter[str] = Counter()
        self.aborted = False
        settings, prompt = attempts.settings, sample.prompt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        if sample.response_length:
            # A resumed response must not repeat the random numbers of its beginning.
            text = f"{text}\0{sample.response_length}"
        self._text = text
        seed = None if self._together else sample_seed(settings.seed, text, sample.index)
        self.params = dataclasses.replace(attempts.unseeded_params, seed=seed)

    async def generate(
        self, tokens: list[int], params: SamplingParams | None = None, *, on_tokens: OnTokens | None = None
    ) -> Completion:
        if self._attempts.interrupting:  # interrupted between two turns, so do not start the next one
            self.aborted = True
            return Completion([], [], "", "abort")
        context = self._attempts.context
        if context is not None and len(tokens) >= context:
            return self._full_context_answer(len(tokens), context)
        options: dict[str, Any] = dict(self._images)
        if on_tokens is not None and self._attempts.engine_reports_tokens:
            options["on_tokens"] = on_tokens
        params = self._with_seed(params or self.params)
        started = time.perf_counter()
        completion = await self._attempts.engine.generate(tokens, params=params, **options)
        if timeline.enabled:
            sample, ended = self._sample, time.perf_counter()
            place = (self._attempts.rollout_id, sample.group_index, sample.index)
            counts = (len(tokens), len(completion.tokens))
            self._attempts.requests.append((*place, *counts, started, ended, completion.times))
        self._answers += 1
        self._versions.extend(completion.weight_versions)
        self._requests.append((list(tokens), completion))
        self._cached_tokens += completion.cached_tokens
        self._prompt_tokens += len(tokens)
        if "spec_verify_ct" in completion.extras:
            self._speculation_counts.update(
                {name: int(completion.extras[name]) for name in DRAFTS if name in completion.extras}
            )
            self._speculation_counts["completion_token_num"] += len(completion.tokens)
        self.aborted |= completion.finish_reason == "abort"
        return completion

    def _full_context_answer(self, count: int, context: int) -> Completion:
        """Return an empty truncated response, but only once.

        Raises ContextFullError if nothing was generated yet. Also raises it if called again, because an agent that
        ignores `finish_reason` would loop endlessly.
        """
        if not self._answers or self._is_full:
            raise ContextFullError(f"{count} tokens leave no room for a response in a context of {context}")
        self._is_full = True
        return Completion([], [], "", "length")

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a seed for this request. The first request of a sample uses the sample's seed."""
        if params.seed is not None and params.seed != self.params.seed:
            return params
        self._draws += 1
        if self._draws == 1 and params.seed is not None:
            return params
        text = f"{self._text}\0draw {self._draws}"
        return dataclasses.replace(params, seed=sample_seed(self._attempts.settings.seed, text, self._sample.index))

    def attach_versions(self, samples: list[Sample]) -> list[Sample]:
        """Set temperature, weight versions and engine statistics of the samples. A fan-out shares a rollout_id."""
        parts = Counter(sample.index for sample in samples)
        for sample in samples:
            # For greedy responses, the engine records log-probabilities at temperature 1.
            sample.rollout_temperature = self.params.temperature or 1.0
            if self._before and sample.weight_versions == self._before:
                sample.weight_versions = [*self._before, *self._versions]
            sample.weight_versions = sample.weight_versions or list(self._versions)
            sample.rollout_routed_experts = None if self._attempts.evaluation else self._routing(sample)
            if self.params.top_log_probs:
                sample.teacher_top_log_probs = self._top_log_probs(sample)
            if len(set(sample.weight_versions)) > 1 and (spans := self._spans(sample)):
                sample.metadata = {**sample.metadata, VERSION_SPANS: spans}
            self._mask_forced(sample)
            if self._together and parts[sample.index] > 1:
                sample.rollout_id = sample.index
            elif not self._together and len(samples) > 1:
                sample.rollout_id = self._sample.index
        if self._speculation_counts:  # otherwise an agent may have set counts of its own engine
            samples[0].spec_info = SpeculationCounts(self._speculation_counts)
        if self._requests:
            counts = {"cached_tokens": self._cached_tokens, "total_prompt_tokens": self._prompt_tokens}
            samples[0].prefix_cache_info = PrefixCacheCounts(counts)
        return samples

    def _spans(self, sample: Sample) -> list[VersionSpan]:
        """Return which version wrote which tokens of the response. Ignores completions that are not in the sample."""
        spans = list(self._spans_before)
        for tokens, completion in self._requests:
            place = len(tokens)
            if sample.tokens[place : place + len(completion.tokens)] == completion.tokens:
                spans += completion.version_spans(place - sample.prompt_length)
        return spans

    def _top_log_probs(self, sample: Sample) -> list[TopTokens]:
        """Return the likeliest tokens in place of each token of the response. Tokens of a tool have none."""
        known = sample.teacher_top_log_probs or []
        tops = [*known, *([] for _ in range(sample.response_length - len(known)))]
        for tokens, completion in self._requests:
            common = _common_length(sample.tokens, [*tokens, *completion.tokens])
            for place, top in enumerate(completion.top_log_probs, len(tokens)):
                if place < common:
                    tops[place - sample.prompt_length] = top
        return tops

    def _mask_forced(self, sample: Sample) -> None:
        """Set the loss mask to 0 for tokens that a grammar forced, in every completion that the sample contains.

        Of completions of the same tokens, the one that agrees with the sample longest counts.
        """
        if all(completion.loss_mask is None for _, completion in self._requests):
            return
        forced: dict[int, bool] = {}
        common = [_common_length(sample.tokens, [*tokens, *answer.tokens]) for tokens, answer in self._requests]
        for end, (tokens, answer) in sorted(zip(common, self._requests, strict=True), key=itemgetter(0)):
            mask = answer.loss_mask or [1] * len(answer.tokens)
            forced |= {place: not chosen for place, chosen in enumerate(mask, len(tokens)) if place < end}
        if any(forced.values()):
            values = enumerate(sample.loss_mask or [1] * sample.response_length, sample.prompt_length)
            sample.loss_mask = [0 if forced.get(place) else value for place, value in values]

    def _routing(self, sample: Sample) -> Routing | None:
        """Return the experts of the sample's tokens, from every request with a common prefix, or None if unknown.

        An agent may have set them, as slime's functions do.
        """
        experts: Any = sample.rollout_routed_experts
        if experts is not None and not isinstance(experts, dict):
            return set_routing(experts)
        routing, readable = sample.rollout_routed_experts, len(sample.tokens) - 1
        for tokens, completion in self._requests:
            if isinstance(later := completion.extras.get("routed_experts"), dict):
                common = _common_length(sample.tokens, [*tokens, *completion.tokens])
                routing = extended(routing, later, tokens=min(common, readable))
        return routing


def _prompt_copy(sample: Sample) -> Sample:
    """Return a sample with copies of another's prompt and tokens."""
    return Sample(prompt=json_copy(sample.prompt), tokens=list(sample.tokens))


def _common_length(first: list[int], second: list[int]) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])


def _image_arguments(sample: Sample, engine: Engine) -> dict[str, Any]:
    """Return the argument `images` of a request, if there are any. Raises SettingsError if the engine reads none."""
    images = images_of(sample)
    if images and not getattr(engine, "reads_images", False):
        raise SettingsError(
            'engine.backend: prompts with images need the engine "embedded" in this process. Set it, or use prompts'
            " without images"
        )
    return {"images": images} if images else {}


def is_per_group(agent: Agent) -> bool:
    """Return whether the agent takes all samples of a group in one call. The attribute used to be `together`."""
    return bool(getattr(agent, "per_group", getattr(agent, "together", False)))


def _fail(sample: Sample, reason: str) -> None:
    """Mark a sample as failed, so that it is not trained on."""
    sample.status, sample.remove_sample = Status.FAILED, True
    sample.metadata["error"] = redact_text(reason)


def _as_samples(result: Any, name: str, attempts: int) -> list[Sample]:
    """Return the result of an agent as a list of samples. A fan-out has more samples than attempts."""
    samples = result if isinstance(result, list) else [result]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise HookError(f"{name} returned {type(result).__name__}. Return the Sample or a list of them.")
    if len(samples) < attempts:
        raise HookError(
            f"{name} returned {len(samples)} samples for {attempts} attempts. Return all of them, and set "
            f"remove_sample = True for samples that should not be trained on."
        )
    for sample in samples:
        if sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
    return samples
