"""Samples tokens and their log-probabilities from logits.

B rows · V vocabulary · W likeliest tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.engines.embedded.logit_adjustments import adjustments
from slimectl.engines.embedded.scheduler import RunningSequence
from slimectl.types import SamplingParams, TopTokens

SMALLEST = torch.finfo(torch.float32).tiny
"""Lower bound of a token's probability, so that its log stays finite after an underflow."""

BLOCK, BLOCKS = 128, 32
"""Block size for drawing a block before a token, and the number of blocks from which that is faster."""

WINDOW = 1024
"""Number of likeliest tokens to examine before sorting the whole vocabulary."""


class Sampled(NamedTuple):
    """Tokens of a step, their float32 log_softmax(logits / temperature), and the N likeliest tokens of each row."""

    tokens_B: Tensor
    log_probs_B: Tensor
    top_ids_BN: Tensor | None = None
    top_log_probs_BN: Tensor | None = None

    def top_tokens(self) -> list[TopTokens]:
        """Return the likeliest tokens of each row, or empty lists if no row requests them."""
        if self.top_ids_BN is None or self.top_log_probs_BN is None:
            return [[]] * len(self.tokens_B)
        rows = zip(self.top_ids_BN.tolist(), self.top_log_probs_BN.tolist(), strict=True)
        return [list(zip(ids, log_probs, strict=True)) for ids, log_probs in rows]


def sample_tokens(logits_BV: Tensor, batch: SamplingBatch) -> Sampled:
    """Sample one token per row.

    Tokens are drawn by inverting the cumulative distribution. This takes one pass over the vocabulary and one random
    number per row, so that a row's token does not depend on other rows. Filters and grammars restrict which tokens can
    be drawn but do not change log-probabilities. Penalties and biases do.
    """
    if batch.adjustments is not None:
        logits_BV = batch.adjustments.apply(logits_BV)
    if batch.temperature_B1 is not None:
        logits_BV = logits_BV.float() / batch.temperature_B1
    probs_BV = torch.softmax(logits_BV, -1, dtype=torch.float32)
    drawable_BV = _filter(_mask_excluded(logits_BV, probs_BV, batch), batch)
    if batch.all_greedy:
        tokens_B1 = drawable_BV.argmax(-1, keepdim=True)
    else:
        tokens_B1 = _draw(drawable_BV, batch.uniforms_B1())
        if batch.greedy_B1 is not None:
            tokens_B1 = torch.where(batch.greedy_B1, drawable_BV.argmax(-1, keepdim=True), tokens_B1)
    sampled = Sampled(tokens_B1.squeeze(1), _log(probs_BV.gather(1, tokens_B1)).squeeze(1))
    if not batch.top_count:
        return sampled
    top_BN = probs_BV.topk(min(batch.top_count, probs_BV.shape[1]))
    return sampled._replace(top_ids_BN=top_BN.indices, top_log_probs_BN=_log(top_BN.values))


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=SMALLEST).log_()


def _mask_excluded(logits_BV: Tensor, probs_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the probabilities renormalized over the tokens that each row may draw.

    Excluded are end tokens before the minimum length, and tokens that the grammar does not allow at this position.
    """
    banned = batch.banned()
    if banned is None and not batch.grammars:
        return probs_BV
    allowed_BV = logits_BV.clone()
    if banned is not None:
        allowed_BV[banned] = float("-inf")
    for row, grammar in batch.grammars:
        allowed_BV[row].masked_fill_(~grammar.mask_V(), float("-inf"))
    return torch.softmax(allowed_BV, -1, dtype=torch.float32)


def _draw(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u times the total."""
    if weights_BV.device.type == "cpu" and weights_BV.shape[1] >= BLOCKS * BLOCK and weights_BV.shape[1] % BLOCK == 0:
        return _draw_by_block(weights_BV, uniforms_B1)
    # A parallel float32 scan (CUDA) may not be monotone. On the CPU, sums are already accumulated in float64.
    exact = torch.float64 if weights_BV.is_cuda else torch.float32
    cumulative_BV = weights_BV.cumsum(-1, dtype=exact)
    tokens_B1 = torch.searchsorted(cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:], right=True)
    return tokens_B1.clamp_(max=weights_BV.shape[1] - 1)  # beyond the end only if the weights are NaN


def _draw_by_block(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Draw a block of tokens by its sum, then a token in it. A scan of the whole vocabulary is not vectorized."""
    rows, vocabulary = weights_BV.shape
    blocks_BNK = weights_BV.reshape(rows, -1, BLOCK)
    ends_BN = blocks_BNK.sum(-1).cumsum(-1)
    wanted_B1 = uniforms_B1 * ends_BN[:, -1:]
    block_B1 = torch.searchsorted(ends_BN, wanted_B1, right=True).clamp_(max=ends_BN.shape[1] - 1)
    scan_BK = blocks_BNK.gather(1, block_B1[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    rest_B1 = wanted_B1 - F.pad(ends_BN, (1, 0)).gather(1, block_B1)
    # Rounding must not lead past the first or last token of the block with a nonzero weight.
    rest_B1 = torch.minimum(rest_B1.clamp_(min=0), scan_BK[:, -1:] * (1 - 2.0**-23))
    token_B1 = block_B1 * BLOCK + torch.searchsorted(scan_BK, rest_B1, right=True)
    return token_B1.clamp_(max=vocabulary - 1)


def _filter(probs_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """Set the probabilities of filtered tokens to zero. Return the same tensor if no row has a filter."""
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
    """Apply top-k, then top-p to the remaining tokens, then min-p relative to the likeliest. Zero the rest.

    Rows without a filter stay bit-identical. If the `window` likeliest tokens do not settle a row, its whole vocabulary
    is sorted.
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
    # If the last token of the window is kept, later ones may be, too. top_k beyond the window also needs its total.
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


Array = np.ndarray[Any, np.dtype[Any]]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingBatch:
    """Model inputs and sampling parameters, one row per sequence."""

    def __init__(self, sequences: list[RunningSequence], *, device: torch.device, vocabulary: int) -> None:
        self.sequences = sequences
        self._device = device
        state_BC = np.array([_state(sequence) for sequence in sequences])
        self.tokens_B, self.positions_B = torch.from_numpy(state_BC[:, :2].T.copy()).to(device)
        self.longest = int(state_BC[:, 1].max()) + 1  # in tokens, including the one that this step feeds
        offsets_B = np.array([sequence.offset for sequence in sequences])
        self.offsets_B = torch.from_numpy(offsets_B).to(device) if offsets_B.any() else None
        self.longest_slot = int((state_BC[:, 1] - offsets_B).max()) + 1
        shifts_B = np.array([sequence.rope_shift for sequence in sequences])
        self.rope_shift_B = torch.from_numpy(shifts_B).to(device) if shifts_B.any() else None
        self._drawn_B, self._seeds_B = state_BC[:, 2].astype(np.uint64), _mix_bits(state_BC[:, 3].astype(np.uint64))
        self._steps_to_ban = int((state_BC[:, 4] - state_BC[:, 2]).max())
        knobs_BC = np.array([_sampling_values(sequence.params) for sequence in sequences], dtype=np.float32)
        knobs_BC[(knobs_BC[:, 1] <= 0) | (knobs_BC[:, 1] > vocabulary), 1] = vocabulary
        greedy_B = knobs_BC[:, 0] == 0
        self.all_greedy = bool(greedy_B.all())
        knobs_BC[greedy_B, 0] = 1.0
        self.greedy_B1 = self._column(greedy_B, neutral=False)
        self.temperature_B1 = self._column(knobs_BC[:, 0], neutral=1.0)
        self.top_k_B1 = self._column(knobs_BC[:, 1], neutral=vocabulary)
        self.top_p_B1 = self._column(knobs_BC[:, 2], neutral=1.0)
        self.min_p_B1 = self._column(knobs_BC[:, 3], neutral=0.0)
        self.top_count = max(sequence.top_count for sequence in sequences)
        self.adjustments = adjustments(sequences, device=device, vocabulary=vocabulary)
        self.grammars = [(row, each.grammar) for row, each in enumerate(sequences) if each.grammar is not None]

    def _column(self, values_B: Array, *, neutral: float) -> Tensor | None:
        """Return a column with one value per row, or None if all rows have the neutral value."""
        if (values_B == neutral).all():
            return None
        return torch.from_numpy(values_B.copy()).to(self._device).unsqueeze(1)

    def advance(self, tokens_B: Tensor) -> None:
        """Make the sampled tokens the next step's inputs."""
        self.tokens_B = tokens_B
        self.positions_B += 1
        self.longest += 1
        self.longest_slot += 1
        self._drawn_B += np.uint64(1)
        self._steps_to_ban -= 1
        if self.adjustments is not None:
            self.adjustments.advance(tokens_B)

    def banned(self) -> tuple[Tensor, Tensor] | None:
        """Return the index pairs (row, token) of the end tokens that may not be drawn yet."""
        if self._steps_to_ban <= 0:
            return None
        pairs = [
            (row, token)
            for row, sequence in enumerate(self.sequences)
            if len(sequence.tokens) < sequence.params.min_tokens
            for token in sequence.end_tokens
        ]
        if not pairs:
            return None
        rows, tokens = torch.tensor(pairs, device=self._device).unbind(1)
        return rows, tokens

    def uniforms_B1(self) -> Tensor:
        """Return a number in [0, 1) for each row. It depends only on the row's seed and number of drawn tokens."""
        bits = _mix_bits(self._seeds_B + GOLDEN * (self._drawn_B + np.uint64(1)))
        # With 24 bits, a value times a total near 1 is exact enough in float32 to stay below the total.
        values = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(values).to(self._device).unsqueeze(1)


def _state(sequence: RunningSequence) -> tuple[int, int, int, int, int]:
    """Return the last token, its position, the number of drawn tokens, the seed, and the minimum number of tokens."""
    tokens = sequence.tokens
    drawn = len(tokens)
    last = tokens[-1] if tokens else sequence.prompt[-1]
    return last, len(sequence.prompt) + drawn - 1, drawn, sequence.seed, sequence.params.min_tokens


def _sampling_values(params: SamplingParams) -> tuple[float, float, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


def _mix_bits(state: Array) -> Array:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014), which decorrelates neighbouring counters."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = state ^ (state >> np.uint64(31))
    return mixed
