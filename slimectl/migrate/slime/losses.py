"""Slime's loss functions, computed by slimectl's own: divergences, clipped losses, returns, and sums over samples.

Custom loss functions get whole responses, so context parallelism does not split anything here.

T tokens · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimectl.algorithms.estimators import reinforce_returns
from slimectl.algorithms.kl import LOW_VAR_LIMIT, kl_estimate
from slimectl.algorithms.surrogates import clip_fraction, ppo_clip
from slimectl.algorithms.value_loss import generalized_advantages

Reduction = Callable[[Tensor], Tensor]


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Return an estimate of the KL divergence at each token: k1, k2, k3 or low_var_kl, as in `kl_estimate`.

    It is multiplied by the `importance_ratio`, which makes it unbiased off policy (arXiv:2512.02556), and then clamped
    for low_var_kl.
    """
    is_clamped = kl_loss_type == "low_var_kl"
    estimate_T = kl_estimate(log_probs.float(), log_probs_base.float(), "k3" if is_clamped else kl_loss_type)
    if importance_ratio is not None:
        estimate_T = importance_ratio * estimate_T
    return estimate_T.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT) if is_clamped else estimate_T


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate loss of each token, and 1.0 where it is clipped, as in `ppo_clip`.

    `ppo_kl` is the old log-probability minus the current one.
    """
    old_T = torch.zeros_like(ppo_kl)
    loss_T = ppo_clip(-ppo_kl, old_T, advantages, low=eps_clip, high=eps_clip_high, dual=eps_clip_c)
    return loss_T, clip_fraction(-ppo_kl, old_T, advantages, low=eps_clip, high=eps_clip_high)


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Return mean(old - current) of each sequence, repeated for each of its tokens (GSPO, arXiv:2507.18071, eq. 7)."""
    sequences = zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True)
    return torch.cat([_masked_mean(old - new, mask).expand_as(local) for new, old, local, mask in sequences])


def _masked_mean(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return (values_T * mask_T).sum() / mask_T.sum().clamp(min=1)


def get_grpo_returns(rewards: Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Return the reward of each sequence, repeated for each of its tokens."""
    return [torch.ones_like(kl_T) * reward for reward, kl_T in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Return the discounted returns of each sequence, as in `reinforce_returns` (REINFORCE++, arXiv:2501.03262)."""
    return [
        reinforce_returns(float(reward), kl_T, mask_T.to(kl_T), kl_coef=kl_coef, gamma=gamma)
        for reward, kl_T, mask_T in zip(rewards, kl, loss_masks, strict=True)
    ]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Return reward - kl_coef kl at each token. The rewards are already relative to their group."""
    return [reward - kl_coef * kl_T for reward, kl_T in zip(rewards, kl, strict=True)]


def get_advantages_and_returns(
    total_len: int, response_len: int, values: Tensor, rewards: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return generalized advantages and returns of one response, as in `generalized_advantages` (arXiv:1506.02438)."""
    mask_T = torch.ones_like(rewards)
    advantages_T = generalized_advantages(rewards, values, mask_T, gamma=gamma, lambd=lambd)
    return advantages_T, advantages_T + values


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return generalized advantages and returns of several responses."""
    rows = zip(total_lengths, response_lengths, values_list, rewards_list, strict=True)
    pairs = [get_advantages_and_returns(*row, gamma, lambd) for row in rows]
    return [advantages for advantages, _ in pairs], [returns for _, returns in pairs]


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any = None) -> Tensor:
    """Return the log-probability of each token under its logits [T, V], as [T, 1]."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None])


def compute_entropy_from_logits(logits: Tensor, process_group: Any = None) -> Tensor:
    """Return the entropy of each distribution, from logits [T, V]."""
    log_probs_TV = torch.log_softmax(logits.float(), dim=-1)
    return -(log_probs_TV.exp() * log_probs_TV).sum(-1)


def calculate_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, tp_group: Any = None, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability [T, 1] of each token and, on request, the entropy [T] of its distribution."""
    return compute_log_probs(logits, tokens), compute_entropy_from_logits(logits) if with_entropy else None


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Any = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return log-probabilities and entropies of the responses, a tensor [T] for each.

    The `logits` have a row for each response token, divided by the temperature, as in a custom loss.
    Raises ValueError if the number of rows differs.
    """
    logits_TV = logits.squeeze(0) if logits.dim() == 3 else logits
    if len(logits_TV) != sum(response_lengths):
        raise ValueError(f"logits have {len(logits_TV)} rows for {sum(response_lengths)} response tokens")
    parts = zip(logits_TV.split(list(response_lengths)), unconcat_tokens, response_lengths, strict=True)
    pairs = [
        calculate_log_probs_and_entropy(part, tokens[len(tokens) - length :], with_entropy=with_entropy)
        for part, tokens, length in parts
    ]
    result = {"log_probs": [log_probs[:, 0] for log_probs, _ in pairs]}
    if with_entropy:
        result["entropy"] = [entropy for _, entropy in pairs if entropy is not None]
    return logits.new_empty(0), result


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Any = None,
) -> Reduction:
    """Return a function that sums the masked means of the samples, or with `calculate_per_token_loss` all tokens."""
    lengths = list(response_lengths)

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        return torch.stack(
            [_masked_mean(part, mask) for part, mask in zip(x.split(lengths), loss_masks, strict=True)]
        ).sum()

    def sum_of_token(x: Tensor) -> Tensor:
        return (x * torch.cat([*loss_masks])).sum()

    return sum_of_token if calculate_per_token_loss else sum_of_sample_mean


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return the tensor unchanged, because it already covers the whole response."""
    return tensor


def slice_log_prob_with_cp(
    log_prob: Any, total_length: int, response_length: int, qkv_format: str = "thd", max_token_len: int | None = None
) -> Any:
    """Return the values unchanged, because they cover the whole response. Raises ValueError if their number differs."""
    if len(log_prob) != response_length:
        raise ValueError(f"{len(log_prob)} log-probabilities for {response_length} response tokens")
    return log_prob


def slice_with_cp(tokens: Tensor, pad_value: Any, qkv_format: str = "thd", max_seq_len: int | None = None) -> Tensor:
    """Return the tokens unchanged: sequences are not split. Raises ValueError for the format bshd, which pads."""
    if qkv_format != "thd":
        raise ValueError(f"qkv_format is {qkv_format!r}, but sequences are packed here. Use 'thd'")
    return tokens
