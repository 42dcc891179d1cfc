"""Records passed between stages: prompts, completions, samples, rows and reports. Standard library only.

A record is a plain dataclass. `Sample` and `Prompt` have a JSON form (data/records.py validates it at the boundary);
the others are used inside a process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Chat = list[dict[str, Any]]
Metrics = dict[str, float]
Reward = float | dict[str, Any] | None
TableRow = dict[str, str | float]
"""A row of a table of texts: values by column."""


class Status(StrEnum):
    """Status of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class Prompt:
    """A prompt for which answers are sampled.

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
    source_location: str = field(default="", compare=False)
    """FILE:LINE, for errors."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one answer.

    `seed` makes the answer reproducible in any batch. `temperature` 0 is greedy (evaluation only: the settings refuse
    it for training). `stop` strings end the answer and are cut from its text, not from its tokens.
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
    """An engine's completion: R new tokens and the log-probability of each.

    `log_probs` are log_softmax(logits / temperature) at the sampled token, not renormalised after top-k, top-p or
    min-p (the trainer computes the same quantity); with temperature 0, of the untempered logits. `finish_reason` is
    "stop" (end token, stop token or stop string), "length" or "abort".
    """

    tokens: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    weight_versions: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    """Further engine-specific values: routed experts, speculative decoding statistics."""

    @property
    def finish(self) -> str:
        """Earlier name of `finish_reason`, which agents of users read."""
        return self.finish_reason


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
    """Keys outside the schema, written back unchanged."""

    @property
    def trajectory_id(self) -> int:
        """The trajectory that this sample is, or is a part of: `rollout_id`, or `index` if that is None."""
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def mask(self) -> list[int]:
        """Return the loss mask of length R: zeros for a removed sample, ones if no mask is set."""
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
        """Append tokens of the policy (trainable) or of a tool (not trainable) to the response.

        Raises ValueError if trainable tokens lack log-probabilities of the same number.
        """
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            count = "none" if log_probs is None else str(len(log_probs))
            raise ValueError(f"{len(tokens)} trainable tokens need as many log_probs, got {count}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        self.loss_mask = [*self.loss_mask, *([1 if trainable else 0] * len(tokens))]
        new_log_probs = list(log_probs) if trainable and log_probs is not None else [0.0] * len(tokens)
        self.rollout_log_probs = [*self.rollout_log_probs, *new_log_probs]
        if text is not None:
            self.response += text


def detached_copy(sample: Sample) -> Sample:
    """Return a deep copy; long lists of numbers are copied as a whole, for speed."""
    values: dict[str, Any] = {}
    for name in (sample_field.name for sample_field in fields(sample)):
        value = getattr(sample, name)
        values[name] = list(value) if name in _LISTS and value is not None else copy.deepcopy(value)
    return Sample(**values)


_LISTS = frozenset({"tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "ref_log_probs"})
"""Fields of a sample with a number per token."""


@dataclass(slots=True)
class TrainingSample:
    """One training sequence: P prompt tokens, then R response tokens.

    All lists but `tokens` have length R. `weights` are the whole reduction: the loss of a step is the sum over its
    rows and tokens of weight times loss, so no policy needs a denominator, and the gradient cannot depend on ranks,
    packs or micro-batches. `group` identifies the prompt: rows of one group with equal prompts may share its
    computation. `values` are a critic's values before the round, `returns` its training targets.
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


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Response tokens of one pack, flat, as a loss reads them: each tensor is [T], float32; absent ones are None.

    `logprobs_T`, `entropy_T` (if the loss needs it), `predicted_T` and `logits_T` carry gradients; the others are
    constant. `row_T` [T] int64 is the row of each token in the pack, `rows` the number of rows, `total_lengths` the
    number of tokens of each, its prompt included. In a critic's pack `logprobs_T` has the values.
    """

    logprobs_T: Tensor
    entropy_T: Tensor | None
    row_T: Tensor
    rows: int
    weights_T: Tensor
    advantages_T: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    rollout_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None
    returns_T: Tensor | None = None
    total_lengths: Sequence[int] = ()
    predicted_T: Tensor | None = None
    """Current values, if policy and critic share a backbone."""

    logits_T: Tensor | None = None
    """[T, vocabulary], for a loss whose `needs_logits` is true."""

    targets_T: Tensor | None = None
    """Token ids of the response."""


class Loss(Protocol):
    """A pure function of one pack: the weighted sum to minimise and named weighted sums to report.

    Everything returned is a sum over tokens, weights applied: packs, micro-batches and ranks add up. A metric whose
    name ends in _max or _min is an extreme instead.
    """

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass
class SamplerState:
    """Position, buffer and data source of the sampling side between two rounds; part of every checkpoint."""

    position: int = 0
    """The next prompt occurrence."""

    rounds: int = 0
    """Number of completed rounds."""

    buffer: list[list[Sample]] = field(default_factory=list)
    """Groups buffered for a later round, oldest first: finished groups with rewards, and interrupted ones."""

    source: Any = None
    """State of the user's data source, as JSON; handed back to it on resume."""

    long_prompts_until: int = 0
    """Overlong prompts at occurrences below this one have been counted already."""

    def snapshot(self) -> SamplerState:
        """A copy that does not change as this state advances (the samples in the buffer are shared, not copied)."""
        buffer = [list(group) for group in self.buffer]
        return SamplerState(self.position, self.rounds, buffer, self.source, self.long_prompts_until)


@dataclass(slots=True)
class RolloutBatch:
    """One round of rollouts: scored samples, siblings together; the first step reports its metrics and timings."""

    samples: list[Sample]
    duration_s: float = 0.0
    """Time to generate and score the samples."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics of dropped groups and prompts, by reason."""

    state: SamplerState | None = None
    """State of sampling after the round."""

    timings: Metrics = field(default_factory=dict)
    """Times of generation and of waiting for it, as perf.jsonl names them."""


@dataclass(slots=True)
class StepReport:
    """One optimizer step as `train` and `run` report it; `to_json` is a line of metrics.jsonl."""

    step: int
    rollout_id: int
    weight_version: str
    metrics: Metrics
    samples: list[Sample] = field(default_factory=list, repr=False)
    """Samples of the round, for records and statistics; not part of the JSON form."""

    timings: Metrics = field(default_factory=dict)
    """Written to perf.jsonl."""

    last_step_of_round: bool = True
    """New samples are drawn from the weights after this step."""

    sampling: SamplerState | None = field(default=None, repr=False)
    """State of sampling after the round, for the checkpoint; not part of the JSON form."""

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rollout_id": self.rollout_id,
            "weight_version": self.weight_version,
            # JSON has no NaN: non-finite values are null. Loss and gradient norm are finite, or training has stopped.
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
        }
