"""Log-probabilities by a transformers model's own head: scales, soft caps and biases of its logits included.

C states of a chunk · U states · Q pairs of a state and a token that it predicts · V vocabulary · H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.architectures.causal_model import CausalModel
from slimectl.policies import lm_head
from slimectl.policies.pack_plan import Predictions
from slimectl.policies.recompute import recomputed


def own_log_probs(
    model: CausalModel, hidden_UH: Tensor, predictions: Predictions, options: lm_head.HeadOptions
) -> lm_head.HeadOutputs:
    """Return outputs [R] as `predicted_log_probs` does, in chunks of states.

    Chunks after the first KEPT_LOGITS logits are recomputed in backward.
    """
    entropy, divergence, teacher = options.entropy, options.divergence, options.teacher
    if not len(predictions.targets_Q):
        # Still a function of the head's parameters, so that backward reaches every rank's collectives.
        blank = model.logits(hidden_UH.new_zeros(1, hidden_UH.shape[1])).sum() * 0.0
        empty_Q = hidden_UH.sum(1).float() + blank.float()
        return lm_head.HeadOutputs(empty_Q, empty_Q if entropy else None, None if teacher is None else empty_Q)

    def of_chunk(C: slice, row_Q: Tensor, targets_Q: Tensor) -> lm_head.HeadOutputs:
        log_p_CV = torch.log_softmax(lm_head.scaled(model.logits(hidden_UH[C]), options.temperature), dim=1)
        entropy_C = -(log_p_CV.exp() * log_p_CV).sum(1) if entropy else None
        divergence_C = None
        if teacher is not None and divergence is not None:
            divergence_C = divergence.terms(log_p_CV, teacher.log_p(C)[0]).sum(1)
        return lm_head.HeadOutputs(log_p_CV[row_Q, targets_Q], entropy_C, divergence_C)

    vocabulary, chunk = _chunk(model)
    outputs: list[lm_head.HeadOutputs] = []
    for C, pairs, row_Q in lm_head.chunks(len(hidden_UH), chunk, predictions.state_Q, hidden_UH.device):
        is_kept = (C.start + chunk) * vocabulary <= lm_head.KEPT_LOGITS
        compute = of_chunk if is_kept else recomputed(of_chunk)
        outputs.append(compute(C, row_Q, predictions.targets_Q[pairs]))
    logprobs, *parts = zip(*outputs, strict=True)
    entropy_U, divergence_U = (None if part[0] is None else torch.cat(part) for part in parts)
    joined = lm_head.HeadOutputs(torch.cat(logprobs), entropy_U, divergence_U)
    return lm_head.expanded(joined, predictions, divergence)


def own_top_log_probs(model: CausalModel, hidden_UH: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of every state and their log-probabilities as `linear_top_log_probs` does."""

    def log_p(hidden_CH: Tensor) -> Tensor:
        return torch.log_softmax(lm_head.scaled(model.logits(hidden_CH), temperature), dim=1)

    return lm_head.top_in_chunks(log_p, hidden_UH, k, _chunk(model)[1])


def _chunk(model: CausalModel) -> tuple[int, int]:
    """Return the size of the vocabulary, and the number of states whose logits are computed at once."""
    vocabulary = int(model.hf.get_output_embeddings().weight.shape[0])
    return vocabulary, max(1, lm_head.CHUNK_LOGITS // vocabulary)
