"""Measures the largest pack that fits into the memory of the training ranks (train.max_tokens_per_gpu = auto)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from slimectl.algorithms.registry import ALGORITHMS
from slimectl.architectures.cards import language_model
from slimectl.architectures.config import read_config
from slimectl.architectures.parallel import ParallelLayout
from slimectl.protocols import PackProber
from slimectl.runtime import builders
from slimectl.runtime.capacity import longest_sequence
from slimectl.settings import Settings
from slimectl.system.stdio import logger
from slimectl.types import Loss, TrainingSample

TARGET = 0.92
"""Share of the memory that a pack may need, because other packs fragment it differently."""
PROBES = 16
"""Maximum number of packs that are tried."""


def fit_packs(models: builders.TrainableModels, settings: Settings) -> int | None:
    """Limit the packs of all models to the largest that fit, and return their number of tokens for each GPU.

    Packs of the longest samples are computed forward and backward, with the memory of the optimizers reserved. Weights,
    optimizers and random numbers stay as they are. Returns None if nothing can be measured: on a CPU, where memory has
    no limit that a process can try, with another trainer, and for a model that replays routing.
    """
    train = settings.train
    if builders.device(train.device) == "cpu" or train.use_rollout_routing_replay:
        return None
    if not builders.policy_backend(train).measures_packs or not train.use_dynamic_batch_size:
        return None
    trained = [model for model in (models.policy, models.separate_critic) if model is not None]
    sequence, layout = longest_sequence(settings), _layout(settings)
    vocabulary = int(language_model(read_config(models.folder))["vocab_size"])
    replicas = layout.data(settings.cluster.ranks)

    def tokens_of(sequences: int) -> int:
        return -(-sequences * sequence // layout.context)

    def measure(sequences: int) -> float | None:
        rows, tokens = probe_rows(sequences * replicas, settings, vocabulary), tokens_of(sequences)
        losses = _losses(settings, rows)
        shares = [model.measure_pack(rows, loss, tokens) for model, loss in zip(trained, losses, strict=False)]
        return None if None in shares else max(shares)

    start = max(1, train.pack_tokens * layout.context // sequence)
    most = max(1, -(-settings.rollouts_per_step // replicas))
    tokens = tokens_of(largest_fitting(measure, start=min(start, most), most=most))
    for model in (*trained, *models.frozen.values()):
        if isinstance(model, PackProber):
            model.limit_packs(tokens)
    logger.info(
        f'train.max_tokens_per_gpu = "auto": packs of {tokens} tokens fit. Set the number to save the measurement'
    )
    return tokens


def largest_fitting(measure: Callable[[int], float | None], *, start: int, most: int) -> int:
    """Return the largest number up to `most` whose measured share of memory is at most TARGET, or 1.

    `measure` returns None if memory ran out. `start` is expected to fit. It and its half predict the next number, so
    that memory rarely runs out. The result is within an eighth of the largest.

    >>> largest_fitting(lambda number: 0.3 + 0.01 * number, start=8, most=1000)
    62
    """
    points: list[tuple[int, float]] = []
    failed, number = most + 1, max(1, start // 2)
    for _ in range(PROBES):
        share = measure(number)
        if share is None or share > TARGET:
            failed = number
        else:
            points.append((number, share))
        best = points[-1][0] if points else 0
        if failed == 1 or failed - best <= max(1, best // 8):
            break
        number = start if 0 < best < start < failed else _next(points, failed)
    return points[-1][0] if points else 1


def _next(points: Sequence[tuple[int, float]], failed: int) -> int:
    """Return the next number to try, above the largest that fits and below the smallest that does not."""
    if not points:
        return max(1, failed // 4)
    best, share = points[-1]
    guess = 2 * best
    if len(points) > 1 and share > points[-2][1]:
        slope = (share - points[-2][1]) / (best - points[-2][0])
        guess = best + int((TARGET - share) / slope)
    middle = best + (failed - best) // 2
    return max(best + 1, min(guess, 4 * best, middle if guess >= failed else guess, failed - 1))


def probe_rows(count: int, settings: Settings, vocabulary: int) -> list[TrainingSample]:
    """Return the longest samples of a run with random tokens, and with every column that a loss may read."""
    draw, tokens = random.Random(0), longest_sequence(settings) + 1  # the last one is not computed
    response = min(settings.rollout.max_response_len, tokens - 1)
    zeros, ones = [0.0] * response, [1.0] * response
    return [
        TrainingSample(
            [draw.randrange(vocabulary) for _ in range(tokens)], response, [1 / (count * response)] * response,
            advantages=ones, old_log_probs=zeros, ref_log_probs=zeros, rollout_log_probs=zeros, values=zeros,
            returns=ones, reward=1.0, group=i,
        )
        for i in range(count)
    ]  # fmt: skip


def _losses(settings: Settings, rows: Sequence[TrainingSample]) -> list[Loss]:
    """Return the losses of the policy (or of the only model) and of a separate critic."""
    functions = ALGORITHMS[settings.algorithm.name]
    loss, options = functions.loss(settings.algorithm, rows), settings.algorithm.critic_options
    if options is not None and options.shared and functions.joint_loss is not None:
        loss = functions.joint_loss(settings.algorithm, rows, loss)
    return [loss, *([] if functions.critic_loss is None else [functions.critic_loss(settings.algorithm, rows)])]


def _layout(settings: Settings) -> ParallelLayout:
    return builders.layout(settings.megatron) if settings.train.backend == "megatron" else ParallelLayout()
