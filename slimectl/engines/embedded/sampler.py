"""Samples tokens and their log-probabilities from logits.

B rows · V vocabulary · W window of the likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.engines.embedded.batch import Batch

SMALLEST = torch.finfo(torch.float32).tiny
"""Lower bound of a token's probability, so that the log of a drawn token stays finite after an underflow."""

WINDOW = 1024
"""Number of likeliest tokens that are examined before the whole vocabulary is sorted."""


def sampled(logits_BV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sample one token per row [B]; also returns its log_softmax(logits / temperature) [B], float32.

    Tokens are drawn by inverting the cumulative distribution: one pass over the vocabulary and one random number per
    row, so that a row's token is independent of other rows. Filters restrict the tokens that can be drawn, and never
    change the log-probability.
    """
    if batch.temperature_B1 is not None:
        logits_BV = logits_BV.float() / batch.temperature_B1
    probs_BV = torch.softmax(logits_BV, -1, dtype=torch.float32)
    drawable_BV = _filter(_mask_banned(logits_BV, probs_BV, batch), batch)
    if batch.all_greedy:
        tokens_B1 = drawable_BV.argmax(-1, keepdim=True)
    else:
        tokens_B1 = _draw(drawable_BV, batch.uniforms_B1())
        if batch.greedy_B1 is not None:
            tokens_B1 = torch.where(batch.greedy_B1, drawable_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1.squeeze(1), probs_BV.gather(1, tokens_B1).clamp_(min=SMALLEST).log_().squeeze(1)


def _mask_banned(logits_BV: Tensor, probs_BV: Tensor, batch: Batch) -> Tensor:
    """Return the probabilities without the tokens that a row may not draw yet, even if no other token was likely."""
    banned = batch.banned()
    if banned is None:
        return probs_BV
    allowed_BV = logits_BV.clone()
    allowed_BV[banned] = float("-inf")
    return torch.softmax(allowed_BV, -1, dtype=torch.float32)


def _draw(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u times the total."""
    # A parallel float32 scan (CUDA) need not be monotone; on the CPU sums are carried in float64 already.
    exact = torch.float64 if weights_BV.is_cuda else torch.float32
    cumulative_BV = weights_BV.cumsum(-1, dtype=exact)
    tokens_B1 = torch.searchsorted(cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:], right=True)
    return tokens_B1.clamp_(max=weights_BV.shape[1] - 1)  # beyond the end only where the weights are not numbers


def _filter(probs_BV: Tensor, batch: Batch) -> Tensor:
    """Set the probabilities of filtered tokens to zero; returns the same tensor if no row has a filter."""
    if batch.top_k_B1 is None and batch.top_p_B1 is None and batch.min_p_B1 is None:
        return probs_BV
    rows, vocabulary = probs_BV.shape
    full = torch.ones(rows, 1, device=probs_BV.device)
    return _filter_rows(
        probs_BV,
        top_k_B1=full * vocabulary if batch.top_k_B1 is None else batch.top_k_B1,
        top_p_B1=full if batch.top_p_B1 is None else batch.top_p_B1,
        min_p_B1=full * 0 if batch.min_p_B1 is None else batch.min_p_B1,
        window=min(WINDOW, vocabulary),
    )


def _filter_rows(probs_BV: Tensor, *, top_k_B1: Tensor, top_p_B1: Tensor, min_p_B1: Tensor, window: int) -> Tensor:
    """Apply top-k, then top-p of the remaining tokens, then min-p relative to the likeliest; zeros elsewhere.

    Rows without a filter stay bit-identical. If `window` tokens do not decide a row, its whole vocabulary is sorted.
    """
    vocabulary = probs_BV.shape[1]
    sorted_BW, order_BW = probs_BV.topk(window)
    within_k_BW = torch.arange(window, device=probs_BV.device) < top_k_B1
    cumulative_BW = (sorted_BW * within_k_BW).cumsum(-1)
    total_B1 = torch.where(top_k_B1 <= window, cumulative_BW[:, -1:], probs_BV.sum(-1, keepdim=True))
    keep_BW = within_k_BW & (sorted_BW >= min_p_B1 * sorted_BW[:, :1])
    keep_BW &= (cumulative_BW - sorted_BW < top_p_B1 * total_B1) | (top_p_B1 >= 1)
    filtered_BV = torch.zeros_like(probs_BV).scatter_(1, order_BW, sorted_BW * keep_BW)
    free_B1 = (top_k_B1 >= vocabulary) & (top_p_B1 >= 1) & (min_p_B1 <= 0)
    filtered_BV = torch.where(free_B1, probs_BV, filtered_BV)
    if window == vocabulary:
        return filtered_BV
    # The last of the window survived: there may be more behind it. top_k beyond the window needs its total, too.
    unsettled_B = ((keep_BW[:, -1:] & (top_k_B1 > window)) | ((top_k_B1 > window) & (top_k_B1 < vocabulary))) & ~free_B1
    rows = unsettled_B.squeeze(1).nonzero().squeeze(1)
    if rows.numel():
        filtered_BV[rows] = _filter_rows(
            probs_BV[rows],
            top_k_B1=top_k_B1[rows],
            top_p_B1=top_p_B1[rows],
            min_p_B1=min_p_B1[rows],
            window=vocabulary,
        )
    return filtered_BV
