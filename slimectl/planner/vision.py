"""The vision tower of a planned model: parameters, activations that a trained one saves, FLOPs.

E width of the tower · F columns of its MLPs · M width of a merged cell · W values of a patch · c bytes of an element. A
token of an image is a cell of merge by merge patches.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.architectures.config import Config
from slimectl.architectures.registry import tower_of
from slimectl.planner.workload import Figure, Run, counted, parameters


@dataclass(frozen=True)
class VisionTower:
    """The shape of a tower: norms, attention within windows or images, MLPs with biases.

    Qwen2.5-VL's has RMSNorms and gated MLPs, Qwen3-VL's LayerNorms, plain MLPs, learned positions and several mergers.
    """

    blocks: int
    global_blocks: int
    """Blocks whose patches attend to the whole image. In the other blocks, they attend within a window."""
    is_gated: bool
    """Whether it has gated MLPs and RMSNorms. Otherwise LayerNorms and the patch embedding have biases."""
    width: int
    inner: int
    heads: int
    merge: int
    patch_values: int
    window_patches: int
    output: int
    positions: int
    """Number of learned positions, or 0."""
    deepstack: int
    """Further mergers, behind blocks before the last one, each with a norm over a whole cell."""

    @classmethod
    def of(cls, config: Config) -> VisionTower | None:
        """Return the tower of a complete configuration, or None for a model whose images are not read."""
        tower = tower_of(config.get("model_type"))
        if tower is None or "vision_config" not in config:
            return None
        vision = {**tower.defaults, **config["vision_config"]}
        merge, patch, depth = vision["spatial_merge_size"], vision["patch_size"], vision["depth"]
        window = vision.get("window_size")  # None: all blocks attend to whole images
        return cls(
            blocks=depth,
            global_blocks=depth if window is None else len({i for i in vision["fullatt_block_indexes"] if i < depth}),
            is_gated=tower.gated,
            width=vision["hidden_size"],
            inner=vision["intermediate_size"],
            heads=vision["num_heads"],
            merge=merge,
            patch_values=vision["in_channels"] * vision["temporal_patch_size"] * patch**2,
            window_patches=0 if window is None else (max(1, window // merge // patch) * merge) ** 2,
            output=vision["out_hidden_size"],
            positions=vision.get("num_position_embeddings", 0),
            deepstack=len(vision.get("deepstack_visual_indexes", ())),
        )

    @property
    def cell(self) -> int:
        """Width M of a cell before it is merged."""
        return int(self.width * self.merge**2)

    @property
    def block_parameters(self) -> int:
        E, F = self.width, self.inner
        mlp = (E + 1) * F * (2 if self.is_gated else 1) + (F + 1) * E
        return 2 * self._norm(E) + (E + 1) * 3 * E + (E + 1) * E + mlp

    @property
    def merger_parameters(self) -> int:
        """Parameters of a merger's two layers."""
        return (self.cell + 1) * (self.cell + self.output)

    @property
    def parameters(self) -> int:
        """Parameters of the patch embedding, the blocks and the mergers."""
        E, M = self.width, self.cell
        embedding = (self.patch_values + (0 if self.is_gated else 1) + self.positions) * E
        mergers = self._norm(E) + self.deepstack * self._norm(M) + (1 + self.deepstack) * self.merger_parameters
        return embedding + self.blocks * self.block_parameters + mergers

    def _norm(self, width: int) -> int:
        return width if self.is_gated else 2 * width

    def image_flops(self, tokens: int, *, trained: bool) -> Figure:
        """FLOPs of an image of so many tokens. The backward pass of a frozen tower is not computed.

        The patch embedding and the blocks multiply every patch, the mergers every cell. A patch attends to its window,
        in global blocks to the whole image, before and after it.
        """
        patches, passes = tokens * self.merge**2, 6 if trained else 2
        merger = (1 + self.deepstack) * self.merger_parameters
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

        The tensors of a frozen tower are freed before the decoder begins.
        """
        E, c = self.width, run.bytes
        patches = run.image_tokens * (run.tokens // run.seq_len) * self.merge**2
        per_patch, formula = c * self.patch_values, f"{patches:,} patches x (pixels c W {c * self.patch_values:,}"
        if trained:
            block = self._block_bytes(run) if run.recompute != "full" else c * E
            outer = 2 * 4 * E // self.heads + self._norm_bytes(run) + 2 * c * E
            name = "rotary angles and merger"
            if self.positions:  # indices of four neighbours in the table, and their weights
                outer += 4 * (8 + 4) + self.deepstack * 3 * c * E
                name = "angles, positions and mergers"
            per_patch += self.blocks * block + outer
            formula += f" + {self.blocks} blocks x {counted(block)} + {name} {counted(outer)}"
        return Figure("vision activations", patches * per_patch, "bytes", f"{formula}) bytes")

    def _block_bytes(self, run: Run) -> int:
        """Bytes per patch that a block saves: two norms, attention with its fused projection, and the MLP."""
        E, c = self.width, run.bytes
        mlp = (4 if self.is_gated else 2) * c * self.inner
        return 2 * self._norm_bytes(run) + 7 * c * E + 4 * self.heads + mlp

    def _norm_bytes(self, run: Run) -> int:
        """Bytes per patch that a norm saves, with its output: an RMSNorm computes in float32."""
        E, c = self.width, run.bytes
        return (4 + 2 * c) * E + 4 if self.is_gated else 2 * c * E + 8
