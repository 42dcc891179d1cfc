"""Losses that call functions of the user, by parameter name.

T response tokens of a pack · R response tokens of one sample
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimectl.algorithms.losses import PolicyLoss
from slimectl.errors import HookError
from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import hook, required_hook
from slimectl.hooks.training_batch import LOSS, REDUCER, TIS
from slimectl.settings import Settings
from slimectl.types import TokenBatch, TrainingSample


class LossBatch(dict[str, Any]):
    """A pack as a custom loss gets it: slime's dict with an entry per row, and the attributes of a TokenBatch.

    `batch["advantages"]` is `batch.advantages_T`, split into a tensor [R] per row. The dict has no keys for values
    that a step does not have, such as the values of a critic.
    """

    COLUMNS: ClassVar = {
        "advantages": "advantages_T",
        "log_probs": "old_logprobs_T",
        "ref_log_probs": "ref_logprobs_T",
        "returns": "returns_T",
        "rollout_log_probs": "rollout_logprobs_T",
        "values": "values_T",
    }

    def __init__(self, pack: TokenBatch) -> None:
        self._pack = pack
        columns = {name: getattr(pack, field) for name, field in self.COLUMNS.items()}
        if columns["log_probs"] is None:  # one step per round: the policy that sampled is the current one
            columns["log_probs"] = pack.logprobs_T.detach()
        columns["loss_masks"] = (pack.weights_T != 0).to(pack.weights_T.dtype)
        masks = _split_by_row(columns["loss_masks"], pack)
        super().__init__(
            {name: _split_by_row(values_T, pack) for name, values_T in columns.items() if values_T is not None},
            response_lengths=[len(mask) for mask in masks],
            total_lengths=list(pack.total_lengths),
        )
        if pack.samples:
            device = pack.logprobs_T.device
            self["unconcat_tokens"] = [torch.tensor(sample.tokens, device=device) for sample in pack.samples]
            self["tokens"] = torch.cat(self["unconcat_tokens"])[None]
        rewards = [sample.reward for sample in pack.samples]
        if rewards and None not in rewards:
            self["rewards"] = rewards

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._pack, name)

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key} is not in this batch. It has {', '.join(sorted(self))}, and tensors of the whole pack as attributes"
        )


@dataclass(frozen=True)
class CustomLoss:
    """The user's loss of one pack: (loss, metrics), each a sum over the pack's tokens.

    The function gets `batch` (types.TokenBatch: response tokens, flat), their `log_probs` [T], `entropy` [T] if
    algorithm.entropy_coef is not 0, `logits` [T, vocabulary] divided by the temperature if it has that parameter, and
    and `sum_of_sample_mean`, which reduces a tensor [T] as the settings say: its results add up over packs and ranks
    to the value of the step.
    """

    settings: Settings

    @property
    def needs_entropy(self) -> bool:
        return bool(getattr(self.settings.algorithm, "entropy_coef", 0.0))

    @property
    def needs_logits(self) -> bool:
        """Whether the function has a parameter `logits`. Full logits need memory that nothing else needs."""
        return "logits" in required_hook(self.settings, LOSS).wanted

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        function, args = required_hook(self.settings, LOSS), FlatSettings(self.settings)

        def sum_of_sample_mean(values_T: Tensor) -> Tensor:
            return (pack.weights_T * values_T).sum()

        result = function(
            {
                "args": args,
                "settings": args,
                "batch": LossBatch(pack),
                "logits": pack.logits_T,
                "log_probs": pack.logprobs_T,
                "entropy": pack.entropy_T,
                "sum_of_sample_mean": sum_of_sample_mean,
            }
        )
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss, Tensor) or loss.ndim:
            shape = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise HookError(
                f"{function.name} returned a loss of {shape}. Return a scalar tensor, for example "
                f"sum_of_sample_mean(loss_T), or (a scalar tensor, a dict of metrics)"
            )
        if not isinstance(metrics, dict):
            raise function.returned(result, "(a scalar tensor, a dict of them)")
        if pack.logprobs_T.requires_grad and not loss.requires_grad:
            raise HookError(f"{function.name} returned a loss without a gradient. Compute it from log_probs")
        return loss, {name: self._metric(name, value, loss) for name, value in metrics.items()}

    def _metric(self, name: object, value: Any, loss: Tensor) -> Tensor:
        """Return a metric of the function as a scalar. Raises HookError for anything but one number."""
        try:
            number = torch.as_tensor(value, device=loss.device).detach()
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None or number.numel() != 1:
            size = "no number" if number is None else f"of shape {list(number.shape)}"
            function = required_hook(self.settings, LOSS)
            raise HookError(f"{function.name} returned a metric {name!r} that is {size}. Return a sum over the pack")
        return number.reshape(())


@dataclass(frozen=True)
class UserPolicyLoss(PolicyLoss):
    """PolicyLoss with a user-defined engine mismatch correction (TIS) or reduction.

    `rollouts` and `tokens` are counts of the whole step, and the denominators of its reductions.
    """

    settings: Settings = field(default_factory=Settings)
    rollouts: int = 1
    tokens: int = 1

    def _surrogate(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss_T, values_T = super()._surrogate(pack)
        function = hook(self.settings, TIS)
        if function is None:
            return loss_T, values_T
        if pack.rollout_logprobs_T is None:
            raise HookError(f"{TIS}: {function.path} needs rollout_log_probs, which these samples lack")
        old_T = pack.logprobs_T.detach() if pack.old_logprobs_T is None else pack.old_logprobs_T
        masks = _split_by_row((pack.weights_T != 0).to(loss_T.dtype), pack)
        result = function(
            self._offered(pack, masks)
            | {
                "pg_loss": loss_T,
                "train_log_probs": _split_by_row(old_T, pack),
                "rollout_log_probs": _split_by_row(pack.rollout_logprobs_T, pack),
            }
        )
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
            raise function.returned(result, "(pg_loss, loss_masks, a dict of metrics)")
        user_loss_T, masks, metrics = result
        masks_T = torch.cat([torch.as_tensor(mask, device=loss_T.device) for mask in masks]) if len(masks) else loss_T
        for name, value_T in (("pg_loss", user_loss_T), ("loss_masks", masks_T)):
            if not isinstance(value_T, Tensor) or value_T.shape != loss_T.shape:
                raise function.returned(result, f"{name} of the {len(loss_T)} tokens that it got")
        if not torch.isfinite(user_loss_T).all():
            raise HookError(f"{TIS}: {function.path} returned a pg_loss that is not finite. Bound the weights")
        user_metrics = {name: torch.as_tensor(value, device=loss_T.device) for name, value in metrics.items()}
        return user_loss_T * (masks_T != 0), values_T | {
            name: value.detach().to(loss_T.dtype).expand_as(loss_T) for name, value in user_metrics.items()
        }

    def _weighted_sum(self, pack: TokenBatch, name: str, values_T: Tensor) -> Tensor:
        function = hook(self.settings, REDUCER) if name == "pg_loss" else None
        if function is None:
            return super()._weighted_sum(pack, name, values_T)
        by_token = bool(getattr(self.settings.algorithm, "calculate_per_token_loss", False))
        masks = _split_by_row((pack.weights_T != 0).to(values_T.dtype), pack)
        reduce = function(self._offered(pack, masks) | {"calculate_per_token_loss": by_token})
        if not callable(reduce):
            raise function.returned(reduce, "a function from a tensor to a scalar")
        reduced = function.wrap(reduce)(values_T)
        if not isinstance(reduced, Tensor) or reduced.ndim:
            raise HookError(
                f"{REDUCER}: {function.path}: its function returned no scalar for {len(values_T)} token losses"
            )
        return reduced / (self.tokens if by_token else self.rollouts)

    def _total(self, pack: TokenBatch, pg_T: Tensor, loss_T: Tensor) -> Tensor:
        if self.settings.train.custom_pg_loss_reducer_function_path is None:
            return super()._total(pack, pg_T, loss_T)
        return self._weighted_sum(pack, "pg_loss", pg_T) + self._weighted_sum(pack, "loss", loss_T - pg_T)

    def _offered(self, pack: TokenBatch, masks: list[Tensor]) -> dict[str, Any]:
        args = FlatSettings(self.settings)
        return {
            "args": args,
            "settings": args,
            "loss_masks": masks,
            "total_lengths": list(pack.total_lengths),
            "response_lengths": [len(mask) for mask in masks],
        }


def user_policy_loss(
    loss: PolicyLoss, rows: Sequence[TrainingSample], executions: Sequence[Hashable], settings: Settings
) -> PolicyLoss:
    """Return the loss of a step with the user's functions of [train]. `rows` have their loss weights.

    Without such functions the loss is returned unchanged.
    """
    train = settings.train
    if train.custom_tis_function_path is None and train.custom_pg_loss_reducer_function_path is None:
        return loss
    arguments = {loss_field.name: getattr(loss, loss_field.name) for loss_field in fields(PolicyLoss)}
    if train.custom_tis_function_path is not None:
        arguments["use_tis"] = False  # the function replaces it
    tokens = sum(weight != 0 for row in rows for weight in row.loss_weights)
    return UserPolicyLoss(**arguments, settings=settings, rollouts=len(set(executions)), tokens=max(1, tokens))


def _split_by_row(values_T: Tensor, pack: TokenBatch) -> list[Tensor]:
    """Split a tensor [T] into a tensor [R] for every row of the pack."""
    counts = torch.bincount(pack.row_T, minlength=pack.rows)
    return list(torch.split(values_T, counts.tolist()))
