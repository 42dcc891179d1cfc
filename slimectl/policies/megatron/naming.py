"""Global names of the parameters that this rank holds."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.core import parallel_state
from torch import Tensor

from slimectl.policies.megatron.model import PackedGPT

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def held(chunks: Sequence[PackedGPT]) -> dict[str, Tensor]:
    """Parameters and buffers by the names of weights.Link: layers and experts counted over the whole model.

    The last stage's copy of a tied embedding is not included: see `tied_copy`.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name != HEAD or not chunk.share_embeddings_and_output_weights:
                tensors[global_name(name, chunk)] = tensor
    return tensors


def tied_copy(chunks: Sequence[PackedGPT]) -> Tensor | None:
    """Return the head that copies the embedding of another pipeline stage; None if this rank has none."""
    last = chunks[-1]
    if last.post_process and last.share_embeddings_and_output_weights and not last.pre_process:
        return last.output_layer.weight
    return None


def global_name(name: str, chunk: PackedGPT) -> str:
    """Name in the whole model of the tensor that this rank's `chunk` calls `name`."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    number = chunk.decoder.layers[int(layer[2])].layer_number - 1
    name = f"{layer[1]}{number}{layer[3]}"
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    first = parallel_state.get_expert_model_parallel_rank() * (
        chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    return f"{expert[1]}{first + int(expert[2])}{expert[3]}"
