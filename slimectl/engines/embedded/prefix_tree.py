"""A radix tree of computed keys and values, so that prompts reuse the start of earlier prompts and responses.

In a model with delta nets, a prompt can start only where their state was kept: after an earlier prompt or response, and
where another prompt left an earlier text before.

L layers · K key-value heads · T tokens · D head dimension · k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slimectl.engines.embedded.states import State

MIN_TOKENS = 16
"""Shorter matches are recomputed, and shorter additions are not stored, because computing them is as fast."""

MERGE_RATIO = 4
"""New tokens are merged into their node unless it is this many times longer.

A long node would be copied at every turn.
"""

SHARED_BYTES = 1 << 20
"""Bytes per layer that a decoding step must save before sequences read a shared prefix in place."""


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow the parent's tokens, with their keys and values [L, 2, K, T, D] and optional experts.

    `end` is the position after the last token, and `state` the state of delta nets there, if it was kept. A node with
    `users` or children is never evicted. A detached node has left the tree, and its last user frees it.
    """

    tokens: tuple[int, ...]
    keys_values: Tensor
    end: int
    parent: Node | None
    experts_TLk: Tensor | None = None
    state: State | None = None
    children: dict[int, Node] = field(default_factory=dict)
    users: int = 0
    detached: bool = False

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    @property
    def bytes(self) -> int:
        parts = (self.keys_values, self.experts_TLk, self.state)
        return sum(part.nbytes for part in parts if part is not None)

    def path(self, start: int = 0) -> list[Node]:
        """Return the nodes from position `start` to this one. A node must begin at `start`."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.end > start:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """Nodes by their tokens, limited to `capacity` bytes. The least recently used nodes are evicted first.

    `state_bytes` is the size of a state of delta nets, or 0 in a model without them. The states of nodes that cannot be
    evicted may be dropped.
    """

    def __init__(self, *, capacity: int, token_bytes: int, layers: int, state_bytes: int = 0) -> None:
        self.bytes = 0
        self.capacity = capacity
        self._token_bytes = token_bytes
        self._layers = layers
        self._state_bytes = state_bytes
        self._roots: dict[int, Node] = {}
        self._recent: dict[Node, None] = {}  # least recently used first, descendants before their ancestors

    def __len__(self) -> int:
        return len(self._recent)

    def matched(self, tokens: tuple[int, ...]) -> int:
        """Return how many leading tokens a prompt can take from the tree, or 0 if they are too few."""
        _, length = self._reusable(tokens)
        return length if length >= MIN_TOKENS else 0

    def match(self, tokens: tuple[int, ...]) -> Node | None:
        """Return the last node of the longest reusable prefix of `tokens`, or None if it is too short."""
        node, length = self._reusable(tokens)
        if node is None or length < MIN_TOKENS:
            return None
        node = self._split(node, length)
        self._touch(node)
        return node

    def fork(self, tokens: tuple[int, ...]) -> int:
        """Return where `tokens` leave the stored texts, if a state is worth keeping there and fits. Otherwise 0."""
        node, length = self._walk(tokens)
        if not self._state_bytes or length - self._reusable(tokens)[1] < MIN_TOKENS:
            return 0
        return length if self._make_room(self._state_bytes, keep=node) else 0

    def insert(
        self,
        tokens: tuple[int, ...],
        keys_values: Callable[[int], Tensor],
        experts: Callable[[int], Tensor | None] = lambda position: None,
        state: Callable[[], State | None] = lambda: None,
    ) -> Node | None:
        """Store the part of `tokens` that is not in the tree. Return None if it is too short or does not fit.

        `keys_values(position)` returns a new tensor [L, 2, K, T, D] for the tokens from this position on, and
        `experts(position)` likewise [T, L, k]. `state()` returns the state after the tokens.
        """
        node, length = self._walk(tokens)
        missing, new = len(tokens) - length, len(tokens) - self._reusable(tokens)[1]
        size = missing * self._token_bytes + (self._state_bytes if new else 0)
        fits = new >= MIN_TOKENS and self._make_room(size, keep=node)
        if not fits and (node is None or missing):
            return None
        node = None if node is None else self._split(node, length)
        if node is None or missing:
            node = self._append(node, tokens[length:], keys_values(length), experts(length))
        if fits and (kept := state()) is not None:
            node.state = kept
            self.bytes += kept.nbytes
        self._touch(node)
        return node

    def shared(self, node: Node | None, sequences: int) -> Node | None:
        """Return the last node of the prefix that sequences should read in place instead of copying it to their slots.

        `sequences` counts the sequences that start with the whole path of `node`. At a fork, each branch counts as one.
        """
        while node is not None:
            readers = max(sequences, len(node.children))
            if (readers - 1) * node.end * self._token_bytes >= SHARED_BYTES * self._layers:
                return node
            node = node.parent
        return None

    def use(self, node: Node | None) -> None:
        """Keep a node and its path until `release`."""
        if node is not None:
            node.users += 1

    def release(self, node: Node | None) -> None:
        if node is not None:
            node.users -= 1
        while node is not None and node.detached and _is_free(node):
            self._remove(node)
            node = node.parent

    def clear(self) -> None:
        """Drop every node, because the weights changed. Nodes in use stay readable until they are released."""
        self._roots = {}
        for node in list(self._recent):
            node.detached = True
            self._drop_state(node)
            if _is_free(node):
                self._remove(node)

    def _walk(self, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """Return the last node of the stored prefix of `tokens`, and the prefix length."""
        node, length, children = None, 0, self._roots
        while length < len(tokens) and (child := children.get(tokens[length])) is not None:
            common = _common(child.tokens, tokens[length : length + len(child.tokens)])
            node, length, children = child, length + common, child.children
            if common < len(child.tokens):
                break
        return node, length

    def _reusable(self, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """Return the last node of the prefix of `tokens` that a prompt can start with, and the prefix length."""
        node, length = self._walk(tokens)
        if self._state_bytes:
            while node is not None and (node.end > length or node.state is None):
                node = node.parent
            length = 0 if node is None else node.end
        return node, length

    def _split(self, node: Node, position: int) -> Node:
        """Split `node` at a position and return the node that ends there. Users of `node` keep both parts.

        A state stays with the lower part.
        """
        if position == node.end:
            return node
        at = position - node.start
        # Copies, because views of one storage could not be freed separately.
        parts = node.keys_values.tensor_split([at], dim=3)
        head, tail = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        upper = Node(node.tokens[:at], head, position, node.parent, children={node.tokens[at]: node})
        if node.experts_TLk is not None:
            upper.experts_TLk, node.experts_TLk = node.experts_TLk[:at].clone(), node.experts_TLk[at:].clone()
        self._siblings(node)[node.tokens[0]] = upper
        node.tokens, node.keys_values, node.parent = node.tokens[at:], tail, upper
        self._touch(node)
        return upper

    def _append(
        self, node: Node | None, tokens: tuple[int, ...], keys_values: Tensor, experts_TLk: Tensor | None
    ) -> Node:
        self.bytes += keys_values.nbytes + (0 if experts_TLk is None else experts_TLk.nbytes)
        is_longer = node is not None and len(node.tokens) > MERGE_RATIO * len(tokens)
        if node is not None and _is_free(node) and node.state is None and not is_longer:
            node.keys_values = torch.cat((node.keys_values, keys_values), 3)
            if node.experts_TLk is not None and experts_TLk is not None:
                node.experts_TLk = torch.cat((node.experts_TLk, experts_TLk))
            node.tokens += tokens
            node.end += len(tokens)
            return node
        start = 0 if node is None else node.end
        child = Node(tokens, keys_values, start + len(tokens), node, experts_TLk)
        self._siblings(child)[tokens[0]] = child
        return child

    def _make_room(self, size: int, *, keep: Node | None) -> bool:
        """Evict the least recently used nodes until `size` bytes fit."""
        if size > self.capacity:
            return False
        if self.bytes + size > self.capacity:
            for node in list(self._recent):
                if node is not keep and _is_free(node):
                    self._remove(node)
                elif node is not keep:
                    self._drop_state(node)
                if self.bytes + size <= self.capacity:
                    return True
        return self.bytes + size <= self.capacity

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self.bytes -= node.state.nbytes
            node.state = None

    def _remove(self, node: Node) -> None:
        siblings = self._siblings(node)
        if siblings.get(node.tokens[0]) is node:
            del siblings[node.tokens[0]]
        del self._recent[node]
        self.bytes -= node.bytes

    def _siblings(self, node: Node) -> dict[int, Node]:
        return self._roots if node.parent is None else node.parent.children

    def _touch(self, node: Node) -> None:
        for ancestor in reversed(node.path()):
            self._recent.pop(ancestor, None)
            self._recent[ancestor] = None


class CachedSpan(NamedTuple):
    """Keys and values [L, 2, K, T, D] of positions `start` to `end` that rows of a batch read in place."""

    keys_values: Tensor
    rows: slice | Tensor
    start: int
    end: int


def shared_spans(ends: Sequence[Node | None], *, device: torch.device) -> list[CachedSpan]:
    """Return the spans of a batch. `ends` has the last node that each row reads in place."""
    rows_of: dict[Node, list[int]] = {}
    for row, end in enumerate(ends):
        for node in [] if end is None else end.path():
            rows_of.setdefault(node, []).append(row)
    spans = []
    for node, rows in rows_of.items():
        adjacent = rows[-1] - rows[0] == len(rows) - 1
        index = slice(rows[0], rows[-1] + 1) if adjacent else torch.tensor(rows, device=device)
        spans.append(CachedSpan(node.keys_values, index, node.start, node.end))
    return spans


def _is_free(node: Node) -> bool:
    return not node.users and not node.children


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    if first == second:
        return len(first)
    pairs = zip(first, second, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second)))
