"""The gated delta rule of linear attention over packed sequences, in plain torch (Qwen3-Next, Qwen3.5).

Yang et al. 2024, arXiv:2412.06464. T tokens · H value heads · K key width · V value width · N chunks of all sequences
C tokens of a chunk · B sequences · W channels · S taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

CHUNK = 64
"""Maximum chunk length: tokens of one triangular solve."""


class Chunks:
    """The division of concatenated sequences into chunks, and the order in which their states are computed.

    First comes the first chunk of every sequence, then the second chunk of each sequence that has one, and so on, with
    the longest sequences first. All lengths are at least 1.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        size = min(CHUNK, max(lengths))
        starts = list(accumulate(lengths, initial=0))
        longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        places: list[list[int]] = []
        turns: list[list[int]] = [[] for _ in range(-(-max(lengths) // size))]
        for sequence in longest_first:
            for turn, first in zip(turns, range(0, lengths[sequence], size), strict=False):
                turn.append(len(places))
                start, count = starts[sequence] + first, min(size, lengths[sequence] - first)
                places.append([*range(start, start + count), *([-1] * (size - count))])
        self.places_NC = torch.tensor(places, device=device)
        """Place of each token of each chunk among the concatenated tokens. Padding at the end of a sequence is -1."""
        self.turns = [torch.tensor(turn, device=device) for turn in turns]
        self.sequences_B = torch.tensor(longest_first, device=device)
        """The sequences in the order of their states."""
        ordered_NC = self.places_NC[torch.cat(self.turns)]
        is_real_NC = ordered_NC >= 0
        self.rows_T = torch.empty(sum(lengths), dtype=torch.long, device=device)
        """Where the output of each token is among the outputs of the chunks in order of computation."""
        self.rows_T[ordered_NC[is_real_NC]] = is_real_NC.flatten().nonzero()[:, 0]

    def gather(self, part_THW: Tensor) -> Tensor:
        """Gather tokens into chunks [N, H, C, W]. Padding is zero, which leaves the state unchanged."""
        chunks = part_THW[self.places_NC.clamp(min=0)] * (self.places_NC >= 0)[..., None, None]
        return chunks.transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    chunks: Chunks,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule: S_t = e^g S_(t-1) + k_t β_t (v_t - k_t' e^g S_(t-1)), o_t = q_t' S_t.

    `query` and `key` are [T, H, K], `value` [T, H, V], `decay_TH` the g ≤ 0, all float32. `state_BHKV` has the states
    before the sequences, 0 by default. Returns [T, H, V] and the states after the sequences. Yang et al. 2024,
    arXiv:2412.06464, eq. 10.
    """
    q, k, v = (chunks.gather(part) for part in (query, key, value))
    g, beta = (chunks.gather(part[..., None])[..., 0] for part in (decay_TH, beta_TH))
    total = g.cumsum(-1)  # [N, H, C]
    decay_mask = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    # Updates of a chunk's tokens depend on updates of earlier tokens: a triangular system, solved for both right sides.
    system = (k * beta[..., None]) @ k.transpose(-1, -2) * decay_mask
    sides = torch.cat([v, k * total.exp()[..., None]], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system.tril(-1), sides, upper=False, unitriangular=True)
    value_update, key_cumdecay = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inner = q @ k.transpose(-1, -2) * decay_mask
    from_state = q * total.exp()[..., None]
    decayed_key = k * (total[..., -1:] - total).exp()[..., None]
    if state_BHKV is None:
        state = q.new_zeros(len(chunks.sequences_B), q.shape[1], q.shape[-1], v.shape[-1])
    else:
        state = state_BHKV[chunks.sequences_B]
    outputs, finished = [], []
    for turn in chunks.turns:
        finished.append(state[len(turn) :])
        state = state[: len(turn)]
        new = value_update[turn] - key_cumdecay[turn] @ state
        outputs.append(from_state[turn] @ state + inner[turn] @ new)
        state = state * total[turn][..., -1, None, None].exp() + decayed_key[turn].transpose(-1, -2) @ new
    after_BHKV = torch.cat([state, *reversed(finished)])[chunks.sequences_B.argsort()]
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.rows_T], after_BHKV


def causal_convolution(states_TW: Tensor, kernel_WS: Tensor, positions_T: Tensor) -> Tensor:
    """Apply a depthwise causal convolution: one kernel per channel over the last S tokens of its sequence."""
    output = states_TW * kernel_WS[:, -1]
    for back in range(1, kernel_WS.shape[1]):
        earlier = states_TW.roll(back, dims=0) * (positions_T >= back)[:, None]
        output = output + earlier * kernel_WS[:, -1 - back]
    return output


def l2_normalize(states: Tensor) -> Tensor:
    """Divide by the Euclidean norm of the last dimension."""
    return states * torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6)
