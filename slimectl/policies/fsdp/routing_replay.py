"""Replays an engine's routing in the routers of a Hugging Face model.

T input tokens of a pack · L layers · k experts of a token · N tokens · E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.fsdp.model import decoder_layers
from slimectl.policies.fsdp.packed_batch import PackedBatch
from slimectl.policies.routed_experts import FREE, RoutingShape


class ReplayedTopK(TorchFunctionMode):
    """Replaces a router's choice, the top k of scores [N, E], by given experts and their scores.

    The model still normalizes and scales the scores itself, with gradients. Recomputation runs the same forward again
    while the same pack is set.
    """

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        self.shape = shape
        self.experts_Nk: Tensor | None = None
        """Experts of the next forward, FREE where the router chooses."""
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or self.experts_Nk is None:
            return result
        scores, chosen = args[0], result[1]
        if scores.shape != (len(self.experts_Nk), self.shape.experts) or chosen.shape != self.experts_Nk.shape:
            return result  # chooses groups of experts
        self.calls += 1
        experts_Nk = torch.where(self.experts_Nk == FREE, chosen, self.experts_Nk)
        return torch.return_types.topk((scores.gather(1, experts_Nk), experts_Nk))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `function` that applies this replacement while it runs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


class ExpertReplay:
    """Sets the experts of a pack in all routers of a model."""

    def __init__(self, hf: Any) -> None:
        """Raises SettingsError for a model without experts."""
        self.shape = RoutingShape.of_config(hf.config.to_dict())
        self.routers: dict[int, ReplayedTopK] = {}
        for i, layer in enumerate(decoder_layers(hf)):
            block = getattr(layer, "mlp", None)
            if hasattr(block, "experts"):
                self.routers[i] = ReplayedTopK(self.shape)
                _replace_choice(block, self.routers[i])
        if not self.routers:
            raise SettingsError(
                f"train.use_rollout_routing_replay: the experts of {hf.config.model_type} are not in the layers' mlp."
                " Train it with the megatron backend."
            )

    def set(self, batch: PackedBatch) -> None:
        """Set the experts of a pack for its forward and recomputation. Rows share only tokens with equal experts."""
        experts_TLk = torch.full((len(batch.tokens_T), self.shape.layers, self.shape.choices), FREE)
        for row, path in zip(batch.plan.rows, batch.plan.paths, strict=True):
            experts_TLk[torch.from_numpy(path)] = self.shape.of_row(row)
        experts_TLk = experts_TLk.to(batch.tokens_T.device)
        for i, router in self.routers.items():
            router.experts_Nk, router.calls = experts_TLk[:, i], 0

    def check_use(self) -> None:
        """Check that every router has chosen at least once in the forward. Raises CheckpointError."""
        if not all(router.calls for router in self.routers.values()):
            raise CheckpointError(
                "train.use_rollout_routing_replay: the routers of this architecture do not use the top-k function on"
                " scores. Train it with the megatron backend."
            )


def _replace_choice(block: Any, router: ReplayedTopK) -> None:
    """Wrap the function that chooses experts: the gate of the block, or the block's method after the gate."""
    gate = block.gate if hasattr(block, "gate") else block.router
    gate.forward = router.around(gate.forward)
    if hasattr(block, "route_tokens_to_experts"):
        block.route_tokens_to_experts = router.around(block.route_tokens_to_experts)
