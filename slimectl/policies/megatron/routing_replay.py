"""Routing replay: a token is routed to the experts of the pass that computed its old log-probability.

Without it, a mixture of experts routes differently in the two passes (other kernels, an update in between), and the
ratio of their probabilities reflects routers more than the policy. Zheng et al. 2025, arXiv:2507.18071, section 5.3.

S tokens of the whole pack · T tokens of this context-parallel rank · I inputs of one row · L routers of this rank's
chunk · k experts of a token · E experts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from slimectl.algorithms.packing import Pack, tokens_of
from slimectl.data.routed_experts import routing_marks
from slimectl.policies.megatron.batch import MicroBatch
from slimectl.policies.pack_plan import plan_pack
from slimectl.policies.routed_experts import RoutingShape
from slimectl.types import TrainingSample

Value = TypeVar("Value")

KEPT_PASSES = 2
"""Number of recorded passes in memory: the current round's, and the previous one for rollouts that waited."""

Routing = dict[bytes, list[Tensor]]
"""Routing by row: the experts [I, L, k] of its tokens for each chunk of this rank, on the host."""


class RouterRecorder:
    """Implements mcore's `router_replay`: selects the top experts of scores [N, E], or replays recorded ones."""

    def __init__(self) -> None:
        self.recorded: Any = None
        self.given: Tensor | None = None
        """Experts [N, k] for the next forward, -1 where the router selects. None if it selects all."""
        self._recompute_queue: deque[Tensor | None] = deque()
        """Experts of forwards that the backward pass will recompute, in order (FIFO)."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        forced = self._next_replay()
        values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if forced is not None:
            experts = torch.where(forced < 0, experts, forced)
            values = scores.gather(1, experts)
        self.recorded = experts
        return values, experts

    def _next_replay(self) -> Tensor | None:
        # Recomputation runs a layer once without gradients and again, in the same order, with them.
        if torch.is_grad_enabled():
            return self._recompute_queue.popleft() if self._recompute_queue else self.given
        self._recompute_queue.append(self.given)
        return self.given

    def reset(self) -> None:
        self.recorded = self.given = None
        self._recompute_queue.clear()


class RoutingReplay:
    """Records the routing of rows in one pass and replays it in another, independent of packing and data ranks."""

    records = True
    """Whether passes without gradients are recorded. Otherwise the routing is also replayed in them."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.taps: list[list[RouterRecorder]] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = RouterRecorder()
            self.taps.append([router.router_replay for router in routers])
        self._passes: deque[Routing] = deque(maxlen=KEPT_PASSES)
        self._current_pass: Routing = {}
        self._computed: deque[dict[bytes, np.ndarray]] = deque(maxlen=KEPT_PASSES)
        """For every pass, by row: numbers of the tokens [I] that were computed for it. Rows share computed tokens."""
        self._numbers: dict[bytes, np.ndarray] = {}
        self._tokens = 0

    def marks(self, rows: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return numbers for each row's input tokens. Equal numbers mean the same computed token.

        The routing itself cannot be compared, because another pipeline stage holds the routing of its own layers.
        """
        computed = [self._latest(self._computed, key(row)) for row in rows]
        return [
            np.zeros(row.input_length, dtype=np.uint64) if numbers is None else numbers
            for row, numbers in zip(rows, computed, strict=True)
        ]

    def begin(self, rows: Sequence[TrainingSample], packs_by_rank: Sequence[Sequence[Pack]]) -> None:
        """Begin a recorded pass: number the tokens that all data-parallel ranks compute in it."""
        numbers: dict[bytes, np.ndarray] = {}
        for pack in (pack for packs in packs_by_rank for pack in packs):
            plan = plan_pack(rows, pack)
            for row, path in zip(plan.rows, plan.paths, strict=True):
                numbers[key(row)] = (path + self._tokens + 1).astype(np.uint64)
            self._tokens += tokens_of(pack)
        self._numbers = numbers

    def record(self, batch: MicroBatch, chunk: int) -> None:
        """Record the experts that the routers of a chunk selected. Call it after the forward."""
        if not self.taps[chunk]:
            return
        experts_SLk = _gather_pack(torch.stack([tap.recorded for tap in self.taps[chunk]], dim=1), batch).cpu()
        for row, path in zip(batch.plan.rows, batch.paths, strict=True):
            by_chunk = self._current_pass.setdefault(key(row), [torch.empty(0)] * len(self.taps))
            by_chunk[chunk] = experts_SLk[torch.from_numpy(path)].to(torch.int16)

    def end(self, *, recorded: bool) -> None:
        """End a run: exchange the recorded routing between all data-parallel ranks."""
        self._reset()
        if not recorded:
            return
        group = parallel_state.get_data_parallel_group()
        parts: list[Routing] = [{} for _ in range(group.size())]
        dist.all_gather_object(parts, self._current_pass, group=group)
        self._passes.append({name: routing for part in parts for name, routing in part.items()})
        self._computed.append(self._numbers)
        self._current_pass, self._numbers = {}, {}

    def replay(self, batch: MicroBatch, chunk: int) -> None:
        """Set the recorded experts of these rows for the routers of a chunk. Call it before the forward.

        Routers select the experts of rows without a record.
        """
        if not self.taps[chunk]:
            return
        routings = [self._routing(row) for row in batch.plan.rows]
        if not any(routings):
            for tap in self.taps[chunk]:
                tap.given = None
            return
        width = next(routing for routing in routings if routing is not None)[chunk].shape[1:]
        experts_SLk = torch.full((batch.sequences.tokens, *width), -1, dtype=torch.long)
        for routing, path in zip(routings, batch.paths, strict=True):
            if routing is not None:
                experts_SLk[torch.from_numpy(path)] = routing[chunk].long()
        local_NLk = _local_tokens(experts_SLk.to(batch.tokens_T.device), batch)
        for i, tap in enumerate(self.taps[chunk]):
            tap.given = local_NLk[:, i]

    def check(self, rows: Sequence[TrainingSample]) -> None:
        """Check the rows of a run on every rank, before any of them computes. Raises RecordError."""

    def _routing(self, row: TrainingSample) -> list[Tensor] | None:
        """Return the routing of the row in the latest pass that contains it: experts [I, L, k] for each chunk."""
        return self._latest(self._passes, key(row))

    @staticmethod
    def _latest(passes: Sequence[dict[bytes, Value]], name: bytes) -> Value | None:
        return next((routing[name] for routing in reversed(passes) if name in routing), None)

    def _reset(self) -> None:
        for tap in (tap for taps in self.taps for tap in taps):
            tap.reset()


class RolloutRoutingReplay(RoutingReplay):
    """Replays the engine's routing, which rows carry for all layers, in every pass.

    Ma et al. 2025, arXiv:2510.11370.
    """

    records = False

    def __init__(self, chunks: Sequence[nn.Module], shape: RoutingShape) -> None:
        super().__init__(chunks)
        self.shape = shape
        self.layers = [
            [int(module.layer_number or 0) - 1 for module in chunk.modules() if isinstance(module, TopKRouter)]
            for chunk in chunks
        ]
        """Indices in the whole model of each chunk's layers with routers."""

    def check(self, rows: Sequence[TrainingSample]) -> None:
        self.shape.check(rows)

    def marks(self, rows: Sequence[TrainingSample]) -> list[np.ndarray]:
        return routing_marks(rows)

    def _routing(self, row: TrainingSample) -> list[Tensor] | None:
        experts_ILk = self.shape.of_row(row)
        return [experts_ILk[:, layers] for layers in self.layers]


def key(row: TrainingSample) -> bytes:
    """Return a hash of a row's tokens, which determine its routing."""
    return hashlib.blake2b(array("q", row.tokens).tobytes(), digest_size=16).digest()


def _gather_pack(local_NLk: Tensor, batch: MicroBatch) -> Tensor:
    """Gather the experts of all tensor- and context-parallel ranks' tokens, in the order of the pack."""
    rank_TLk = _all_gather(local_NLk, parallel_state.get_tensor_model_parallel_group())
    all_SLk = _all_gather(rank_TLk, parallel_state.get_context_parallel_group())
    return all_SLk if batch.sequences.order_S is None else all_SLk[batch.sequences.order_S]


def _local_tokens(experts_SLk: Tensor, batch: MicroBatch) -> Tensor:
    rank_TLk = experts_SLk[batch.sequences.index_T]
    group = parallel_state.get_tensor_model_parallel_group()
    return rank_TLk.chunk(group.size())[group.rank()]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
