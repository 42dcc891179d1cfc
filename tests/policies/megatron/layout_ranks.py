"""What every rank process of test_model_layouts does: lay a model out, train one step, compare with Hugging Face.

T tokens that this rank holds · V vocabulary · H hidden width.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from model_cases import Reference, load, loss_of, loss_weights, parameters_of, share
from rank_cases import release_graph
from torch import Tensor

from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.policies.megatron import parallel
from slimectl.policies.megatron.batch import PackedSequences, packed
from slimectl.policies.megatron.model import PackedGPT, build
from slimectl.policies.megatron.parallel import parallel_state
from slimectl.policies.options import MegatronOptions, TrainerOptions
from slimectl.policies.recompute import Recompute

CPU = torch.device("cpu")
PER_BATCH = 2
"""Sequences of a micro-batch."""

Trial = tuple[str, ParallelLayout, Recompute]


def run(folder: Path, trials: Sequence[Trial]) -> None:
    """Every trial in turn; those of one layout share its groups."""
    trials = sorted(trials, key=lambda trial: str(trial[1]))
    for layout, of_layout in itertools.groupby(trials, key=lambda trial: trial[1]):
        parallel.start(layout, seed=1)
        for name, _, recompute in of_layout:
            try:
                _compare(torch.load(folder / f"{name}.pt", weights_only=False), layout, recompute)
            except Exception as error:
                error.add_note(f"{name} {layout} {recompute}, rank {dist.get_rank()}")
                raise
        gc.collect()  # references of the models keep the groups, and they their threads
        parallel.stop()


def _compare(hf: Reference, layout: ParallelLayout, recompute: Recompute) -> None:
    architecture = family_of(hf.config).architecture(hf.config)
    parallel.check(layout, architecture, dist.get_world_size())
    chunks = build(architecture, TrainerOptions(recompute=recompute), MegatronOptions(layout=layout))
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    load(chunks, hf, layout)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk).train() for chunk in chunks]
    worst = _step(wrapped, hf, layout)
    assert worst < 1e-5, f"logits differ by {worst}"
    _compare_gradients(chunks, hf, layout)
    for chunk in chunks:
        release_graph(chunk)


def _step(wrapped: list[Any], hf: Reference, layout: ParallelLayout) -> float:
    """One step over this rank's micro-batches; the largest difference of a logit on the last stage."""
    data = parallel_state.get_data_parallel_rank()
    batches = [range(i, i + PER_BATCH) for i in range(0, len(hf.tokens), PER_BATCH)]
    mine = batches[data :: parallel_state.get_data_parallel_world_size()]
    differences = [0.0]

    def forward_step(batches: Iterator[range], model: Any) -> tuple[Tensor, Any]:
        rows = next(batches)
        row = packed(
            [len(hf.tokens[i]) for i in rows], layout, rank=parallel_state.get_context_parallel_rank(), device=CPU
        )
        source_T = _sources(hf, rows, row)
        tokens_T = torch.where(source_T >= 0, hf.tokens_T[source_T], 0)
        return model(tokens_T, row), partial(loss, model=model.module, source_T=source_T)

    def loss(hidden: Tensor, *, model: PackedGPT, source_T: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        shards, _ = model.output_layer(hidden, weight=model.output_weight)
        logits_TV = gather_from_tensor_model_parallel_region(shards)[:, 0, : hf.logits_TV.shape[1]]
        real_T = source_T >= 0
        differences.append((logits_TV - hf.logits_TV[source_T])[real_T].abs().max().item())
        weights_TV = loss_weights(len(hf.logits_TV))[source_T] * real_T[:, None]
        # No tokens counted: the gradients stay sums.
        return loss_of(logits_TV, weights_TV), torch.tensor(0, dtype=torch.int), {}

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(mine) for _ in wrapped] if len(wrapped) > 1 else iter(mine),
        model=wrapped if len(wrapped) > 1 else wrapped[0], num_microbatches=len(mine), seq_length=1,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return max(differences)


def _sources(hf: Reference, rows: range, row: PackedSequences) -> Tensor:
    """Position among all of the reference's tokens of each token that this rank holds; -1 for padding."""
    first = [0]
    for tokens in hf.tokens:
        first.append(first[-1] + len(tokens))
    source_S = torch.full((row.tokens,), -1)
    for i, start in zip(rows, row.starts, strict=True):
        source_S[start : start + len(hf.tokens[i])] = torch.arange(first[i], first[i + 1])
    return source_S[row.index_T]


def _compare_gradients(chunks: list[PackedGPT], hf: Reference, layout: ParallelLayout) -> None:
    links = {link.megatron: link for link in hf.links}
    expected = hf.megatron(hf.gradients)
    for name, parameter in parameters_of(chunks):
        if isinstance(parameter, torch.nn.Parameter):
            # The last stage's copy of a tied embedding goes by the embedding's name.
            name = name if name in links else "embedding.word_embeddings.weight"
            wanted = share(links[name], expected[name], layout)
            gradient = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
            gap = (gradient - wanted).norm()
            assert gap <= 1e-5 * expected[name].norm() + 1e-9, f"{name}: off by {gap / wanted.norm()}"
