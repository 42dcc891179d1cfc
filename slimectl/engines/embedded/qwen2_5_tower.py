"""The vision tower of Qwen2.5-VL: RMSNorm, gated MLPs, and window attention in most blocks.

P patches · C cells of merge by merge patches (one token each) · W values of a patch · E width of the tower · H heads ·
D head dimension · O width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.architectures.image_tokens import Grid
from slimectl.engines.embedded.linear import Linear
from slimectl.engines.embedded.vision import Features, NewLinear, NewTensor, attend, rotary_angles, rotated
from slimectl.errors import CheckpointError

EPS = 1e-6
"""Epsilon of the norms. It is not in config.json."""


@dataclass(slots=True)
class Block:
    """The weights of one block."""

    norm1_E: Tensor
    qkv: Linear
    proj: Linear
    norm2_E: Tensor
    gate_up: Linear
    down: Linear


class WindowedTower:
    """Storage of the tower's weights and its forward pass."""

    def __init__(self, config: Any, prefix: str, *, tensor: NewTensor, linear: NewLinear) -> None:
        """Allocate named storage with `tensor` and `linear`, as Weights does. Names begin with `prefix`.

        Raises CheckpointError for an unsupported activation.
        """
        if config.hidden_act != "silu":
            raise CheckpointError(
                f"config.json: the embedded engine does not support hidden_act {config.hidden_act!r} in a vision tower"
            )
        width, inner = config.hidden_size, config.intermediate_size
        self._heads, self._merge = int(config.num_heads), int(config.spatial_merge_size)
        self._window = max(1, int(config.window_size) // self._merge // int(config.patch_size))
        self._whole = frozenset(config.fullatt_block_indexes)
        patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._embedding = tensor(f"{prefix}patch_embed.proj.weight", width, *patch)
        self._blocks = []
        for index in range(config.depth):
            name = f"{prefix}blocks.{index}."
            self._blocks.append(
                Block(
                    norm1_E=tensor(f"{name}norm1.weight", width),
                    qkv=linear(width, {f"{name}attn.qkv": 3 * width}, bias=True),
                    proj=linear(width, {f"{name}attn.proj": width}, bias=True),
                    norm2_E=tensor(f"{name}norm2.weight", width),
                    gate_up=linear(width, {f"{name}mlp.gate_proj": inner, f"{name}mlp.up_proj": inner}, bias=True),
                    down=linear(inner, {f"{name}mlp.down_proj": width}, bias=True),
                )
            )
        cell = width * self._merge**2
        self._merger_norm_E = tensor(f"{prefix}merger.ln_q.weight", width)
        self._merger_up = linear(cell, {f"{prefix}merger.mlp.0": cell}, bias=True)
        self._merger_down = linear(cell, {f"{prefix}merger.mlp.2": config.out_hidden_size}, bias=True)

    def embed(self, pixels_PW: Tensor, grids: Sequence[Grid]) -> Features:
        """Return the features of every cell of all images, image by image, row by row."""
        order_C, images, windows = _attention_order(grids, merge=self._merge, window=self._window)
        device, cell = pixels_PW.device, self._merge**2
        order = torch.from_numpy(order_C).to(device)
        stream_PE = F.linear(pixels_PW, self._embedding.flatten(1))
        width = stream_PE.shape[1]
        stream_PE = stream_PE.view(-1, cell, width)[order].view(-1, width)
        head = width // self._heads
        angles_P = torch.from_numpy(rotary_angles(grids, merge=self._merge, head=head)).to(device)
        angles_PD = angles_P.view(-1, cell, head // 2)[order].view(-1, head // 2).repeat(1, 2)
        cos_P1D, sin_P1D = angles_PD.cos()[:, None], angles_PD.sin()[:, None]
        inner = self._blocks[0].gate_up.outputs // 2 if self._blocks else 0
        for index, block in enumerate(self._blocks):
            lengths = images if index in self._whole else windows
            qkv_P3HD = block.qkv(_norm(stream_PE, block.norm1_E)).view(-1, 3, self._heads, head)
            query, key = (rotated(qkv_P3HD[:, part], cos_P1D, sin_P1D) for part in (0, 1))
            attended = attend(query, key, qkv_P3HD[:, 2], lengths)
            stream_PE = stream_PE + block.proj(attended.reshape(-1, width))
            gate_up = block.gate_up(_norm(stream_PE, block.norm2_E))
            stream_PE = stream_PE + block.down(F.silu(gate_up[:, :inner]) * gate_up[:, inner:])
        cells_CE = _norm(stream_PE, self._merger_norm_E).view(-1, cell * width)
        embeddings_CO = self._merger_down(F.gelu(self._merger_up(cells_CE)))
        return Features(torch.empty_like(embeddings_CO).index_copy_(0, order, embeddings_CO))


def _norm(stream_PE: Tensor, weight_E: Tensor) -> Tensor:
    return F.rms_norm(stream_PE, weight_E.shape, weight_E, EPS)


def _attention_order(grids: Sequence[Grid], *, merge: int, window: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Return the cells in window order, and the number of patches in each frame and in each window.

    >>> order, frames, windows = _attention_order([(1, 4, 6)], merge=2, window=2)
    >>> order.tolist(), frames, windows
    ([0, 1, 3, 4, 2, 5], [24], [16, 8])
    """
    orders, frames, windows = [], list[int](), list[int]()
    first = 0
    for count, height, width in grids:
        rows, columns = height // merge, width // merge
        frame, row, column = np.indices((count, rows, columns)).reshape(3, -1)
        across = -(-columns // window)
        number = (frame * -(-rows // window) + row // window) * across + column // window
        orders.append(first + np.lexsort((column, row, number)))
        frames += [height * width] * count
        windows += (np.unique(number, return_counts=True)[1] * merge**2).tolist()
        first += count * rows * columns
    return np.concatenate(orders), frames, windows
