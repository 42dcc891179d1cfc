"""Layers with a state along the sequence in packs: delta nets, state-space models, short convolutions.

transformers' modules compute every row from its first token on. The only new computation is the torch version of the
gated delta rule and of its convolution, for rows of any length without padding. Where flash-linear-attention and
causal-conv1d are installed, transformers' modules use these.

T input tokens · N tokens of the rows one after the other · H hidden width, or heads · W channels · S taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimectl.algorithms.gated_delta import causal_convolution, gated_delta_rule, l2_normalize
from slimectl.policies.fsdp.packed_batch import PackedBatch
from slimectl.policies.recompute import recomputed


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that have a state along the sequence, and no other input than hidden states.

    They have a convolution. MiniMax's linear attention has only decays.
    """
    return [
        module
        for module in layer.modules()
        if hasattr(module, "slope_rate") or any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


class PackedMixers:
    """Makes the mixers of a model's layers compute packs.

    A mixer computes shared tokens once for each row that has them. The rest of a layer computes them once.
    """

    def __init__(self, layers: Iterable[nn.Module], *, recompute: bool) -> None:
        """`recompute`: whether backward recomputes the delta rule."""
        self.batch: PackedBatch | None = None
        """The pack of the next forward. Recomputation runs the same forward again while the same pack is set."""
        self._rule = recomputed(self._delta_rule) if recompute else self._delta_rule
        for i, layer in enumerate(layers):
            mixers = mixers_of(layer)
            for mixer in mixers:
                knows_rows = hasattr(mixer, "chunk_gated_delta_rule") and hasattr(mixer, "causal_conv1d_fn")
                mixer.forward = self._mixing(i, self._joined(mixer) if knows_rows else self._padded(mixer))
            if mixers:
                # Some decoders (Falcon-H1) do not pass on the arguments of attention functions.
                layer.register_forward_pre_hook(self._with_layout, with_kwargs=True)

    def _with_layout(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"layout": self._current()}

    def _current(self) -> PackedBatch:
        assert self.batch is not None
        return self.batch

    def _mixing(self, layer: int, of_rows: Callable[[Tensor], Any]) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            self._current().mixed_layers.add(layer)
            return of_rows(hidden_states[0])

        return forward

    def _padded(self, mixer: Any) -> Callable[[Tensor], Any]:
        """Return the forward of a mixer on rows that are padded at their end, where a causal mixer ignores it."""
        forward = mixer.forward
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        required = {p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}

        def of_rows(states_TH: Tensor) -> Any:
            rows = self._current().padded_rows
            with _buffers_as(states_TH.dtype, mixer):
                results = [forward(block_BLH, **required) for block_BLH in rows.gather(states_TH)]
            if isinstance(results[0], tuple):
                return rows.outputs([result[0] for result in results])[None], None
            return rows.outputs(results)[None]

        return of_rows

    def _joined(self, mixer: Any) -> Callable[[Tensor], Tensor]:
        """Return the forward of a gated delta net on rows one after the other, by kernels that know where rows start.

        transformers (5.12) falls back to torch functions that do not, so they are replaced.
        """
        forward = mixer.forward
        if mixer.causal_conv1d_fn is None:
            mixer.causal_conv1d_fn = self._convolution
        if mixer.chunk_gated_delta_rule.__module__ == type(mixer).__module__:
            mixer.chunk_gated_delta_rule = self._rule

        def of_rows(states_TH: Tensor) -> Tensor:
            rows = self._current().joined_rows
            [block_1NH] = rows.gather(states_TH)
            return rows.outputs([forward(block_1NH, **rows.kernel_arguments)])[None]

        return of_rows

    def _convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """causal_conv1d.causal_conv1d_fn: `x` [1, W, N], `weight` [W, S], `activation` silu."""
        assert bias is None
        assert activation == "silu"
        convolved_NW = causal_convolution(x[0].t(), weight, self._current().joined_rows.positions_N)
        return F.silu(convolved_NW).t()[None]

    def _delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """fla.ops.gated_delta_rule.chunk_gated_delta_rule: `query`, `key`, `value` [1, N, H, D], the rest [1, N, H]."""
        q, k = (l2_normalize(part[0].float()) for part in (query, key))
        output_NHD, _state = gated_delta_rule(
            q * q.shape[-1] ** -0.5, k, value[0].float(), g[0].float(), beta[0].float(),
            self._current().joined_rows.chunks,
        )  # fmt: skip
        return output_NHD.to(query.dtype)[None], None


@contextmanager
def _buffers_as(dtype: torch.dtype, module: nn.Module) -> Iterator[None]:
    """Convert a module's own buffers within the block. Falcon-H1 and MiniMax multiply states by them."""
    buffers = module._buffers
    module._buffers = {
        name: buffer.to(dtype) if buffer is not None and buffer.is_floating_point() else buffer
        for name, buffer in buffers.items()
    }
    try:
        yield
    finally:
        module._buffers = buffers
