"""A policy with a shared critic: a value head on its backbone, trained with it by one optimizer.

R response tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from slimectl.policies.megatron.batch import Batch
from slimectl.policies.megatron.masters import PARAM
from slimectl.policies.megatron.policy import MegatronPolicy
from slimectl.policies.megatron.value import NAME, HeadBeside, WithValueHead
from slimectl.policies.state import VALUE_HEAD, check_value_head, write_float32
from slimectl.ports import Weights


class MegatronPolicyWithValues(WithValueHead, MegatronPolicy):
    """ports.Policy with the `values` of ports.Critic; losses read the current values as `predicted_T`.

    The head starts at zero unless the checkpoint has one; it is saved beside the model, as by the FSDP policy.
    """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights without the value head, which engines do not load."""
        return (item for item in super().weights() if item[0] != NAME)

    def save(self, path: Path) -> None:
        super().save(path)
        ((_, head),) = self.state.tensors([NAME], PARAM)
        if dist.get_rank() == 0:
            write_float32(path / VALUE_HEAD, {NAME: head.shape}, iter([(NAME, head)]))
        dist.barrier()

    def load(self, path: Path) -> None:
        check_value_head(path)
        super().load(path)

    def _open_weights(self, path: Path) -> Weights:
        return HeadBeside(super()._open_weights(path), path / VALUE_HEAD)

    def _predicted_values(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        return self.last.value_head(hidden, batch)
