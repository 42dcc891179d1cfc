"""Scales MoE auxiliary losses to the token weights of a step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slimectl.policies.megatron.batch import Batch
from slimectl.types import Row


class Balance:
    """Scales load-balancing and z losses to match a loss that is a weighted sum.

    mcore computes them once per micro-batch and layer, and expects a later division by the number of tokens, which is
    not done here. Instead each is averaged over the micro-batches of a call and multiplied by the sum of the call's
    row weights: with weights that sum to 1 over a step, `moe_aux_loss_coeff` has its meaning of pretraining, and
    a step may consist of several calls.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self.given = []
        for router in self.routers:
            router.calculate_per_token_loss = False
            self.given.append((router.config.moe_aux_loss_coeff, router.config.moe_z_loss_coeff))
        self.active = any(router.is_aux_loss_enabled() for router in self.routers) or any(z for _, z in self.given)
        self.weight = 0.0

    def begin(self, rows: Sequence[Row], packs: int) -> None:
        """Start a call over all `rows`, in `packs` micro-batches over all ranks."""
        clear_aux_losses_tracker()
        self.weight = sum(sum(row.weights) for row in rows) / max(1, packs)

    def weigh(self, batch: Batch) -> None:
        """Set the loss coefficients for a micro-batch; called before its forward."""
        if not self.active:
            if not batch.members:
                # The unused token of a rank without rows must not count for the routers' biases.
                batch.sequences.padding_T = batch.sequences.padding_T | True
            return
        weight = self.weight if batch.members else 0.0
        for router, (balance, z) in zip(self.routers, self.given, strict=True):
            scaled = (
                [coefficient * weight for coefficient in balance] if isinstance(balance, list) else balance * weight
            )
            router.config.moe_aux_loss_coeff = scaled
            router.config.moe_z_loss_coeff = None if z is None else z * weight
