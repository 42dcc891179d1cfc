"""Records passed between stages: prompts, completions, samples, rows and reports. Standard library only.

A record is a plain dataclass. `Sample` and `Prompt` have a JSON form (data/records.py validates it at the boundary).
The others are used inside a process.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

Chat = list[dict[str, Any]]
Method = TypeVar("Method", bound=Callable[..., Any])
Metrics = dict[str, float]
Reward = float | dict[str, Any] | None
Label = str | int | float | list[Any] | dict[str, Any] | None
ImageSource = str | dict[str, str]
"""An image of a record: an absolute path, or {"bytes": its file in base64}."""
TableRow = dict[str, str | float]
"""A row of a table of texts: values by column."""


class Status(StrEnum):
    """Status of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


SampleStatus = Status
"""Name of `Status` inside the class that has it as an attribute."""

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Finish reasons of engines, with the status of the sample."""


def text_of_label(label: Label) -> str:
    """Return a label as the text that is trained on, graded and shown.

    Numbers have no exponent, and objects are JSON. Tables store whole numbers as floats if a value of the column is
    missing.

    >>> text_of_label(42.0), text_of_label(-0.5), text_of_label(1e-05), text_of_label(["é", 1]), text_of_label(None)
    ('42', '-0.5', '0.00001', '["é", 1]', '')
    """
    if isinstance(label, float) and math.isfinite(label):
        return str(int(label)) if label.is_integer() else format(Decimal(repr(label)), "f")
    if isinstance(label, list | dict):
        return json.dumps(label, ensure_ascii=False)
    return "" if label is None else str(label)


def column(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column or of a dotted path, or None if there is none.

    >>> column({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth"), column({"a.b": 1}, "a.b")
    ('4', 1)
    """
    if key in row or "." not in key:
        return row.get(key)
    head, _, rest = key.partition(".")
    return column(row[head], rest) if isinstance(row.get(head), dict) else None


def domain_of(columns: Mapping[str, Any], metadata: Mapping[str, Any], key: str) -> str | None:
    """Return the domain of a prompt from a column of its row, or from its metadata, or None without one.

    >>> domain_of({"domain": "code"}, {"domain": "math"}, "domain"), domain_of({}, {"a": {"b": 1}}, "a.b")
    ('code', '1')
    """
    domain = column(columns, key)
    domain = column(metadata, key) if domain is None else domain
    return None if domain is None else str(domain)


@dataclass(slots=True)
class Prompt:
    """A prompt for which responses are sampled.

    >>> Prompt(text="1+1=", label="2", index=0).text
    '1+1='

    `text` is the string, or the chat (a list of {role, content}) to be rendered by the model's chat template. `index`
    is the position of this occurrence in the run: the n-th prompt drawn, epochs included. Siblings share it as their
    `group_index`.
    """

    text: str | Chat
    label: Label = None
    index: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    source_location: str = field(default="", compare=False)
    """FILE:LINE, for errors."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of the row outside the schema, which its samples keep."""

    images: list[ImageSource] = field(default_factory=list)
    """Images, in the order of the parts of type "image" in the chat."""


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """Texts that are `prefix`, JSON that a schema accepts, and `suffix`. `schema` is the JSON Schema as JSON."""

    schema: str
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class RegexGrammar:
    """Texts that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceGrammar:
    """One of several texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Responses of these tokens only. Without an end token among them, a response ends at its maximum length."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnyGrammar:
    """Texts of one of several grammars."""

    grammars: tuple[JsonGrammar, ...]


Grammar = JsonGrammar | RegexGrammar | ChoiceGrammar | AnyGrammar | AllowedTokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one response.

    `seed` makes the response reproducible in any batch. `temperature` 0 is greedy. It is for evaluation only, and the
    settings refuse it for training. `stop` strings end the response and are cut from its text, not from its tokens. The
    text has no special tokens, unless `skip_special_tokens` is false. Then it has all except the one that ended the
    response.

    Penalties and `logit_bias` (pairs of a token and a number that is added to its logit) change the sampled
    distribution and its log-probabilities. A policy that trains on such responses computes other log-probabilities.
    `grammar` restricts the tokens that can be drawn and does not change log-probabilities, as top-k does. An engine
    without grammars refuses it. Its responses have a loss mask of 0 where only one token was allowed.
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
    skip_special_tokens: bool = True
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_log_probs: int = 0
    """Number of the likeliest tokens that are reported in place of each token, with their log-probabilities."""
    grammar: Grammar | None = None


TopTokens = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, likeliest first. A pair of a record is a list."""

VersionSpan = list[Any]
"""[weight version, start, end]: the version wrote the tokens [start, end) of a response."""
VERSION_SPANS = "weight_version_spans"
"""Key of a sample's metadata: the spans of the versions, where several wrote it."""


class EngineTimes(NamedTuple):
    """When an engine worked on a request, by `time.perf_counter` of this process."""

    admitted: float
    """Start of the work: the end of the time in queues, as far as the engine reports it."""

    first_token: float
    engine: int = 0
    """Number of the engine among those of the run."""


@dataclass(slots=True)
class Completion:
    """An engine's completion: R new tokens and the log-probability of each.

    `log_probs` are log_softmax(logits / temperature) at the sampled token, not renormalised after top-k, top-p or
    min-p. The trainer computes the same quantity. At temperature 0, the logits are not divided. Penalties and biases
    are applied to the logits first. `finish_reason` is "stop" (end token, stop token or stop string), "length" or
    "abort".
    """

    tokens: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    weight_versions: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    extras: dict[str, Any] = field(default_factory=dict)
    """Further engine-specific values: routed experts, speculative decoding statistics."""

    version_starts: list[int] = field(default_factory=list)
    """Index of the first token of each version. Empty if the engine does not report it."""

    top_log_probs: list[TopTokens] = field(default_factory=list)
    """The likeliest tokens in place of each token, if they were asked for."""

    loss_mask: list[int] | None = None
    """1 where the policy chose the token, 0 where the grammar allowed no other. None without a grammar."""

    times: EngineTimes | None = None
    """When the engine worked on it, if the engine reports that."""

    @property
    def finish(self) -> str:
        """Earlier name of `finish_reason`, which agents of users read."""
        return self.finish_reason

    def version_spans(self, start: int = 0) -> list[VersionSpan]:
        """Return the span of each version, counted from `start`. Empty if the spans are unknown.

        >>> Completion([5, 6, 7], [0.0] * 3, "abc", "stop", ["1", "2"], version_starts=[0, 2]).version_spans(10)
        [['1', 10, 12], ['2', 12, 13]]
        """
        starts = self.version_starts or [0]
        if len(starts) != len(self.weight_versions):
            return []
        ends = [*starts[1:], len(self.tokens)]
        places = zip(self.weight_versions, starts, ends, strict=True)
        return [[version, start + first, start + end] for version, first, end in places]


class Counters(dict[str, int]):
    """Counters of an engine: a dict, whose entries are also attributes. A counter without an entry is 0.

    >>> info = SpeculationCounts(spec_draft_token_num=8)
    >>> info.add({"spec_accept_token_num": 6, "completion_tokens": 9})
    >>> info.spec_accept_token_num, info["completion_token_num"], info.spec_accept_rate, info.spec_accept_length
    (6, 9, 0.75, 0.0)
    """

    META_KEYS: ClassVar[Mapping[str, str]] = {}
    """Counter -> its key in the `meta_info` of a server's response."""

    def __missing__(self, name: str) -> int:
        if name not in self.META_KEYS:
            raise KeyError(name)
        return 0

    def __getattr__(self, name: str) -> int:
        if name not in self.META_KEYS:
            raise AttributeError(f"{type(self).__name__} has no counter {name!r}")
        return self[name]

    def __setattr__(self, name: str, value: int) -> None:
        if name not in self.META_KEYS:
            raise AttributeError(f"{type(self).__name__} has no counter {name!r}")
        self[name] = value

    def __deepcopy__(self, memo: object) -> Counters:
        return type(self)(self)  # several times as fast as the general way

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one response."""
        for name, key in self.META_KEYS.items():
            self[name] += meta_info.get(key) or 0

    def to_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return {name: self[name] for name in self.META_KEYS}

    @classmethod
    def from_dict(cls: type[Counts], values: Mapping[str, int] | None) -> Counts:
        """Return the counters of `to_dict`."""
        return cls(values or {})


Counts = TypeVar("Counts", bound=Counters)


class SpeculationCounts(Counters):
    """Counters of speculative decoding."""

    META_KEYS: ClassVar = {
        "spec_accept_token_num": "spec_accept_token_num",
        "spec_draft_token_num": "spec_draft_token_num",
        "spec_verify_ct": "spec_verify_ct",
        "completion_token_num": "completion_tokens",
    }

    @property
    def spec_accept_rate(self) -> float:
        """Accepted tokens per drafted token."""
        return _ratio(self.spec_accept_token_num, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Tokens per verification."""
        return _ratio(self.completion_token_num, self.spec_verify_ct)


class PrefixCacheCounts(Counters):
    """Counters of the engine's prefix cache."""

    META_KEYS: ClassVar = {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached tokens per prompt token."""
        return _ratio(self.cached_tokens, self.total_prompt_tokens)


def _ratio(count: int, total: int) -> float:
    return count / total if total > 0 else 0.0


def _ignoring_args(method: Method) -> Method:
    """Let a method of a sample be called with the settings before its own arguments, which it does not need."""

    @functools.wraps(method)
    def call(self: Sample, *values: Any, **named: Any) -> Any:
        return method(self, *(values[1:] if values and not hasattr(values[0], "__len__") else values), **named)

    return cast(Method, call)


WITHOUT_EFFECT = {
    "mopd_teacher_log_probs": "the teacher of a sample writes teacher_log_probs (algorithm.opd_teachers)",
    "rollout_top_p_token_ids": "training does not replay top-p",
    "rollout_top_p_token_offsets": "training does not replay top-p",
}
"""Fields of slime's samples that nothing here reads. They are None, and cannot be set."""


@dataclass(slots=True)
class Sample:
    """One attempt at one prompt, from sampling to training. Field meanings: docs/records.md.

    >>> sample = Sample(group_index=0, index=3, prompt="1+1=", tokens=[5, 6])
    >>> sample.append_response_tokens([7, 8], log_probs=[-0.5, -0.1], text="2")
    >>> sample.tokens, sample.response_length, sample.loss_mask
    ([5, 6, 7, 8], 2, [1, 1])

    User functions may set further attributes, which are stored in `extra` and in the record:

    >>> sample.tool_calls = 3
    >>> sample.tool_calls, sample.to_dict()["tool_calls"], Sample.from_dict(sample.to_dict()) == sample
    (3, 3, True)
    """

    Status: ClassVar[type[SampleStatus]] = SampleStatus
    SpecInfo: ClassVar[type[SpeculationCounts]] = SpeculationCounts
    PrefixCacheInfo: ClassVar[type[PrefixCacheCounts]] = PrefixCacheCounts

    group_index: int = 0
    index: int = 0
    rollout_id: int | None = None
    prompt: str | Chat = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Label = None
    reward: Reward = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    weight_versions: list[str] = field(default_factory=list)
    rollout_temperature: float | None = None
    rollout_routed_experts: dict[str, Any] | None = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    teacher_log_probs: list[float] | None = None
    teacher_top_log_probs: list[TopTokens] | None = None
    ref_log_probs: list[float] | None = None
    ref_temperature: float | None = None
    turn_rewards: list[Any] | None = None
    remove_sample: bool = False
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    non_generation_time: float = 0.0
    spec_info: SpeculationCounts = field(default_factory=SpeculationCounts)
    prefix_cache_info: PrefixCacheCounts = field(default_factory=PrefixCacheCounts)
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys outside the schema, written back unchanged."""

    if not TYPE_CHECKING:  # the code of slimectl itself names fields, which mypy checks

        def __getattr__(self, name: str) -> Any:
            """Return one of the user's attributes. Only called for names that are not fields."""
            if name != "extra" and not name.startswith("__"):  # `extra` is not set yet while a sample is unpickled
                if name in self.extra:
                    return self.extra[name]
                if name == "session_id" or name in WITHOUT_EFFECT:  # fields of slime's samples
                    return None
            raise AttributeError(f"Sample has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _SAMPLE_FIELDS or hasattr(Sample, name):  # a property refuses
                _set_attribute(self, name, value)
            elif name in WITHOUT_EFFECT and value is not None:
                raise AttributeError(f"Sample.{name} has no effect: {WITHOUT_EFFECT[name]}. Leave it None")
            else:
                self.extra[name] = value

    @property
    def trajectory_id(self) -> int:
        """The trajectory that this sample is, or is a part of: `rollout_id`, or `index` if that is None."""
        return self.index if self.rollout_id is None else self.rollout_id

    @property
    def has_no_reward(self) -> bool:
        """Whether it was graded, but no reward function had an opinion (score.none_reward)."""
        return self.reward is None and "no_reward" in self.metadata

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or of a dict the number that `args.reward_key` names."""
        return self.reward[args.reward_key] if args.reward_key and isinstance(self.reward, dict) else self.reward

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and further attributes by name, the status as a string."""
        values = {name: getattr(self, name) for name in _SAMPLE_FIELDS if name != "extra"}
        return self.extra | values | {"status": Status(self.status).value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """Return the sample of `to_dict`. Unknown keys become further attributes."""
        field_values = {name: value for name, value in values.items() if name in _SAMPLE_FIELDS and name != "extra"}
        if "status" in field_values:
            field_values["status"] = Status(field_values["status"])
        for name, counters in (("spec_info", SpeculationCounts), ("prefix_cache_info", PrefixCacheCounts)):
            field_values[name] = counters.from_dict(field_values.get(name))
        return cls(**field_values, extra={name: value for name, value in values.items() if name not in _SAMPLE_FIELDS})

    def mask(self) -> list[int]:
        """Return the loss mask of length R: zeros for a removed sample, ones if no mask is set."""
        if self.remove_sample:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask

    @_ignoring_args
    def append_response_tokens(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        text: str | None = None,
        meta_info: Mapping[str, Any] | None = None,
        loss_mask: Sequence[int] | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens of the policy (trainable) or of a tool (not trainable) to the response.

        `loss_mask` has 0 for trainable tokens that a grammar forced. `meta_info` comes with a server's response: its
        loss mask is used, and `update_from_meta_info` is called unless `update_terminal_info` is false. `args` may come
        first, as in slime's functions. Raises ValueError if trainable tokens lack log-probabilities of the same number,
        or have a loss mask of another length.
        """
        if loss_mask is None and meta_info is not None:
            loss_mask = meta_info.get("loss_mask")
        if trainable and loss_mask is not None and len(loss_mask) != len(tokens):
            raise ValueError(f"{len(tokens)} trainable tokens need as many values of loss_mask, got {len(loss_mask)}")
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            count = "none" if log_probs is None else str(len(log_probs))
            raise ValueError(f"{len(tokens)} trainable tokens need as many log_probs, got {count}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        new_mask = [0] * len(tokens) if not trainable else [1] * len(tokens) if loss_mask is None else loss_mask
        # In place where it is a list: functions written for slime keep the list, and set it again at their end.
        mask = self.loss_mask if isinstance(self.loss_mask, list) else list(self.loss_mask)
        mask.extend(new_mask)
        self.loss_mask = mask
        new_log_probs = list(log_probs) if trainable and log_probs is not None else [0.0] * len(tokens)
        self.rollout_log_probs = [*self.rollout_log_probs, *new_log_probs]
        if text is not None:
            self.response += text
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(None, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take version, status and counters from the `meta_info` of a server's response. `args` are not needed."""
        if "spec_verify_ct" in meta_info:
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]
        reason = meta_info.get("finish_reason")
        reason = reason.get("type") if isinstance(reason, Mapping) else reason
        self.status = FINISHED.get(str(reason), self.status)


_set_attribute = object.__setattr__
_SAMPLE_FIELDS = {sample_field.name: None for sample_field in fields(Sample)}
"""Names of a sample's fields, in their order."""


def json_copy(value: Any) -> Any:
    """Return a deep copy of a JSON value, several times as fast as copy.deepcopy, which copies other values."""
    kind = type(value)
    if kind is dict:
        return {key: json_copy(member) for key, member in value.items()}
    if kind is list:
        return [json_copy(member) for member in value]
    return value if value is None or kind in _SCALARS else copy.deepcopy(value)


_SCALARS = frozenset({str, int, float, bool})


def detached_copy(sample: Sample) -> Sample:
    """Return a deep copy. Long lists of numbers are copied as a whole, for speed."""
    values: dict[str, Any] = {}
    for name in (sample_field.name for sample_field in fields(sample)):
        value = getattr(sample, name)
        values[name] = list(value) if name in _LISTS and value is not None else copy.deepcopy(value)
    return Sample(**values)


_LISTS = frozenset(
    {"tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "teacher_top_log_probs", "ref_log_probs"}
)
"""Fields of a sample with a number, or a list that is never changed, per token."""


@dataclass(frozen=True, slots=True)
class TurnKey:
    """Identity of a turn. A turn that several samples of an attempt share (branches) has one key."""

    group: int
    attempt: int
    player: int
    number: int
    """Number of the turn among the player's turns in the attempt, from 0."""


@dataclass(frozen=True, slots=True)
class RewardedTurn:
    """A turn of the policy with its reward: tokens [start, end) of the response of one sample."""

    key: TurnKey
    start: int
    end: int
    reward: float
    state: str | None = None
    """Key of the state in which the policy took the turn. Equal states have equal keys."""


@dataclass(slots=True)
class TrainingSample:
    """One training sequence: P prompt tokens, then R response tokens.

    All lists but `tokens` have length R. `loss_weights` are the whole reduction: the loss of a step is the sum over its
    rows and tokens of weight times loss, so no policy needs a denominator, and the gradient cannot depend on ranks,
    packs or micro-batches. `group` identifies the prompt. `values` are a critic's values before the round, `returns`
    its training targets.
    """

    tokens: list[int]
    response_length: int
    loss_weights: list[float]
    advantages: list[float] = field(default_factory=list)
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    teacher_top_log_probs: list[TopTokens] | None = None
    """The teacher's likeliest tokens in place of each token. Empty where nothing is distilled."""
    teacher_weight: float = 1.0
    """Factor of the divergence from the teacher."""
    values: list[float] | None = None
    returns: list[float] | None = None
    group: int = 0
    reward: float | None = None
    """Reward of the sample, before any comparison."""

    index: int | None = None
    """Index of the sample."""

    routed_experts: dict[str, Any] | None = None
    """Experts that the engine chose for the tokens, as a record has them (data/routed_experts.py)."""
    images: list[ImageSource] = field(default_factory=list)
    """Images of the prompt, in the order of their placeholder tokens."""

    @property
    def images_digest(self) -> bytes:
        """Return 16 bytes that identify the images by their sources, without reading them."""
        text = "\0".join(image if isinstance(image, str) else f"bytes {image['bytes']}" for image in self.images)
        return hashlib.sha256(f"{len(self.images)} {text}".encode()).digest()[:16]

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def input_length(self) -> int:
        """Number of tokens that a forward pass reads: the last of a response predicts nothing."""
        return len(self.tokens) - (self.response_length > 0)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Response tokens of one pack, flat, as a loss reads them: each tensor is [T], float32. Absent ones are None.

    `logprobs_T`, `entropy_T` (if the loss needs it), `predicted_T` and `logits_T` carry gradients. The others are
    constant. `row_T` [T] int64 is the row of each token in the pack, `rows` the number of rows, `total_lengths` the
    number of tokens of each, its prompt included, `rewards_T` the reward of each token's sample. In a critic's pack
    `logprobs_T` has the values.
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
    rewards_T: Tensor | None = None
    total_lengths: Sequence[int] = ()
    samples: Sequence[TrainingSample] = ()
    """The rows themselves, in the order of `row_T`."""

    predicted_T: Tensor | None = None
    """Current values, if policy and critic share a backbone."""

    logits_T: Tensor | None = None
    """[T, vocabulary], for a loss whose `needs_logits` is true."""

    targets_T: Tensor | None = None
    """Token ids of the response."""

    divergence_T: Tensor | None = None
    """Divergence of the policy's distributions from the teacher's, with gradients, for a loss with a `divergence`."""

    teacher_weights_T: Tensor | None = None
    """Factors of the divergence. Absent if all are 1."""

    has_weight: bool | None = None
    """Whether any weight is not 0. None if the host does not know."""


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
    """Position, buffer and data source of the sampling side between two rounds, saved in every checkpoint."""

    position: int = 0
    """The next prompt occurrence."""

    rounds: int = 0
    """Number of completed rounds."""

    buffer: list[list[Sample]] = field(default_factory=list)
    """Groups buffered for a later round, oldest first: finished groups with rewards, and interrupted ones."""

    source: Any = None
    """State of the user's data source, as JSON. It is restored on resume."""

    long_prompts_until: int = 0
    """Overlong prompts at occurrences below this one have been counted already."""

    def snapshot(self) -> SamplerState:
        """A copy that does not change as this state advances (the samples in the buffer are shared, not copied)."""
        buffer = [list(group) for group in self.buffer]
        return SamplerState(self.position, self.rounds, buffer, self.source, self.long_prompts_until)


@dataclass(slots=True)
class RolloutBatch:
    """One round of rollouts: scored samples, siblings together. The first step reports its metrics and timings."""

    samples: list[Sample]
    duration_s: float = 0.0
    """Time to generate and score the samples."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics of dropped groups and prompts, by reason."""

    state: SamplerState | None = None
    """State of sampling after the round."""

    timings: Metrics = field(default_factory=dict)
    """Times of generation and of waiting for it, as perf.jsonl names them."""

    spans: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the timeline from another process that sampled the round."""


@dataclass(slots=True)
class StepReport:
    """One optimizer step as `train` and `run` report it. `to_json` is a line of metrics.jsonl.

    A round whose rollouts fill no step has a report of its own: `is_step` is false, `step` the last one before it.
    """

    step: int
    rollout_id: int
    weight_version: str
    metrics: Metrics
    samples: list[Sample] = field(default_factory=list, repr=False)
    """Samples of the round, for records and statistics. Not part of the JSON form."""

    rewards: list[float] = field(default_factory=list, repr=False)
    """Rewards of the round, for histograms. Not part of the JSON form."""

    timings: Metrics = field(default_factory=dict)
    """Written to perf.jsonl."""

    last_step_of_round: bool = True
    """New samples are drawn from the weights after this step."""

    sampling: SamplerState | None = field(default=None, repr=False)
    """State of sampling after the round, for the checkpoint. Not part of the JSON form."""

    is_step: bool = True

    train_data: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Records of the step's rows, with run.keep_samples = "train". Not part of the JSON form."""

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rollout_id": self.rollout_id,
            "weight_version": self.weight_version,
            # JSON has no NaN: non-finite values are null. Loss and gradient norm are finite, or training has stopped.
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
        }
