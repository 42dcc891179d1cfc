"""Routing replay: a token goes to the experts of the pass that took its old log-probability.

Without it a mixture of experts changes its routing between the two passes (other kernels, an update in between), and
the ratio of their probabilities says more about routers than about the policy. Zheng et al. 2025, arXiv:2507.18071,
section 5.3.

S tokens of the whole pack · T tokens of this context-parallel rank · I inputs of one row · L routers of this rank's
chunk · k experts of a token · E experts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from slimectl.policies.megatron.batch import Batch
from slimectl.types import Row

KEPT_PASSES = 2
"""Recorded passes that are remembered: a round's own, and the one before for rollouts that waited."""

Routing = dict[bytes, list[Tensor]]
"""By row: for each chunk of this rank the experts [I, L, k] of its tokens, on the host."""


class RouterTap:
    """Stands where mcore asks its `router_replay` for the best experts of scores [N, E]."""

    def __init__(self) -> None:
        self.recorded: Tensor | None = None
        self.given: Tensor | None = None
        """Experts [N, k] for the next forward, -1 where the router chooses itself; None: it always does."""
        self._again: deque[Tensor | None] = deque()
        """Those of forwards that the backward pass will repeat, first come first served."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        given = self._due()
        values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if given is not None:
            experts = torch.where(given < 0, experts, given)
            values = scores.gather(1, experts)
        self.recorded = experts
        return values, experts

    def _due(self) -> Tensor | None:
        # Recomputation runs a layer once without gradients and again, in the same order, with them.
        if torch.is_grad_enabled():
            return self._again.popleft() if self._again else self.given
        self._again.append(self.given)
        return self.given

    def reset(self) -> None:
        self.recorded = self.given = None
        self._again.clear()


class RoutingReplay:
    """Records the routing of rows in one pass and gives it back in another, however those rows are packed and dealt.

    Routing that an engine reports (Sample.rollout_routed_experts, [I, all layers, k]) would enter as one more recorded
    pass, cut to this rank's layers; rows do not carry it yet.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.taps: list[list[RouterTap]] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = RouterTap()
            self.taps.append([router.router_replay for router in routers])
        self._passes: deque[Routing] = deque(maxlen=KEPT_PASSES)
        self._found: Routing = {}

    def record(self, rows: Sequence[Row], batch: Batch, chunk: int) -> None:
        """After the forward of a chunk: what its routers chose."""
        if not self.taps[chunk]:
            return
        experts_SLk = _whole(torch.stack([tap.recorded for tap in self.taps[chunk]], dim=1), batch).cpu()
        for i, (start, length) in zip(batch.members, _spans(rows, batch), strict=True):
            of_chunks = self._found.setdefault(key(rows[i]), [torch.empty(0)] * len(self.taps))
            of_chunks[chunk] = experts_SLk[start : start + length].to(torch.int16)

    def end(self, *, recorded: bool) -> None:
        """A run is over; all data-parallel ranks learn what each of them recorded in it."""
        self._reset()
        if not recorded:
            return
        group = parallel_state.get_data_parallel_group()
        parts: list[Routing] = [{} for _ in range(group.size())]
        dist.all_gather_object(parts, self._found, group=group)
        self._passes.append({name: routing for part in parts for name, routing in part.items()})
        self._found = {}

    def replay(self, rows: Sequence[Row], batch: Batch, chunk: int) -> None:
        """Ahead of the forward of a chunk: give its routers what was recorded of these rows; they choose for others."""
        if not self.taps[chunk]:
            return
        known = [self._recorded(rows[i]) for i in batch.members]
        if not any(known):
            for tap in self.taps[chunk]:
                tap.given = None
            return
        width = next(routing for routing in known if routing is not None)[chunk].shape[1:]
        experts_SLk = torch.full((batch.sequences.tokens, *width), -1, dtype=torch.long)
        for routing, (start, length) in zip(known, _spans(rows, batch), strict=True):
            if routing is not None:
                experts_SLk[start : start + length] = routing[chunk]
        mine_NLk = _mine(experts_SLk.to(batch.tokens_T.device), batch)
        for i, tap in enumerate(self.taps[chunk]):
            tap.given = mine_NLk[:, i]

    def _recorded(self, row: Row) -> list[Tensor] | None:
        """Of the latest pass that had the row."""
        name = key(row)
        return next((routing[name] for routing in reversed(self._passes) if name in routing), None)

    def _reset(self) -> None:
        for tap in (tap for taps in self.taps for tap in taps):
            tap.reset()


def key(row: Row) -> bytes:
    """What a row is known by: its routing depends on its tokens alone."""
    return hashlib.blake2b(array("q", row.tokens).tobytes(), digest_size=16).digest()


def _spans(rows: Sequence[Row], batch: Batch) -> list[tuple[int, int]]:
    """(first position, inputs) of each row in the pack."""
    lengths = [len(rows[i].tokens) - (rows[i].response_length > 0) for i in batch.members]
    return list(zip(batch.sequences.starts, lengths, strict=False))


def _whole(mine_NLk: Tensor, batch: Batch) -> Tensor:
    """Of all tensor- and context-parallel ranks' tokens, in the order of the pack."""
    mine_TLk = _gathered(mine_NLk, parallel_state.get_tensor_model_parallel_group())
    all_SLk = _gathered(mine_TLk, parallel_state.get_context_parallel_group())
    return all_SLk if batch.sequences.order_S is None else all_SLk[batch.sequences.order_S]


def _mine(experts_SLk: Tensor, batch: Batch) -> Tensor:
    held_TLk = experts_SLk[batch.sequences.index_T]
    group = parallel_state.get_tensor_model_parallel_group()
    return held_TLk.chunk(group.size())[group.rank()]


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
