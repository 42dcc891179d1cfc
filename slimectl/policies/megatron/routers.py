"""What a step of training tells the routers of a mixture of experts: how much their own losses weigh."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from slimectl.policies.megatron.batch import Batch
from slimectl.types import Row


class Balance:
    """Load-balancing and z losses, on a par with a loss that is a weighted sum.

    mcore computes them once per micro-batch and layer, and counts on a later division by the number of tokens, which
    never comes here. Instead each is averaged over the micro-batches of a call and multiplied by the sum of the call's
    row weights: with weights that sum to 1 over a step, `moe_aux_loss_coeff` means what it means in pretraining, and
    a step may be made of several calls.
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
        """A call over `rows`, all of them, in so many micro-batches of all ranks."""
        clear_aux_losses_tracker()
        self.weight = sum(sum(row.weights) for row in rows) / max(1, packs)

    def weigh(self, batch: Batch) -> None:
        """Ahead of a micro-batch's forward."""
        if not self.active:
            if not batch.members:
                # Nobody's token, computed for the sake of the other ranks, is not counted for the routers' biases.
                batch.sequences.padding_T = batch.sequences.padding_T | True
            return
        weight = self.weight if batch.members else 0.0
        for router, (balance, z) in zip(self.routers, self.given, strict=True):
            scaled = [each * weight for each in balance] if isinstance(balance, list) else balance * weight
            router.config.moe_aux_loss_coeff = scaled
            router.config.moe_z_loss_coeff = None if z is None else z * weight
