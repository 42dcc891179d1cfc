"""The exact shape of every hook: what it is called with, by name, and what it returns.

T tokens of a pack · R response tokens of one sample
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slimectl.types import Completion, Metrics, Sample, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from slimectl.hooks.args import Args
    from slimectl.ports import TokenPack, WeightWorkers

Group = list[Sample]
"""The attempts at one prompt."""

Generate = Callable[..., Awaitable[Completion]]
"""`await generate(tokens, sampling_params)`: what the engine wrote after these tokens."""

Attempt = Callable[[Group], Awaitable[Group]]
"""`await attempt(group)`: the group with every answer sampled as [rollout] says, its own generate function included."""


class DataSource(Protocol):
    """Where groups come from: the samples of one prompt together, each with its prompt and nothing written yet."""

    def __init__(self, args: Args) -> None: ...

    def get_samples(self, n: int) -> list[Group]:
        """The next `n` groups; fewer where they end."""
        ...

    def add_samples(self, groups: list[Group]) -> None:
        """Take groups back: `get_samples` gives them again before new ones."""
        ...

    def save(self, rollout_id: int) -> Any:
        """Where it stands after this round, as JSON, which is kept with the run; or None, having written it itself."""
        ...

    def load(self, rollout_id: int, state: Any) -> None:
        """Go back to where it stood after this round; `state` is what `save` returned then."""
        ...

    def __len__(self) -> int:
        """Prompts of one epoch."""
        ...


class RolloutFunction(Protocol):
    """A whole round. Samples without a reward are graded as [score] says."""

    def __call__(
        self,
        args: Args,
        rollout_id: int,
        data_source: DataSource,
        evaluation: bool,
        generate: Generate,
        attempt: Attempt,
        sampling_params: SamplingParams,
        tokenizer: Any,
    ) -> list[Group] | tuple[list[Group], Metrics]: ...


class GenerateFunction(Protocol):
    """One attempt: turns, tools; a list is a fan-out."""

    def __call__(
        self,
        args: Args,
        sample: Sample,
        sampling_params: SamplingParams,
        generate: Generate,
        evaluation: bool,
        tokenizer: Any,
    ) -> Sample | list[Sample]: ...


class GroupGenerateFunction(Protocol):
    """All attempts at a prompt in one call."""

    def __call__(
        self,
        args: Args,
        samples: Group,
        sampling_params: SamplingParams,
        generate: Generate,
        evaluation: bool,
        tokenizer: Any,
    ) -> list[Sample]: ...


class RewardFunction(Protocol):
    """The reward of one sample."""

    def __call__(self, args: Args, sample: Sample) -> float | dict[str, Any]: ...


class BatchRewardFunction(Protocol):
    """Many samples in one call: siblings with score.group_rm, else up to score.batch_size."""

    def __call__(self, args: Args, samples: list[Sample]) -> list[Any]: ...


class RewardPostProcess(Protocol):
    """A round's rewards as they are logged, and as they become advantages without being compared with siblings."""

    def __call__(self, args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]: ...


class DynamicFilter(Protocol):
    """Whether a finished group is trained on; for each that is not, another is drawn."""

    def __call__(self, args: Args, samples: Group) -> bool | tuple[bool, str]: ...


class BufferFilter(Protocol):
    """Which waiting groups a round begins with: it takes them out of `buffer`."""

    def __call__(self, args: Args, rollout_id: int, buffer: list[Group], num_samples: int) -> list[Group]: ...


class SampleFilter(Protocol):
    """Sets `remove_sample` of those that are not to be trained on; `data` is a round's groups."""

    def __call__(self, args: Args, data: list[Group]) -> None: ...


class AllSamplesProcess(Protocol):
    """Sees the groups of a round and those that the dynamic filter dropped, in the order in which they finished."""

    def __call__(self, args: Args, all_samples: list[Group], data_source: DataSource) -> None: ...


class SampleHook(Protocol):
    """Every sample when it has been generated, before it is graded; None leaves it (changed in place or not)."""

    def __call__(self, args: Args, sample: Sample, rollout_id: int, evaluation: bool) -> Sample | None: ...


class DataPostprocess(Protocol):
    """What of a round is trained on, a list an entry, one of each a sample: it may change them in place."""

    def __call__(self, args: Args, rollout_id: int, rollout_data: dict[str, Any]) -> None: ...


class LossFunction(Protocol):
    """The loss of one pack, as a sum over its tokens; `logits` [T, vocabulary], over the temperature,
    `log_probs` [T] and `entropy` [T] carry gradients."""

    def __call__(
        self,
        args: Args,
        batch: TokenPack,
        logits: Tensor,
        log_probs: Tensor,
        entropy: Tensor | None,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


class AdvantageFunction(Protocol):
    """Writes rollout_data["advantages"], R numbers a sample, and "returns" where a critic learns them."""

    def __call__(self, args: Args, rollout_data: dict[str, Any]) -> None: ...


class ImportanceSampling(Protocol):
    """Corrects the loss of each token [T] for the engine's other probabilities; all lists have a tensor [R] a sample.

    Tokens that the returned masks drop lose their gradient, and still count in the denominator.
    """

    def __call__(
        self,
        args: Args,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]: ...


class LossReducer(Protocol):
    """What reduces the policy loss [T] of a pack: a sum over its samples, which is then divided by the rollouts of the
    step (with calculate_per_token_loss: over its tokens, divided by the tokens of the step)."""

    def __call__(
        self,
        args: Args,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[Tensor],
        calculate_per_token_loss: bool,
    ) -> Callable[[Tensor], Tensor]: ...


class ConvertSamples(Protocol):
    """What of a round's samples is trained on: "tokens", "response_lengths" and "rewards", a list each, and what else a
    sample has, of any number of rows."""

    def __call__(self, args: Args, samples: list[Sample]) -> dict[str, Any]: ...


class RolloutLog(Protocol):
    """True: trackers get nothing else of this round's samples. What it writes into the extra metrics they get."""

    def __call__(
        self,
        rollout_id: int,
        args: Args,
        samples: list[Sample],
        rollout_extra_metrics: Metrics,
        rollout_time: float,
    ) -> bool: ...


class EvalLog(Protocol):
    """The same for an evaluation; data[NAME] has "rewards", "truncated" and "samples" of that dataset."""

    def __call__(
        self, rollout_id: int, args: Args, data: dict[str, dict[str, Any]], extra_metrics: Metrics
    ) -> bool: ...


class ModelProvider(Protocol):
    """A pipeline stage's part of the model; `build()` makes ours, to be changed or taken as an example."""

    def __call__(
        self, args: Args, pre_process: bool, post_process: bool, vp_stage: int | None, build: Callable[[], Any]
    ) -> Any: ...


class MegatronInit(Protocol):
    """Called on every rank when Megatron's groups exist and no model does."""

    def __call__(self, args: Args) -> None: ...


class BeforeLogProb(Protocol):
    """Before every pass for log-probabilities; `store_prefix` is "" for the policy, "ref_" or "teacher_"."""

    def __call__(self, args: Args, model: Sequence[Any], store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    """Before every optimizer step; `scheduler(step)` is the learning rate of an optimizer step."""

    def __call__(
        self,
        args: Args,
        rollout_id: int,
        step_id: int,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Callable[[int], float],
    ) -> None: ...


class PostWrite(Protocol):
    """When the files of a push are written (disk, delta), before the engines read them."""

    def __call__(self, args: Args, version_dir: Path, rollout_engines: WeightWorkers) -> None: ...
