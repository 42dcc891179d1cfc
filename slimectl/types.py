"""What travels between stages: prompts, completions, samples, rows and reports. Standard library only.

A record is a plain dataclass. `Sample` and `Prompt` have a JSON form (data/records.py validates it at the boundary);
the others live inside a process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimectl.data.buffer import SamplingState

Chat = list[dict[str, Any]]
Metrics = dict[str, float]
Reward = float | dict[str, Any] | None
TableRow = dict[str, str | float]
"""A row of a table of texts: what stands in each column."""


class Status(StrEnum):
    """How a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class Prompt:
    """One question to sample answers for.

    >>> Prompt(text="1+1=", label="2", index=0).text
    '1+1='

    `text` is the string, or the chat (a list of {role, content}) to be rendered by the model's chat template. `index`
    is the position of this occurrence in the run: the n-th prompt drawn, epochs included; siblings share it as their
    `group_index`.
    """

    text: str | Chat
    label: str | int | float | None = None
    index: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    where: str = field(default="", compare=False)
    """Where it was read, FILE:LINE, for errors."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is drawn.

    `seed` makes the draw reproducible whatever else is in the batch. `temperature` 0 is greedy (evaluation only: the
    settings refuse it for training). `stop` strings end the answer and are cut from its text, not from its tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(slots=True)
class Completion:
    """What an engine wrote: R new tokens and the log-probability of each.

    `log_probs` are log_softmax(logits / temperature) at the sampled token, not renormalised after top-k, top-p or
    min-p (the trainer computes the same quantity); with temperature 0, of the untempered logits. `finish` is "stop"
    (end token, stop token or stop string), "length" or "abort".
    """

    tokens: list[int]
    log_probs: list[float]
    text: str
    finish: str
    weight_versions: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    """What else an engine tells of the answer under its own names: routed experts, speculative statistics."""


@dataclass(slots=True)
class Sample:
    """One attempt at one prompt, from sampling to training. Field meanings: docs/records.md.

    >>> sample = Sample(group_index=0, index=3, prompt="1+1=", tokens=[5, 6])
    >>> sample.append_response_tokens([7, 8], log_probs=[-0.5, -0.1], text="2")
    >>> sample.tokens, sample.response_length, sample.loss_mask
    ([5, 6, 7, 8], 2, [1, 1])
    """

    group_index: int = 0
    index: int = 0
    rollout_id: int | None = None
    prompt: str | Chat = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | int | float | None = None
    reward: Reward = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    weight_versions: list[str] = field(default_factory=list)
    rollout_routed_experts: dict[str, str] | None = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    teacher_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    remove_sample: bool = False
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    non_generation_time: float = 0.0
    spec_info: dict[str, int] | None = None
    prefix_cache_info: dict[str, int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys that the schema does not know, written back untouched."""

    @property
    def execution(self) -> int:
        """The execution that produced this sample: `rollout_id`, or `index` where none was given."""
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def mask(self) -> list[int]:
        """The loss mask of length R, zeros for a removed sample, ones where none was given."""
        if self.remove_sample:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask

    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        text: str | None = None,
    ) -> None:
        """Grow the response by what the policy (trainable) or a tool (not trainable) wrote.

        Raises ValueError if trainable tokens come without as many log-probabilities.
        """
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            given = "none" if log_probs is None else str(len(log_probs))
            raise ValueError(f"{len(tokens)} trainable tokens need as many log_probs, got {given}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        self.loss_mask = [*self.loss_mask, *([1 if trainable else 0] * len(tokens))]
        written = list(log_probs) if trainable and log_probs is not None else [0.0] * len(tokens)
        self.rollout_log_probs = [*self.rollout_log_probs, *written]
        if text is not None:
            self.response += text


def detached_copy(sample: Sample) -> Sample:
    """Return a copy that shares nothing which can be changed; long lists of numbers are copied as a whole."""
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(sample)):
        value = getattr(sample, name)
        values[name] = list(value) if name in _LISTS and value is not None else copy.deepcopy(value)
    return Sample(**values)


_LISTS = frozenset({"tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "ref_log_probs"})
"""Fields of a sample that hold a number a token."""


@dataclass(slots=True)
class Row:
    """One sequence as a policy trains on it: P prompt tokens, then R response tokens.

    All lists but `tokens` have length R. `weights` are the whole reduction: the loss of a step is the sum over its
    rows and tokens of weight times loss, so no policy ever needs to know a denominator, and the gradient cannot
    depend on ranks, packs or micro-batches. `group` names the prompt: rows of one group whose prompts are equal may
    share its computation. `values` are a critic's at the beginning of the round, `returns` what it learns.
    """

    tokens: list[int]
    response_length: int
    weights: list[float]
    advantages: list[float] = field(default_factory=list)
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None
    group: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length


@dataclass(slots=True)
class Round:
    """What one round of prompts became: scored samples, siblings together, and the seconds that they took."""

    samples: list[Sample]
    seconds: float
    metrics: Metrics = field(default_factory=dict)
    """What was left out of it, by reason."""

    state: SamplingState | None = None
    """Where sampling stands after it."""


@dataclass(slots=True)
class StepReport:
    """One optimizer step as `train` and `run` report it; `to_json` is a line of metrics.jsonl."""

    step: int
    rollout_id: int
    weight_version: str
    metrics: Metrics
    samples: list[Sample] = field(default_factory=list, repr=False)
    """What the round was made of, for records and statistics; not part of the JSON form."""

    perf: Metrics = field(default_factory=dict)
    """What depends on the clock; goes to perf.jsonl."""

    ends_round: bool = True
    """Whether the round has no further step: new samples will be drawn from these weights."""

    sampling: SamplingState | None = field(default=None, repr=False)
    """Where sampling stood after the round, for the checkpoint; not part of the JSON form."""

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rollout_id": self.rollout_id,
            "weight_version": self.weight_version,
            # JSON has no NaN: what is not finite is null. Loss and gradient norm are finite, or training has stopped.
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
        }
