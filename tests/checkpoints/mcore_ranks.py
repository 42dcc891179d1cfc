"""Processes of Megatron-core's own: they build its GPTModel, save and load it, without any code of slimectl.

    python -c 'import mcore_ranks, sys; mcore_ranks.start(*sys.argv[1:])' FOLDER RANKS CASES

CASES are {name: fields of TransformerConfig} as JSON. Not a script: mcore's writers would import all of it again.

For every case the tensor-parallel ranks fill a model with random numbers, save it as FOLDER/NAME/saved by mcore's
dist_checkpointing, and load FOLDER/NAME/given into another. Each rank's own tensors go to saved_RANK.pt and
loaded_RANK.pt beside them.
"""

from __future__ import annotations

import json
import os
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
        params_dtype=torch.bfloat16,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=64, position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def fill(model: GPTModel, rank: int) -> None:
    """Random numbers: the ranks' own where they hold parts, the same where they hold copies."""
    own = torch.Generator().manual_seed(rank + 1)
    same = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        generator = own if getattr(parameter, "tensor_model_parallel", False) else same
        parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()


def tensors(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def main(folder: Path, rank: int, ranks: int, cases: dict[str, dict[str, Any]]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, expert_tensor_parallel_size=ranks)
    for name, fields in cases.items():
        model = model_of(fields, ranks)
        fill(model, rank)
        if rank == 0:
            (folder / name / "saved").mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), str(folder / name / "saved"))
        torch.save(tensors(model), folder / name / f"saved_{rank}.pt")
        for value in tensors(model).values():
            value.fill_(torch.nan)
        # Under "model", as Megatron-LM does: the iteration and the like come beside it.
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / name / "given"))
        assert loaded["checkpoint_version"] == 3.0
        model.load_state_dict(loaded["model"])
        torch.save(tensors(model), folder / name / f"loaded_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def start(folder: str, ranks: str, cases: str) -> None:
    """Run every rank in a fork of this process, so that all import once, and exit with the number that failed."""
    children = []
    for rank in range(int(ranks)):
        children.append(os.fork())
        if children[-1] == 0:
            main(Path(folder), rank, int(ranks), json.loads(cases))
            sys.exit()  # not os._exit: mcore's writers end with the interpreter
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
