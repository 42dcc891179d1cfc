"""The vision tower of a planned model: parameters, activations that a trained one saves, FLOPs.

E width of the tower · F columns of its MLPs · M width of a merged cell · W values of a patch · c bytes of an element. A
token of an image is a cell of merge by merge patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimectl.architectures.config import Config
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.planner.workload import Figure, Run, counted, parameters

DEFAULTS: dict[str, Any] = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
"""Values of transformers for what a vision_config leaves out; tests/planner/test_vision_tower.py compares them."""


@dataclass(frozen=True)
class VisionTower:
    """The shape of Qwen2.5-VL's tower: RMSNorms, attention within windows or images, gated MLPs with biases."""

    blocks: int
    global_blocks: int
    """Blocks whose patches attend to all of their image; those of the others attend within a window."""
    width: int
    inner: int
    heads: int
    merge: int
    patch_values: int
    window_patches: int
    output: int

    @classmethod
    def of(cls, config: Config) -> VisionTower | None:
        """Return the tower of a complete configuration; None for a model whose images are not read."""
        if config.get("model_type") not in MODEL_TYPES or "vision_config" not in config:
            return None
        vision = DEFAULTS | config["vision_config"]
        merge, patch = vision["spatial_merge_size"], vision["patch_size"]
        return cls(
            blocks=vision["depth"],
            global_blocks=len({index for index in vision["fullatt_block_indexes"] if index < vision["depth"]}),
            width=vision["hidden_size"],
            inner=vision["intermediate_size"],
            heads=vision["num_heads"],
            merge=merge,
            patch_values=vision["in_channels"] * vision["temporal_patch_size"] * patch**2,
            window_patches=(max(1, vision["window_size"] // merge // patch) * merge) ** 2,
            output=vision["out_hidden_size"],
        )

    @property
    def cell(self) -> int:
        """Width M of a cell before it is merged."""
        return int(self.width * self.merge**2)

    @property
    def block_parameters(self) -> int:
        E, F = self.width, self.inner
        return 2 * E + (E + 1) * 3 * E + (E + 1) * E + 2 * (E + 1) * F + (F + 1) * E

    @property
    def parameters(self) -> int:
        """Parameters of the patch embedding, the blocks and the merger."""
        M = self.cell
        merger = self.width + (M + 1) * M + (M + 1) * self.output
        return self.patch_values * self.width + self.blocks * self.block_parameters + merger

    def image_flops(self, tokens: int, *, trained: bool) -> Figure:
        """FLOPs of an image of so many tokens; the backward pass of a frozen tower is not computed.

        The patch embedding and the blocks multiply every patch, the merger every cell. A patch attends to its window,
        in global blocks to the whole image, before and after it.
        """
        patches, passes = tokens * self.merge**2, 6 if trained else 2
        merger = (self.cell + 1) * (self.cell + self.output)
        spans = self.global_blocks * patches + (self.blocks - self.global_blocks) * min(self.window_patches, patches)
        per_patch = self.patch_values * self.width + self.blocks * self.block_parameters
        products = patches * per_patch + tokens * merger
        pairs = patches * 2 * self.width * spans
        formula = (
            f"{passes} x ({patches:,} patches x {parameters(per_patch)} + {tokens:,} tokens x {parameters(merger)}"
            f" parameters + pairs of patches {counted(pairs)})"
        )
        return Figure("FLOPs per image", passes * (products + pairs), "FLOP", formula)

    def activations(self, run: Run, *, trained: bool) -> Figure:
        """Pixels of a pack's images, and what a trained tower saves for backward.

        What a frozen tower computes with is freed before the decoder begins.
        """
        E, c = self.width, run.bytes
        patches = run.image_tokens * (run.tokens // run.seq_len) * self.merge**2
        per_patch, formula = c * self.patch_values, f"{patches:,} patches x (pixels c W {c * self.patch_values:,}"
        if trained:
            block = self._block_bytes(run) if run.recompute != "full" else c * E
            norm = (4 + 2 * c) * E + 4
            outer = 2 * 4 * E // self.heads + norm + 2 * c * E
            per_patch += self.blocks * block + outer
            formula += f" + {self.blocks} blocks x {counted(block)} + rotary angles and merger {counted(outer)}"
        return Figure("vision activations", patches * per_patch, "bytes", f"{formula}) bytes")

    def _block_bytes(self, run: Run) -> int:
        """Bytes per patch that a block saves: two norms, attention with its fused projection, and the gated MLP."""
        E, c = self.width, run.bytes
        return 2 * ((4 + 2 * c) * E + 4) + 7 * c * E + 4 * self.heads + 4 * c * self.inner
