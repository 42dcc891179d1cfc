"""A process of Megatron-core's own: builds its GPTModel and saves or loads it, without any code of slimectl.

    python mcore_rank.py save|load FOLDER RANK RANKS FIELDS      FIELDS: fields of TransformerConfig as JSON

`save` fills the model with numbers of a seed that the parameter's place in the whole model decides and writes
FOLDER/checkpoint; `load` reads FOLDER/checkpoint and writes what it holds to FOLDER/loaded.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

PADDED = 128
"""Rows of the embedding; the vocabulary of the tests' models is smaller."""

if not torch.cuda.is_available():
    # Saving waits for a GPU and counts failures on it, whether there is one or not.
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")


def model_of(fields: dict[str, Any], ranks: int) -> GPTModel:
    config = TransformerConfig(
        **fields,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        params_dtype=torch.bfloat16,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=64, position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def main(what: str, folder: Path, rank: int, ranks: int, fields: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model = model_of(fields, ranks)
    checkpoint = folder / "checkpoint"
    if what == "save":
        generator = torch.Generator().manual_seed(rank)
        for parameter in model.parameters():
            replicated = not getattr(parameter, "tensor_model_parallel", False)
            source = torch.Generator().manual_seed(parameter.numel()) if replicated else generator
            parameter.data = torch.randn(parameter.shape, generator=source).bfloat16()
        if rank == 0:
            checkpoint.mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(checkpoint))
        torch.save(dict(model.state_dict()), folder / f"saved_{rank}.pt")
    else:
        for parameter in model.parameters():
            parameter.data = torch.full(parameter.shape, torch.nan).bfloat16()
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(checkpoint))
        model.load_state_dict({key: value for key, value in loaded.items() if key in model.state_dict()})
        torch.save(dict(model.state_dict()), folder / f"loaded_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
