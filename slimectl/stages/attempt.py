"""One attempt at a prompt: how it unfolds, ends, is broken off and goes on."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from slimectl.algorithms.seeds import sample_seed
from slimectl.data.chat import render
from slimectl.errors import HookError, RecordError, SlimectlError
from slimectl.ports import Agent, Engine, OnSample
from slimectl.redaction import redact_text
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.long_prompts import drop_long, prompt_excess
from slimectl.stages.tool_time import ToolTime
from slimectl.types import Completion, Prompt, Sample, SamplingParams, Status

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
UNFINISHED = (Status.PENDING, Status.ABORTED)
DRAFTS = ("spec_verify_ct", "spec_accept_token_num", "spec_draft_token_num")
"""What an engine counts of speculative decoding."""


def sampling_params(settings: RolloutSettings) -> SamplingParams:
    """How the settings ask for answers to be drawn, the seed apart."""
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
    )


async def single_turn(
    sample: Sample,
    sampling_params: SamplingParams,
    generate: Callable[[list[int], SamplingParams], Awaitable[Completion]],
) -> Sample:
    """One question, one answer; an answer that was broken off goes on where it stopped."""
    written = sample.response_length
    if written:
        left, least = sampling_params.max_tokens - written, max(0, sampling_params.min_tokens - written)
        sampling_params = dataclasses.replace(sampling_params, max_tokens=left, min_tokens=least)
    completion = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(completion.tokens, log_probs=completion.log_probs, text=completion.text)
    sample.status = FINISHED[completion.finish]
    return sample


@dataclasses.dataclass
class Attempts:
    """Everything that the attempts of one rollout share.

    An agent with `together` gets all samples of a group in one call. `on_sample` sees each sample that has been
    generated, with the number of the round (`rollout_id`, where it is known) and whether this is an evaluation.
    `agent_at` finds the agent of a sample that names its own (`generate_function_path`).

    `breaking_off`: what is under way ends now, to be gone on with later. A sample that was broken off keeps its
    tokens if its agent can go on from them (`agent.resumes` is true, as of a single turn); others begin again.
    """

    engine: Engine
    tokenizer: Any
    settings: RolloutSettings
    agent: Agent = single_turn
    params: SamplingParams | None = None
    evaluation: bool = False
    breaking_off: bool = False
    on_sample: OnSample | None = None
    agent_at: Callable[[str], Agent] | None = None
    rollout_id: int | None = None
    _rendered: tuple[Prompt, list[int]] | None = None
    """The prompt that was rendered last, and its tokens."""

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        if self._rendered is None or self._rendered[0] is not prompt:  # it is measured first, then asked
            settings = self.settings
            tokens = render(
                prompt,
                self.tokenizer,
                apply_chat_template=settings.apply_chat_template,
                template_kwargs=settings.apply_chat_template_kwargs,
            )
            self._rendered = prompt, tokens
        return list(self._rendered[1])

    @property
    def context(self) -> int | None:
        """Tokens that the engine reads at most, prompt and answer together; None where it does not say."""
        return getattr(self.engine, "max_context", self.settings.max_context_len)

    def excess(self, prompt: Prompt) -> str:
        """Return why the prompt is too long; "" where it is not."""
        tokens = len(self.prompt_tokens(prompt))
        return prompt_excess(tokens, self.settings, self.context, evaluation=self.evaluation)

    def drop_long_prompts(
        self, prompts: Iterable[Prompt], on_dropped: Callable[[Prompt], object] = lambda prompt: None
    ) -> Iterator[Prompt]:
        """Yield the prompts that can be answered. Raises RecordError if none can."""
        if self.context is None and (self.settings.max_prompt_len is None or self.evaluation):
            return iter(prompts)
        mixed = bool(self.settings.data_weights)
        return drop_long(prompts, lambda prompt: prompt, self.excess, on_dropped, mixed=mixed)

    async def group(self, prompt: Prompt) -> list[Sample]:
        """All answers to one prompt."""
        return await self.rest(self.begun(prompt))

    def begun(self, prompt: Prompt) -> list[Sample]:
        """The samples of one prompt before anything is written."""
        tokens, n = self.prompt_tokens(prompt), self.settings.n_samples_per_prompt
        return [
            Sample(
                group_index=prompt.index,
                index=prompt.index * n + i,
                prompt=prompt.text,
                tokens=tokens,
                label=prompt.label,
                metadata=copy.deepcopy(prompt.metadata),
            )
            for i in range(n)
        ]

    async def rest(self, group: list[Sample]) -> list[Sample]:
        """The group with its unfinished samples finished; the others stay as they are."""

        async def finished(sample: Sample) -> list[Sample]:
            return await self._tried([sample]) if sample.status in UNFINISHED else [sample]

        if getattr(self.agent, "together", False) and not any(sample.generate_function_path for sample in group):
            left = [sample for sample in group if sample.status in UNFINISHED]
            done = [sample for sample in group if sample.status not in UNFINISHED]
            return [*done, *(await self._tried(left) if left else [])]
        made = await asyncio.gather(*map(finished, group))
        return [sample for samples in made for sample in samples]

    async def _tried(self, samples: list[Sample]) -> list[Sample]:
        """What one call of the agent makes of these samples."""
        agent, path = self.agent, samples[0].generate_function_path
        if path is not None and self.agent_at is not None:
            try:
                agent = self.agent_at(path)
            except RecordError as error:
                raise RecordError(f"sample {samples[0].index}: {error}") from None
        for sample in samples:
            self._begin(sample)
        given = copy.deepcopy(samples) if self.settings.partial_rollout else None
        asked = _Asked(self, samples)
        which = {"samples": samples} if getattr(agent, "together", False) else {"sample": samples[0]}
        offered = {**which, "sampling_params": asked.params, "generate": asked.generate}
        offered |= {"evaluation": self.evaluation, "tokenizer": self.tokenizer}
        try:
            returned = await _called(agent, offered, tool_timeout_s=self.settings.tool_timeout_s)
            made = _samples(returned, getattr(agent, "name", "rollout.custom_generate_function_path"))
        except SlimectlError:
            raise
        except Exception as error:
            for sample in samples:
                sample.status, sample.remove_sample = Status.FAILED, True
                sample.metadata["error"] = redact_text(f"{type(error).__name__}: {error}")
            made = samples
        if asked.aborted:
            if given is not None and self.breaking_off and not getattr(agent, "resumes", agent is single_turn):
                for sample in given:
                    sample.status = Status.ABORTED
                return given
            made[0].status = made[-1].status = Status.ABORTED
        made = asked.signed(made)
        if self.on_sample is None or (asked.aborted and self.breaking_off):
            return made
        return [await self.on_sample(sample, self.rollout_id, self.evaluation) for sample in made]

    def _begin(self, sample: Sample) -> None:
        if sample.response_length and self.settings.mask_offpolicy_in_partial_rollout:
            # What older weights wrote is read, and no longer taught.
            sample.loss_mask = [0] * sample.response_length
            sample.rollout_log_probs = [0.0] * sample.response_length
        sample.status = Status.PENDING


class ContextFullError(Exception):
    """An attempt asks for an answer for which there is no room; it has failed."""


class _Asked:
    """What one call of an agent asks of the engine, and what it heard.

    A draw whose parameters name no seed gets one by its number: those of a whole group are not the same.
    """

    def __init__(self, attempts: Attempts, samples: list[Sample]) -> None:
        self._attempts = attempts
        sample = self._sample = samples[0]
        self._together, self._unseeded = len(samples) > 1, 0
        self._before, self._prompt_length = list(sample.weight_versions), sample.prompt_length
        self._versions: list[str] = []
        self._cached = self._answers = 0
        self._is_full = False
        self._drafts: Counter[str] = Counter()
        self.aborted = False
        settings, given = attempts.settings, sample.prompt
        text = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
        if sample.response_length:
            text = f"{text}\0{sample.response_length}"  # the rest of an answer: not the draws of its beginning again
        self._text = text
        seed = None if self._together else sample_seed(settings.seed, text, sample.index)
        self.params = dataclasses.replace(attempts.params or sampling_params(settings), seed=seed)

    async def generate(self, tokens: list[int], params: SamplingParams | None = None) -> Completion:
        if self._attempts.breaking_off:  # between two turns: the next one does not begin
            self.aborted = True
            return Completion([], [], "", "abort")
        context = self._attempts.context
        if context is not None and len(tokens) >= context:
            return self._without_room(len(tokens), context)
        completion = await self._attempts.engine.generate(tokens, params=self._seeded(params or self.params))
        self._answers += 1
        self._versions.extend(completion.weight_versions)
        self._cached += completion.cached_tokens
        if "spec_verify_ct" in completion.extras:
            self._drafts.update({name: int(completion.extras[name]) for name in DRAFTS if name in completion.extras})
            self._drafts["completion_token_num"] += len(completion.tokens)
        self.aborted |= completion.finish == "abort"
        return completion

    def _without_room(self, count: int, context: int) -> Completion:
        """An empty answer that is cut off, once. Raises ContextFullError where nothing was answered, or if asked again:
        an agent that does not look at `finish` would ask for ever."""
        if not self._answers or self._is_full:
            raise ContextFullError(f"{count} tokens leave no room for an answer in a context of {context}")
        self._is_full = True
        return Completion([], [], "", "length")

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        self._unseeded += 1
        text = f"{self._text}\0draw {self._unseeded}"
        return dataclasses.replace(params, seed=sample_seed(self._attempts.settings.seed, text, self._sample.index))

    def signed(self, made: list[Sample]) -> list[Sample]:
        """The samples with the versions that wrote them; those of a fan-out share an execution."""
        parts = Counter(each.index for each in made)
        for each in made:
            if self._before and each.weight_versions == self._before:
                each.weight_versions = [*self._before, *self._versions]
            each.weight_versions = each.weight_versions or list(self._versions)
            if self._together and parts[each.index] > 1:
                each.rollout_id = each.index
            elif not self._together and len(made) > 1:
                each.rollout_id = self._sample.index
        made[0].spec_info = dict(self._drafts) or None
        made[0].prefix_cache_info = {"cached_tokens": self._cached, "total_prompt_tokens": self._prompt_length}
        return made


async def _called(agent: Agent, offered: Mapping[str, Any], *, tool_timeout_s: float) -> Any:
    if agent is single_turn:
        return await single_turn(offered["sample"], offered["sampling_params"], offered["generate"])
    tools = ToolTime(offered["generate"], tool_timeout_s)
    result = agent({**offered, "generate": tools.generate})
    return await tools.result(result) if inspect.isawaitable(result) else result


def _samples(returned: Any, name: str) -> list[Sample]:
    """What an agent returned, as a list; a fan-out may have several samples."""
    made = returned if isinstance(returned, list) else [returned]
    if not made or not all(isinstance(each, Sample) for each in made):
        raise HookError(f"{name} returned {type(returned).__name__}; return the Sample or a list of them")
    for each in made:
        if each.status is Status.PENDING:
            each.status = Status.COMPLETED
    return made
