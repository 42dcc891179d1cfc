"""Selects the trainable parameters by regular expressions over their Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from slimectl.errors import SettingsError


def trainable_names(names: Iterable[str], *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> set[str]:
    """Return the names that match no pattern of `freeze` and, if `train_only` is set, one of its patterns.

    A pattern matches anywhere in a name. Raises SettingsError for a pattern that matches no name, or if
    no parameter remains.

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
                f"{pattern!r} matches no parameter; names look like {names[len(names) // 2]} (regular expressions of"
                " train.freeze_params_name_list and train.only_train_params_name_list)"
            )
    trainable = {
        name
        for name in names
        if not any(re.search(pattern, name) for pattern in freeze)
        and (not train_only or any(re.search(pattern, name) for pattern in train_only))
    }
    if not trainable:
        raise SettingsError(
            "train.freeze_params_name_list and train.only_train_params_name_list leave no parameter to train; drop one"
        )
    return trainable


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """AdamW hyperparameters and learning rate schedule.

    `weight_decay` skips one-dimensional tensors (norms, biases). `clip_grad` is the largest global gradient norm, 0
    for no clipping. The rate rises linearly from 0 over `warmup_steps`, then is constant or falls to `min_lr` at step
    `decay_steps` (counted from the first step, warm-up included). `state_dtype` is that of the moments.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr: float = 0.0
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise SettingsError(f"schedule {self.schedule!r}: must be constant, linear or cosine")
        if self.schedule != "constant" and (self.decay_steps is None or self.decay_steps <= self.warmup_steps):
            raise SettingsError(
                f"schedule {self.schedule!r} needs decay_steps (the step at which min_lr is reached) above"
                f" warmup_steps ({self.warmup_steps}), got {self.decay_steps}"
            )


def lr_at(step: int, options: OptimizerOptions) -> float:
    """The learning rate of update `step`, counted from 0.

    >>> [lr_at(step, OptimizerOptions(lr=1.0, warmup_steps=2, schedule="linear", decay_steps=6)) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]

    As the schedulers of Megatron-core and transformers: the first update of a warm-up has the rate 0.
    """
    if step < options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant" or options.decay_steps is None:
        return options.lr
    progress = min((step - options.warmup_steps) / (options.decay_steps - options.warmup_steps), 1.0)
    remaining = 1 - progress if options.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return options.min_lr + (options.lr - options.min_lr) * remaining
