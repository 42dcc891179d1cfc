"""Signatures of all hooks: parameters by name and return value.

T tokens of a pack · R response tokens of one sample
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slimectl.types import Chat, Completion, Label, Metrics, Sample, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

    from slimectl.data.prompt_dataset import PromptDataset
    from slimectl.hooks.args import FlatSettings
    from slimectl.migrate.slime_shapes import SamplingDict
    from slimectl.protocols import WeightUpdateClient

Group = list[Sample]
"""The samples of one prompt."""

Generate = Callable[..., Awaitable[Completion]]
"""`await generate(tokens, sampling_params)`: returns the engine's completion of these tokens."""

Attempt = Callable[[Group], Awaitable[Group]]
"""`await attempt(group)`: samples every response of the group as set in [rollout], with its generate function."""


class DataSource(Protocol):
    """Source of groups. A group is the samples of one prompt, each with its prompt and an empty response.

    `dataset` has the prompts of rollout.data. Only `get_samples` is required.
    """

    def __init__(self, args: FlatSettings, dataset: PromptDataset) -> None: ...

    def get_samples(self, n: int) -> list[Group] | list[Sample]:
        """Return the next `n` groups, or fewer at the end. A Sample instead of a group is copied for the group."""
        ...

    def add_samples(self, groups: list[Group]) -> None:
        """Take groups back. `get_samples` returns them again before new ones."""
        ...

    def save(self, rollout_id: int) -> Any:
        """Return the state after this round as JSON to save with the run, or None if the source saved it itself."""
        ...

    def load(self, rollout_id: int, state: Any) -> None:
        """Restore the state after this round. `state` is the value that `save` returned then."""
        ...

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        ...


class Model(Protocol):
    """The model, for functions that are not async."""

    def generate(self, prompt: str | Chat, **sampling_params: Any) -> str:
        """Return the text of a response."""
        ...


class RolloutFunction(Protocol):
    """Samples a whole round. Samples without a reward are graded as set in [score].

    `prompts` are the groups of the round, drawn from the data source if the function has this parameter.
    """

    def __call__(
        self,
        args: FlatSettings,
        rollout_id: int,
        data_source: DataSource,
        evaluation: bool,
        generate: Generate,
        attempt: Attempt,
        sampling_params: SamplingDict,
        tokenizer: Any,
        prompts: list[Group],
        model: Model,
        temperature: float,
    ) -> list[Group] | tuple[list[Group], Metrics]: ...


class GenerateFunction(Protocol):
    """Generates one sample, with turns and tools. If it returns a list, the attempt has several samples (fan-out)."""

    def __call__(
        self,
        args: FlatSettings,
        sample: Sample,
        sampling_params: SamplingDict,
        generate: Generate,
        evaluation: bool,
        tokenizer: Any,
    ) -> Sample | list[Sample]: ...


class GroupGenerateFunction(Protocol):
    """Generates all samples of a prompt in one call."""

    def __call__(
        self,
        args: FlatSettings,
        samples: Group,
        sampling_params: SamplingDict,
        generate: Generate,
        evaluation: bool,
        tokenizer: Any,
    ) -> list[Sample]: ...


class RewardFunction(Protocol):
    """Returns the reward of one sample."""

    def __call__(self, args: FlatSettings, sample: Sample) -> float | dict[str, Any]: ...


class BatchRewardFunction(Protocol):
    """Returns the rewards of many samples: one group with score.group_rm, otherwise up to score.batch_size samples."""

    def __call__(self, args: FlatSettings, samples: list[Sample]) -> list[Any]: ...


class ColumnRewardFunction(Protocol):
    """Returns the rewards of many samples, whose parts are lists, as in TRL. `row` holds other keys of their rows.

    verl's batch manager calls the parts `data_sources`, `solution_strs`, `ground_truths` and `extra_infos`.

    With `queries` (prompt and response in one text), as in OpenRLHF, prompts are texts, and it gets `labels`.
    """

    def __call__(
        self,
        args: FlatSettings,
        prompts: list[Any],
        completions: list[Any],
        queries: list[str],
        solution_strs: list[str],
        **row: list[Any],
    ) -> list[float]: ...


class NamedRewardFunction(Protocol):
    """Returns the reward of one sample from its parts, as in verl. `row` holds other keys of its row.

    `completion` is the response. If the prompt is a chat, it is a list with one assistant message.
    """

    def __call__(
        self,
        args: FlatSettings,
        prompt: str | Chat,
        completion: str | Chat,
        response: str,
        label: Label,
        ground_truth: Label,
        solution_str: str,
        data_source: str,
        extra_info: dict[str, Any],
        **row: Any,
    ) -> float | dict[str, Any]: ...


class RewardPostProcess(Protocol):
    """Returns a round's rewards to log, and rewards that become advantages without comparison within the group."""

    def __call__(self, args: FlatSettings, samples: list[Sample]) -> tuple[list[float], list[float]]: ...


class DynamicFilter(Protocol):
    """Returns whether a finished group is trained on. A dropped group is replaced by another prompt.

    It may also return an object with `keep` and `reason` instead of such a tuple.
    """

    def __call__(self, args: FlatSettings, samples: Group) -> bool | tuple[bool, str]: ...


class BufferFilter(Protocol):
    """Removes the groups that a round starts with from `buffer` and returns them."""

    def __call__(self, args: FlatSettings, rollout_id: int, buffer: list[Group], num_samples: int) -> list[Group]: ...


class SampleFilter(Protocol):
    """Sets `remove_sample` of samples that are not trained on. `data` holds a round's groups."""

    def __call__(self, args: FlatSettings, data: list[Group]) -> None: ...


class AllSamplesProcess(Protocol):
    """Gets the groups of a round, including the groups that the dynamic filter dropped, in order of completion."""

    def __call__(self, args: FlatSettings, all_samples: list[Group], data_source: DataSource) -> None: ...


class SampleHook(Protocol):
    """Called with every sample after generation, before grading. None keeps the sample, with changes made in place."""

    def __call__(self, args: FlatSettings, sample: Sample, rollout_id: int, evaluation: bool) -> Sample | None: ...


class DataPostprocess(Protocol):
    """May change a round's training data in place: a dict of lists with an entry per sample."""

    def __call__(self, args: FlatSettings, rollout_id: int, rollout_data: dict[str, Any]) -> None: ...


class GroupPostprocess(Protocol):
    """May change the loss masks of a round's samples in place. The samples are in groups."""

    def __call__(self, args: FlatSettings, rollout_id: int, samples: list[Group]) -> None: ...


class LossFunction(Protocol):
    """Returns the loss of one pack, as a sum over its tokens. `logits` [T, vocabulary] (divided by the temperature),
    `log_probs` [T] and `entropy` [T] carry gradients. `batch` has slime's keys too (`hooks/loss.py`, LossBatch)."""

    def __call__(
        self,
        args: FlatSettings,
        batch: TokenBatch,
        logits: Tensor,
        log_probs: Tensor,
        entropy: Tensor | None,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


class AdvantageFunction(Protocol):
    """Writes rollout_data["advantages"], R numbers per sample, and "returns" if a critic is trained on them."""

    def __call__(self, args: FlatSettings, rollout_data: dict[str, Any]) -> None: ...


class ImportanceSampling(Protocol):
    """Corrects the loss of each token [T] for the engine's probabilities. All lists have a tensor [R] per sample.

    Tokens that the returned masks drop get no gradient, but still count in the denominator.
    """

    def __call__(
        self,
        args: FlatSettings,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]: ...


class LossReducer(Protocol):
    """Returns a function that reduces the policy loss [T] of a pack to a sum over its samples, which is then divided
    by the rollouts of the step (with calculate_per_token_loss: over its tokens, divided by the tokens of the step)."""

    def __call__(
        self,
        args: FlatSettings,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[Tensor],
        calculate_per_token_loss: bool,
    ) -> Callable[[Tensor], Tensor]: ...


class ConvertSamples(Protocol):
    """Converts a round's samples to training data: lists "tokens", "response_lengths", "rewards" and other columns of
    a sample, with any number of rows."""

    def __call__(self, args: FlatSettings, samples: list[Sample]) -> dict[str, Any]: ...


class RolloutLog(Protocol):
    """Returns True to keep a round's sample metrics from the trackers. Its changes to the extra metrics are logged."""

    def __call__(
        self,
        rollout_id: int,
        args: FlatSettings,
        samples: list[Sample],
        rollout_extra_metrics: Metrics,
        rollout_time: float,
    ) -> bool: ...


class EvalLog(Protocol):
    """Like RolloutLog for an evaluation. data[NAME] has "rewards", "truncated" and "samples" of that dataset."""

    def __call__(
        self, rollout_id: int, args: FlatSettings, data: dict[str, dict[str, Any]], extra_metrics: Metrics
    ) -> bool: ...


class ModelProvider(Protocol):
    """Returns a pipeline stage's part of the model: the result of `build()`, or a GPTModel of your own.

    `config` is megatron-core's TransformerConfig, built from config.json and the settings.
    """

    def __call__(
        self,
        args: FlatSettings,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        build: Callable[[], Any],
        config: Any,
        vocab_size: int,
    ) -> Any: ...


class MegatronInit(Protocol):
    """Called on every rank after Megatron's groups are initialized, before any model is built."""

    def __call__(self, args: FlatSettings) -> None: ...


class BeforeLogProb(Protocol):
    """Called before every pass for log-probabilities. `store_prefix` is "" for the policy, "ref_" or "teacher_"."""

    def __call__(self, args: FlatSettings, model: Sequence[Any], store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    """Called before every optimizer step. `scheduler(step)` returns the learning rate of an optimizer step."""

    def __call__(
        self,
        args: FlatSettings,
        rollout_id: int,
        step_id: int,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Callable[[int], float],
    ) -> None: ...


class PostWrite(Protocol):
    """Called after the files of a push are written (disk, delta), before the engines read them."""

    def __call__(self, args: FlatSettings, version_dir: Path, rollout_engines: WeightUpdateClient) -> None: ...
