"""The optimizer of every trainer: trainable parameters by name, learning rate, AdamW with moments in any precision."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slimectl.errors import SettingsError
from slimectl.policies.moments import (
    MOMENTS,
    PRECISIONS,
    WHOLE,
    Moments,
    ShardElements,
    StateDtype,
    moments_of,
    random_bits,
)


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
    """Hyperparameters of the optimizer, and learning rate schedule.

    `weight_decay` skips one-dimensional tensors (norms, biases). `clip_grad` is the largest global gradient norm, 0 for
    no clipping. The rate rises linearly from 0 over `warmup_steps` and then follows `schedule`. `decay_steps` counts
    from the first step and includes the warm-up. After these steps the rate is `min_lr`. WSD keeps its peak until the
    last `wsd_steps` of them, in which it falls by `wsd_style`. `state_dtype` is the dtype of the moments. `name` "muon"
    updates hidden matrices by Muon, with the fields `muon_...`, and the others by AdamW.
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
    state_dtype: StateDtype = "float32"
    name: Literal["adamw", "muon"] = "adamw"
    muon_momentum: float = 0.95
    muon_use_nesterov: bool = True
    muon_num_ns_steps: int = 5

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


class ChunkedAdamW(torch.optim.AdamW):
    """AdamW on float32 parameters, with moments in any precision. The update has the moments before rounding.

    The noise of an element is a function of the step and of its index in the whole parameter. Sharded and whole
    parameters therefore get the same numbers, and so do resumed and uninterrupted runs. `shards` gives the elements of
    tensors that are not whole parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        state_dtype: StateDtype = "bfloat16",
        shards: Mapping[Tensor, ShardElements] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.state_dtype, self.shards = state_dtype, dict(shards or {})

    @property
    def moment_dtype(self) -> torch.dtype:
        return PRECISIONS[self.state_dtype].dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, moments = self._advanced(parameter, MOMENTS), moments_of(self, parameter)
        step, size = int(state["step"]), CHUNK[parameter.device.type]
        chunks = zip(parameter.view(-1).split(size), gradient.view(-1).split(size), strict=True)
        for i, (weights, gradients) in enumerate(chunks):
            start, stop = i * size, i * size + len(weights)
            first, second = (moments.read(state, name, start, stop) for name in MOMENTS)
            _adamw(weights, gradients.float(), first, second, group, step)
            noise = self._noise(parameter, moments, start, stop, step)
            moments.write(state, MOMENTS[0], start, first, None if noise is None else noise & 0xFFFF)
            moments.write(state, MOMENTS[1], start, second, None if noise is None else noise >> 16 & 0xFFFF)

    def _advanced(self, parameter: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the state of a parameter with these moments, and count the step."""
        state: dict[str, Tensor] = self.state[parameter]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        for name in names:
            moments_of(self, parameter).allocate(state, name, parameter)
        state["step"] += 1
        return state

    def _noise(self, parameter: Tensor, moments: Moments, start: int, stop: int, step: int) -> Tensor | None:
        """Return 32 random bits for each of a parameter's elements from `start`, if its moments need them."""
        if not moments.needs_noise:
            return None
        indices = self.shards.get(parameter, WHOLE).indices(start, stop - start, parameter.device)
        return random_bits(indices, step=step)


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
