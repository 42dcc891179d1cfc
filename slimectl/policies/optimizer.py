"""The optimizer of every trainer: trainable parameters by name, learning rate, AdamW with moments in bfloat16."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slimectl.errors import SettingsError


def trainable_names(names: Iterable[str], *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> set[str]:
    """Return the names that match no pattern of `freeze` and, if `train_only` is set, one of its patterns.

    A pattern matches anywhere in a name. Raises SettingsError if a pattern matches no name, or if no parameter remains.

    >>> sorted(trainable_names(["a.norm", "a.mlp", "b.mlp"], freeze=["norm"], train_only=[r"^a\\."]))
    ['a.mlp']
    """
    names = list(names)
    for pattern in (*freeze, *train_only):
        try:
            matches = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise SettingsError(f"{pattern!r} is not a regular expression ({error})") from error
        if not matches:
            raise SettingsError(
                f"{pattern!r} matches no parameter. Names look like {names[len(names) // 2]} (regular expressions of"
                " train.freeze_params_name_list and train.only_train_params_name_list)."
            )
    trainable = {
        name
        for name in names
        if not any(re.search(pattern, name) for pattern in freeze)
        and (not train_only or any(re.search(pattern, name) for pattern in train_only))
    }
    if not trainable:
        raise SettingsError(
            "train.freeze_params_name_list and train.only_train_params_name_list leave no parameter to train. Drop one."
        )
    return trainable


ENDLESS = ("constant", "inverse-square-root")
"""Schedules that need no number of steps."""

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Remaining fraction of the range from lr to min_lr, by elapsed fraction of the decay (as in Megatron-core)."""

SCHEDULES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """AdamW hyperparameters and learning rate schedule.

    `weight_decay` skips one-dimensional tensors (norms, biases). `clip_grad` is the largest global gradient norm, 0 for
    no clipping. The rate rises linearly from 0 over `warmup_steps` and then follows `schedule`. `decay_steps` counts
    from the first step and includes the warm-up. After these steps the rate is `min_lr`. WSD keeps its peak until the
    last `wsd_steps` of them, in which it falls by `wsd_style`. `state_dtype` is the dtype of the moments.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr: float = 0.0
    wsd_steps: int = 0
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise SettingsError(f"schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if self.schedule in ENDLESS:
            return
        if self.decay_steps is None or self.decay_steps <= self.warmup_steps:
            raise SettingsError(
                f"train.lr_decay_style: {self.schedule} needs decay_steps above warmup_steps ({self.warmup_steps}), got"
                f" {self.decay_steps}. Set train.lr_decay_iters, or run.num_rollout for a longer run."
            )
        if self.schedule == "WSD" and not 0 < self.wsd_steps <= self.decay_steps - self.warmup_steps:
            raise SettingsError(
                f"train.lr_wsd_decay_iters: {self.wsd_steps} must be from 1 to {self.decay_steps - self.warmup_steps},"
                f" the steps between the warm-up and the end of the decay ({self.decay_steps})"
            )


def lr_at(step: int, options: OptimizerOptions) -> float:
    """Return the learning rate of update `step`, counted from 0.

    >>> [lr_at(step, OptimizerOptions(lr=1.0, warmup_steps=2, schedule="linear", decay_steps=6)) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    As in the schedulers of Megatron-core and transformers, the first update of a warm-up has the rate 0.
    """
    if step < options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    end = math.inf if options.decay_steps is None else options.decay_steps
    if step > end:
        return options.min_lr
    if options.schedule == "inverse-square-root":
        return max(options.min_lr, options.lr * math.sqrt(max(options.warmup_steps, 1) / max(step, 1)))
    is_wsd = options.schedule == "WSD"
    start = end - options.wsd_steps if is_wsd else options.warmup_steps
    progress = max(0.0, (step - start) / (end - start))
    decay = DECAYS[options.wsd_style if is_wsd else options.schedule]
    return options.min_lr + (options.lr - options.min_lr) * decay(progress)


def unmet_schedule(updates: int, options: OptimizerOptions) -> str:
    """Return a message if the schedule counted a different number of updates than the run made, else "".

    `updates` is the number of updates. The schedule ends at `options.decay_steps`.
    """
    counted = options.decay_steps
    if options.schedule in ENDLESS or counted is None or updates == counted or not updates:
        return ""
    schedule = f"the {options.schedule} schedule of the learning rate"
    message = f"{schedule} counted {counted} steps, and the run made {updates}: "
    if updates > counted:
        end = f"from step {counted + 1} on the rate was {options.min_lr:.3g}"
        return f"{message}{end}. Set train.lr_decay_iters={updates}."
    last = lr_at(updates - 1, options)
    share = f", {last / options.lr:.2f} of its peak" if options.lr else ""
    return (
        f"{message}it ended at {last:.3g}{share}. Dropped groups and failed or stale samples lead to fewer steps. Set"
        f" train.lr_decay_iters={updates} if you expect the same number again."
    )


SCHEDULE_FIELDS = {
    "lr": "peak", "schedule": "decay", "warmup_steps": "warm-up steps", "decay_steps": "end of the decay",
    "min_lr": "lowest rate", "wsd_steps": "steps of the decay", "wsd_style": "shape of the decay",
}  # fmt: skip
"""Fields of OptimizerOptions that determine the learning rate, with their names in messages."""


def changed_schedule(step: int, before: OptimizerOptions, now: OptimizerOptions) -> str:
    """Return a message if a resume changes the learning rate of update `step` (from 0), else ""."""
    old, new = lr_at(step, before), lr_at(step, now)
    if math.isclose(old, new, rel_tol=1e-6):
        return ""
    values = ((text, getattr(before, name), getattr(now, name)) for name, text in SCHEDULE_FIELDS.items())
    causes = ", ".join(f"{text} {value}, was {was}" for text, was, value in values if value != was)
    return f"the learning rate of the next step changes from {old:.3g} to {new:.3g} ({causes})"


CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements that are updated at once, with about eight float32 temporaries, which fit into a CPU's cache."""


@dataclass(frozen=True)
class ShardElements:
    """Indices of a shard's elements in the whole flat parameter: runs of `run` elements, one every `stride`.

    >>> ShardElements(4, run=2, stride=8).indices(1, 3)  # of 4, 5, 12, 13
    tensor([ 5, 12, 13])
    """

    first: int = 0
    run: int | None = None
    """None: all elements are one run."""
    stride: int = 0

    def indices(self, start: int, count: int, device: torch.device | None = None) -> Tensor:
        """Return the indices of `count` elements of the shard, starting with its element `start`."""
        elements = torch.arange(start, start + count, device=device)
        if self.run is not None:
            elements += elements.div(self.run, rounding_mode="floor").mul_(self.stride - self.run)
        return elements.add_(self.first)


WHOLE = ShardElements()


class Bfloat16AdamW(torch.optim.AdamW):
    """AdamW on float32 parameters. The update is computed in float32, from the moments before rounding.

    The noise of an element is a function of the step and of its index in the whole parameter. Sharded and whole
    parameters therefore get the same numbers, and so do resumed and uninterrupted runs. `shards` gives the elements of
    tensors that are not whole parameters.
    """

    moment_dtype = torch.bfloat16

    def __init__(
        self, params: Iterable[Any], *, shards: Mapping[Tensor, ShardElements] | None = None, **options: Any
    ) -> None:
        super().__init__(params, **options)
        self.shards = dict(shards or {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state.get(name)
            dtype = self.moment_dtype
            state[name] = torch.zeros_like(parameter, dtype=dtype) if moment is None else moment.to(dtype)
        state["step"] += 1
        step, shard, size = int(state["step"]), self.shards.get(parameter, WHOLE), CHUNK[parameter.device.type]
        tensors = [tensor.view(-1).split(size) for tensor in (parameter, gradient, *_moments(state))]
        for i, (weights, gradients, exp_avg, exp_avg_sq) in enumerate(zip(*tensors, strict=True)):
            first, second = exp_avg.float(), exp_avg_sq.float()
            _adamw(weights, gradients.float(), first, second, group, step)
            noise = _noise(shard.indices(i * size, len(weights), weights.device), step=step)
            exp_avg.copy_(stochastically_rounded(first, noise & 0xFFFF))
            exp_avg_sq.copy_(stochastically_rounded(second, noise >> 16 & 0xFFFF))


def _moments(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def _adamw(weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, group: dict[str, Any], step: int) -> None:
    """Update weights and moments in place.

    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with torch's decay of lr times weight_decay.
    """
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    first.lerp_(gradients, 1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    denominator = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weights.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


def stochastically_rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, upward with a probability equal to the truncated fraction.

    `noise` has int32 numbers, uniform from 0 to 2^16 - 1. The result is a float32 tensor of bfloat16 values.
    """
    bits = values.view(torch.int32) + noise
    return bits.bitwise_and_(-0x10000).view(torch.float32)


def _noise(indices: Tensor, *, step: int) -> Tensor:
    """Return 32 random bits per index, as int32, which depend only on index and step. Overwrites `indices`."""
    numbers = indices.mul_(0x9E3779B1).add_(step * 0x85EBCA77).bitwise_and_(0xFFFFFFFF)
    # Twice a multiplication modulo 2^32 and an exchange of high and low bits (Murmur3's finalizer).
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        numbers.bitwise_xor_(numbers >> 15).mul_(factor).bitwise_and_(0xFFFFFFFF)
    numbers.bitwise_xor_(numbers >> 16)
    return numbers.sub_(2**31).to(torch.int32)
