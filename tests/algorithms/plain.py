"""The definitions of the losses a second time: floats, loops and the math module, as one would write them on paper.

A token is a `Token`; a pack is a list of rows, a row a list of tokens. Sums in closed form where the code recurs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, mean, stdev
from typing import Any

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.surrogates import SURROGATES

LIMIT = 20.0


@dataclass(frozen=True)
class Token:
    logp: float
    old: float
    ref: float
    rollout: float
    advantage: float
    weight: float
    entropy: float

    @property
    def kept(self) -> bool:
        return self.weight != 0


Row = list[Token]


def held(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def exp(log_ratio: float) -> float:
    return math.exp(held(log_ratio, -LIMIT, LIMIT))


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Sum over l of gamma^l r_{t+l}."""
    T = len(rewards)
    return [math.fsum(gamma ** (s - t) * rewards[s] for s in range(t, T)) for t in range(T)]


def advantages(rewards: Sequence[float], values: Sequence[float], gamma: float, lambd: float) -> list[float]:
    """GAE as the sum over l of (gamma lambda)^l delta_{t+l}."""
    after = [*values[1:], 0.0] if values else []
    deltas = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=True)]
    return returns(deltas, gamma * lambd)


def at_actions(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    """Each value at its action, an unmasked token; 0 elsewhere."""
    remaining = iter(values)
    return [next(remaining) if bit else 0.0 for bit in mask]


def whitened(values: Sequence[Sequence[float]], masks: Sequence[Sequence[int]]) -> list[list[float]]:
    kept = [v for row, mask in zip(values, masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    if len(kept) < 2 or min(kept) == max(kept):
        return [[0.0] * len(row) for row in values]
    center, variance = mean(kept), stdev(kept) ** 2
    return [
        [(v - center) / math.sqrt(variance + 1e-8) if m else 0.0 for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(values, masks, strict=True)
    ]


def divergence(kind: str, logp: float, ref: float) -> float:
    r = logp - ref
    k3 = math.exp(-r) - 1 + r
    return {"k1": r, "k2": r * r / 2, "k3": k3, "low_var_kl": held(k3, -10.0, 10.0)}[kind]


def row_mean(row: Row, of: Callable[[Token], float]) -> float:
    kept = [of(token) for token in row if token.kept]
    return fmean(kept) if kept else 0.0


def raw_weights(row: Row, level: str) -> list[float]:
    """exp(old - rollout) of the tokens, of their sum, or of their mean."""
    if level == "token":
        return [exp(token.old - token.rollout) for token in row]
    log_weights = [token.old - token.rollout for token in row if token.kept]
    together = math.fsum(log_weights) if level == "sequence" else fmean(log_weights) if log_weights else 0.0
    return [exp(together)] * len(row)


def weights(
    row: Row, *, level: str, mode: str, low: float, high: float, veto: float | None
) -> tuple[list[float], list[float]]:
    """Importance weights and whether each was changed."""
    raw = raw_weights(row, level)
    if mode == "mask":
        made = [w if low <= w <= high else 0.0 for w in raw]
    elif mode == "truncate":
        made = [min(w, high) for w in raw]
    else:
        made = [held(w, low, high) for w in raw]
    if veto is not None and any(token.kept and exp(token.old - token.rollout) < veto for token in row):
        made = [0.0] * len(row)
    return made, [float(a != b) for a, b in zip(made, raw, strict=True)]


Side = tuple[float, float]
"""(loss of a token, its derivative by the ratio that it is a function of)."""


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> Side:
    """PPO's: the worse of two branches; the derivative is 0 where a bound holds."""
    free, bounded = -ratio * advantage, -held(ratio, 1 - low, 1 + high) * advantage
    loss, slope = (bounded, 0.0) if bounded > free else (free, -advantage)
    if dual is not None and advantage < 0 and -dual * advantage < loss:
        return -dual * advantage, 0.0
    return loss, slope


def ratio_at(row: Row, token: Token, level: str) -> float:
    """exp(logp - old) of a token, of the sum over its row, or of the mean over its row."""
    kept = [each.logp - each.old for each in row if each.kept]
    rows = {"sequence": math.fsum(kept), "geometric": fmean(kept) if kept else 0.0}
    return exp(rows.get(level, token.logp - token.old))


def surrogate(
    row: Row, kind: str, *, low: float, high: float, dual: float | None, tau: Side, topr: dict[str, Any]
) -> tuple[list, list]:
    """Losses of the tokens of a row, and the derivative of each one's loss by every token's log-probability."""
    ratios = [exp(token.logp - token.old) for token in row]
    count = max(1, sum(token.kept for token in row))
    T = range(len(row))
    if kind == "gspo":
        whole = exp(row_mean(row, lambda token: token.logp - token.old))
        sides = [clipped(whole, token.advantage, low, high, dual) for token in row]
        return [loss for loss, _ in sides], [
            [slope * whole / count if row[j].kept else 0.0 for j in T] for _, slope in sides
        ]
    if kind == "gmpo":
        bounded = [
            max(token.logp - token.old, -low) if token.advantage < 0 else min(token.logp - token.old, high)
            for token in row
        ]
        whole = math.exp(math.fsum(b for b, token in zip(bounded, row, strict=True) if token.kept) / count)
        free = [b == token.logp - token.old and token.kept for b, token in zip(bounded, row, strict=True)]
        return [-token.advantage * whole for token in row], [
            [-token.advantage * whole / count * free[j] for j in T] for token in row
        ]
    losses, slopes = [], []
    for token, ratio in zip(row, ratios, strict=True):
        if kind == "topr":
            weight = held(ratio_at(row, token, topr["topr_level"]), 0.0, topr["topr_clip"])
            weight = topr["topr_negative_weight"] * weight if token.advantage < 0 else topr["topr_positive_weight"]
            loss, slope = -weight * token.advantage * token.logp, -weight * token.advantage
        elif kind == "cispo":
            weight = held(ratio, 1 - low, 1 + high)
            loss, slope = -weight * token.advantage * token.logp, -weight * token.advantage
        elif kind == "sapo":
            t = tau[0] if token.advantage > 0 else tau[1]
            gate = 1 / (1 + math.exp(-t * (ratio - 1)))
            loss, slope = -4 / t * gate * token.advantage, -4 * gate * (1 - gate) * ratio * token.advantage
        else:
            loss, slope = clipped(ratio, token.advantage, low, high, dual)
            slope *= ratio
        losses.append(loss)
        slopes.append(slope)
    return losses, [[slopes[t] if t == j else 0.0 for j in T] for t in T]


def policy_loss(loss: PolicyLoss, rows: Sequence[Row]) -> tuple[dict[str, float], list[float]]:
    """What the loss and its parts come to, and the derivative by every token's log-probability."""
    kind = next(name for name, surrogate_class in SURROGATES.items() if type(loss.surrogate) is surrogate_class)
    low = getattr(loss.surrogate, "eps_clip", math.nan)
    high = getattr(loss.surrogate, "eps_clip_high", None)
    tau = (getattr(loss.surrogate, "tau_pos", math.nan), getattr(loss.surrogate, "tau_neg", math.nan))
    dual = getattr(loss.surrogate, "eps_clip_c", None)
    parts = {"pg_loss": 0.0, "kl_loss": 0.0, "entropy_loss": 0.0}
    gradient = []
    for row in rows:
        high = low if high is None else high
        losses, slopes = surrogate(row, kind, low=low, high=high, dual=dual, tau=tau, topr=vars(loss.surrogate))
        factors = _factors(loss, row)
        parts["pg_loss"] += math.fsum(t.weight * f * x for t, f, x in zip(row, factors, losses, strict=True))
        parts["entropy_loss"] += math.fsum(t.weight * t.entropy for t in row)
        for j, token in enumerate(row):
            kl, slope = _divergence_and_slope(loss, token)
            parts["kl_loss"] += token.weight * kl
            moved = math.fsum(t.weight * f * slopes[i][j] for i, (t, f) in enumerate(zip(row, factors, strict=True)))
            gradient.append(moved + loss.kl_loss_coef * token.weight * slope)
    total = parts["pg_loss"] + loss.kl_loss_coef * parts["kl_loss"] - loss.entropy_coef * parts["entropy_loss"]
    return parts | {"loss": total}, gradient


def _factors(loss: PolicyLoss, row: Row) -> list[float]:
    """What corrections and masks make of each token's loss."""
    factors = [1.0] * len(row)
    if loss.use_tis:
        made, _ = weights(
            row, level=loss.tis_level, mode=loss.tis_mode, low=loss.tis_clip_low, high=loss.tis_clip, veto=loss.tis_veto
        )
        factors = [w * loss.tis_scale for w in made]
    if loss.use_rs:
        kept = [loss.rs_clip_low <= w <= loss.rs_clip for w in raw_weights(row, loss.rs_level)]
        factors = [f * k for f, k in zip(factors, kept, strict=True)]
    if loss.use_opsm and row_mean(row, lambda token: token.old - token.logp) > loss.opsm_delta:
        factors = [0.0 if token.advantage < 0 else f for f, token in zip(factors, row, strict=True)]
    return factors


def _divergence_and_slope(loss: PolicyLoss, token: Token) -> tuple[float, float]:
    r, kl = token.logp - token.ref, divergence(loss.kl_loss_type, token.logp, token.ref)
    slope = {"k1": 1.0, "k2": r}.get(loss.kl_loss_type, 1 - math.exp(-r))
    bound, k3 = loss.kl_loss_type == "low_var_kl", divergence("k3", token.logp, token.ref)
    if not loss.use_unbiased_kl:
        return kl, 0.0 if bound and k3 > 10 else slope
    ratio = exp(token.logp - token.old)
    kl = k3 if bound else kl
    return (10.0, 0.0) if bound and ratio * kl > 10 else (ratio * kl, ratio * (kl + slope))


def group_advantages(
    samples: Sequence[tuple[int, int, float, int]], baseline: str, std_normalization: bool
) -> list[float]:
    """Of (group, execution, reward, length): attempts compared with the others of their group."""
    made = []
    for group, execution, _, _ in samples:
        attempts: dict[int, list[tuple[float, int]]] = {}
        for g, e, reward, length in samples:
            if g == group:
                attempts.setdefault(e, []).append((reward, length))
        rewards = {e: fmean(reward for reward, _ in members) for e, members in attempts.items()}
        lengths = {e: sum(length for _, length in members) for e, members in attempts.items()}
        own, center = rewards[execution], fmean(rewards.values())
        if len(set(rewards.values())) == 1:
            made.append(0.0)
        elif baseline == "leave_one_out":
            made.append(own - fmean(reward for e, reward in rewards.items() if e != execution))
        elif baseline == "length_weighted":
            made.append(own - sum(rewards[e] * lengths[e] for e in rewards) / sum(lengths.values()))
        elif baseline == "mean_normalized":
            made.append(own / center - 1)
        else:
            made.append((own - center) / (stdev(rewards.values()) + 1e-6) if std_normalization else own - center)
    return made
