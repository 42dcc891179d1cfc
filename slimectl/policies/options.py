"""Options of trainers: common to all backends, and for Megatron-core only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from slimectl.algorithms.packing import DYNAMIC, BatchingOptions
from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import SettingsError
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.recompute import Recompute

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options that every trainer accepts. Raises SettingsError for an unknown dtype."""

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    temperature: float = 1.0
    """Temperature of a policy's log-probabilities."""
    max_tokens_per_pack: int = 4096
    batching: BatchingOptions = DYNAMIC
    share_prefixes: bool = True
    """Compute tokens that rows of a pack begin with once, unless that would change loss or gradient."""
    dtype: str = "float32"
    """Precision of forward and backward. Masters, gradients and optimizer are float32."""
    recompute: Recompute = field(default_factory=Recompute)
    freeze: Sequence[str] = ()
    """Patterns of parameter names that are not trained. Ignored with `lora`."""
    train_only: Sequence[str] = ()
    """Patterns of the only parameter names that are trained, or empty for all. Ignored with `lora`."""
    freeze_vision_tower: bool = True
    trains: bool = True
    """False for a model that only computes log-probabilities, without gradients or optimizer."""
    lora: LoraOptions | None = None
    """Train adapters, and the modules that a value head adds. The base model is frozen."""
    offload: Literal["optimizer", "parameters"] | None = None
    rollout_routing_replay: bool = False
    """Use the experts in the rows. Rows share only tokens with equal experts."""
    saves_moments: bool = True
    """Whether checkpoints contain the optimizer's moments."""
    loads_moments: bool = True
    """Whether a checkpoint's moments are loaded. Otherwise they start at zero."""
    device: str | None = None
    """None for the backend's own choice: a CPU with FSDP, a GPU if there is one with Megatron-core."""
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype {self.dtype!r}: must be {' or '.join(DTYPES)}")

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Options of Megatron-core's trainer that are not in TrainerOptions."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    args: Mapping[str, Any] = field(default_factory=dict)
    """The user's [megatron.args]."""
    distributed_optimizer: bool = True
    optimizer_cpu_offload: bool = False
    routing_replay: bool = False
    """Replay the routing of the last pass for log-probabilities."""
    save_format: str = "hf"
    """"hf", whose files FSDP policies can also load, or "torch_dist", which cannot store adapters."""
