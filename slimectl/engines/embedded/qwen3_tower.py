"""The vision tower of Qwen3-VL: learned positions, attention within frames, and features from middle blocks.

P patches · C cells of merge by merge patches (one token each) · W values of a patch · E width of the tower · H heads ·
D head dimension · O width of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.architectures.image_tokens import Grid
from slimectl.engines.embedded.linear import Linear
from slimectl.engines.embedded.vision import (
    Features,
    NewLinear,
    NewTensor,
    attend,
    patch_places,
    rotary_angles,
    rotated,
)
from slimectl.errors import CheckpointError

EPS = 1e-6
"""Epsilon of the norms. It is not in config.json."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


class LayerNorm(NamedTuple):
    """Weight and bias of a norm."""

    weight_E: Tensor
    bias_E: Tensor

    def __call__(self, stream_PE: Tensor) -> Tensor:
        return F.layer_norm(stream_PE, self.weight_E.shape, self.weight_E, self.bias_E, EPS)


@dataclass(slots=True)
class Block:
    """The weights of one block."""

    norm1: LayerNorm
    qkv: Linear
    proj: Linear
    norm2: LayerNorm
    up: Linear
    down: Linear


@dataclass(slots=True)
class Merger:
    """Maps cells of patches [P, E] to the decoder's width [C, O]. `norm` applies to a patch, or to a whole cell."""

    norm: LayerNorm
    up: Linear
    down: Linear

    def __call__(self, stream_PE: Tensor) -> Tensor:
        cell = self.up.inputs
        normed_PE = self.norm(stream_PE.view(-1, self.norm.weight_E.shape[0]))
        return self.down(F.gelu(self.up(normed_PE.view(-1, cell))))


class DeepstackTower:
    """Storage of the tower's weights and its forward pass."""

    def __init__(self, config: Any, prefix: str, *, tensor: NewTensor, linear: NewLinear) -> None:
        """Allocate named storage with `tensor` and `linear`, as Weights does. Names begin with `prefix`.

        Raises CheckpointError for an unsupported activation.
        """
        if config.hidden_act not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: the embedded engine does not support hidden_act {config.hidden_act!r} in a vision tower."
                f" Supported: {', '.join(ACTIVATIONS)}"
            )
        self._activation = ACTIVATIONS[config.hidden_act]
        self._tensor, self._linear = tensor, linear
        width, self._merge = int(config.hidden_size), int(config.spatial_merge_size)
        self._width, self._heads = width, int(config.num_heads)
        patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patches = tensor(f"{prefix}patch_embed.proj.weight", width, *patch)
        self._patches_bias_E = tensor(f"{prefix}patch_embed.proj.bias", width)
        self._side = int(config.num_position_embeddings**0.5)
        self._positions_GE = tensor(f"{prefix}pos_embed.weight", config.num_position_embeddings, width)
        inner = int(config.intermediate_size)
        self._blocks = [self._block(f"{prefix}blocks.{index}.", inner) for index in range(config.depth)]
        self._merger = self._new_merger(f"{prefix}merger.", width, config.out_hidden_size)
        layers = list(config.deepstack_visual_indexes)
        mergers = [
            self._new_merger(f"{prefix}deepstack_merger_list.{i}.", width * self._merge**2, config.out_hidden_size)
            for i in range(len(layers))
        ]
        self._deepstack = {index: mergers[layers.index(index)] for index in range(config.depth) if index in layers}
        """Mergers, keyed by the index of the block whose output they read."""

    def embed(self, pixels_PW: Tensor, grids: Sequence[Grid]) -> Features:
        """Return the features of every cell of all images, image by image, row by row."""
        device, width = pixels_PW.device, self._width
        head = width // self._heads
        stream_PE = F.linear(pixels_PW, self._patches.flatten(1), self._patches_bias_E)
        stream_PE = stream_PE + self._positions(grids).to(stream_PE.dtype)
        angles_PD = torch.from_numpy(rotary_angles(grids, merge=self._merge, head=head)).to(device).repeat(1, 2)
        cos_P1D, sin_P1D = angles_PD.cos()[:, None], angles_PD.sin()[:, None]
        frames = [height * width for count, height, width in grids for _ in range(count)]
        deepstack = []
        for index, block in enumerate(self._blocks):
            qkv_P3HD = block.qkv(block.norm1(stream_PE)).view(-1, 3, self._heads, head)
            query, key = (rotated(qkv_P3HD[:, part], cos_P1D, sin_P1D) for part in (0, 1))
            attended = attend(query, key, qkv_P3HD[:, 2], frames)
            stream_PE = stream_PE + block.proj(attended.reshape(-1, width))
            stream_PE = stream_PE + block.down(self._activation(block.up(block.norm2(stream_PE))))
            if index in self._deepstack:
                deepstack.append(self._deepstack[index](stream_PE))
        return Features(self._merger(stream_PE), tuple(deepstack))

    def _positions(self, grids: Sequence[Grid]) -> Tensor:
        """Return learned positions [P, E], interpolated from a square table to the size of each image."""
        table_GE, last = self._positions_GE, self._side - 1
        pieces = []
        for (_, *sides), places_P2 in zip(grids, patch_places(grids, merge=self._merge), strict=True):
            axes = []
            for side, places_P in zip(sides, torch.from_numpy(places_P2).unbind(1), strict=True):
                exact_P = torch.linspace(0, last, side)[places_P]
                floor_P = exact_P.int()
                share_P = exact_P - floor_P
                axes.append(((floor_P, 1 - share_P), ((floor_P + 1).clamp(max=last), share_P)))
            rows, columns = axes
            corners = [(row * self._side + column, r * c) for row, r in rows for column, c in columns]
            pieces.append(
                torch.stack([
                    table_GE[index_P.to(table_GE.device)] * weight_P[:, None].to(table_GE.device)
                    for index_P, weight_P in corners
                ]).sum(0)
            )  # fmt: skip
        return torch.cat(pieces)

    def _block(self, name: str, inner: int) -> Block:
        width = self._width
        return Block(
            norm1=self._norm(f"{name}norm1", width),
            qkv=self._linear(width, {f"{name}attn.qkv": 3 * width}, bias=True),
            proj=self._linear(width, {f"{name}attn.proj": width}, bias=True),
            norm2=self._norm(f"{name}norm2", width),
            up=self._linear(width, {f"{name}mlp.linear_fc1": inner}, bias=True),
            down=self._linear(inner, {f"{name}mlp.linear_fc2": width}, bias=True),
        )

    def _new_merger(self, name: str, normed: int, output: int) -> Merger:
        cell = self._width * self._merge**2
        return Merger(
            norm=self._norm(f"{name}norm", normed),
            up=self._linear(cell, {f"{name}linear_fc1": cell}, bias=True),
            down=self._linear(cell, {f"{name}linear_fc2": output}, bias=True),
        )

    def _norm(self, name: str, width: int) -> LayerNorm:
        return LayerNorm(self._tensor(f"{name}.weight", width), self._tensor(f"{name}.bias", width))
