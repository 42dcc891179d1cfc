"""Whole Hugging Face tensors from all ranks' parts, and the other way: the links of weights/ over process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slimectl.errors import SettingsError
from slimectl.policies.megatron.masters import Master
from slimectl.policies.megatron.naming import EMBEDDING
from slimectl.weights.links import Link

Read = Callable[[str], Tensor]


class LinkedState:
    """Masters and moments of all ranks, by link.

    `held` are this rank's masters by global name, `copy` the last stage's of a tied embedding. Every rank makes the
    same calls: a whole tensor is gathered over data and tensor ranks, then sent to all from the first rank that has it.
    """

    def __init__(
        self, links: Sequence[Link], held: dict[str, Master], copy: Master | None, device: torch.device
    ) -> None:
        self.links, self.held, self.copy, self.device = links, held, copy, device
        self.of_name = {name: link for link in links for name in link.hf}
        self.embedding = next(link.hf[0] for link in links if link.megatron == EMBEDDING)
        mine = [i for i, link in enumerate(links) if link.megatron in held]
        everyones: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, mine)
        self.source: dict[str, int] = {}
        for rank in reversed(range(len(everyones))):
            self.source |= {links[i].megatron: rank for i in everyones[rank]}

    def whole(self, link: Link, what: str) -> Tensor:
        """The whole parameter, or its moment, in float32 on every rank."""
        master = self.held.get(link.megatron)
        tensor = None if master is None else _joined(link, master.read(what).float())
        if dist.get_world_size() == 1:
            assert tensor is not None
            return tensor
        if tensor is None or self.source[link.megatron] != dist.get_rank():
            tensor = torch.empty(_padded_shape(link), dtype=torch.float32, device=self.device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self.source[link.megatron])
        return tensor

    def tensors(self, names: Iterable[str], what: str) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) in the order of `names`.

        A link is gathered once; what belongs to later names is kept until their turn.
        """
        waiting: dict[str, Tensor] = {}
        for name in names:
            # A head that the checkpoint stores although it is tied.
            key = name if name in self.of_name else self.embedding
            if key not in waiting:
                link = self.of_name[key]
                waiting |= link.to_hf(self.whole(link, what))
            yield name, waiting.pop(key)

    def each(self, links: Iterable[Link], whats: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """("what.Hugging Face name", whole tensor), link by link."""
        for link in links:
            for what in whats:
                for name, tensor in link.to_hf(self.whole(link, what)):
                    yield f"{what}.{name}", tensor

    def mine(self, links: Iterable[Link]) -> list[Link]:
        """Those of the links of which this rank holds something."""
        return [link for link in links if self._takers(link)]

    def put(self, link: Link, what: str, read: Read, *, updates: int = 0) -> None:
        """This rank's part of a parameter or moment; `read(name)` gives a Hugging Face tensor."""
        takers = self._takers(link)
        if takers:
            whole = _padded(link, link.to_megatron([read(name).to(self.device, torch.float32) for name in link.hf]))
            part = _shard(link, whole)
            for master in takers:
                master.write(what, part, updates=updates)

    def _takers(self, link: Link) -> list[Master]:
        held = self.held.get(link.megatron)
        copies = [self.copy] if self.copy is not None and link.megatron == EMBEDDING else []
        return [*([held] if held is not None else []), *copies]


def trained_links(links: Sequence[Link], names: set[str]) -> set[str]:
    """Megatron names of the parameters whose Hugging Face names are in `names`.

    Raises SettingsError for a parameter that is both: Megatron fuses query, key and value, and gate and up.
    """
    chosen = set()
    for link in links:
        inside = [name for name in link.hf if name in names]
        if inside and len(inside) < len(link.hf):
            outside = next(name for name in link.hf if name not in names)
            raise SettingsError(
                f"train.freeze_params_name_list: {outside} is frozen and {inside[0]} is not, but Megatron keeps them"
                " in one matrix; freeze both or neither"
            )
        if inside:
            chosen.add(link.megatron)
    return chosen


def group_of(link: Link) -> dist.ProcessGroup:
    """The ranks that `link.split` cuts the parameter for."""
    if link.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _joined(link: Link, part: Tensor) -> Tensor:
    group = group_of(link)
    if link.split is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return link.split.joined(parts)


def _shard(link: Link, whole: Tensor) -> Tensor:
    group = group_of(link)
    return whole if link.split is None else link.split.shard(whole, group.rank(), group.size())


def _padded_shape(link: Link) -> tuple[int, ...]:
    if not link.padded:
        return link.shape
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return (-(-link.shape[0] // ranks) * ranks, *link.shape[1:])


def _padded(link: Link, whole: Tensor) -> Tensor:
    shape = _padded_shape(link)
    if tuple(whole.shape) == shape:
        return whole
    return torch.cat([whole, whole.new_zeros(shape[0] - whole.shape[0], *shape[1:])])
