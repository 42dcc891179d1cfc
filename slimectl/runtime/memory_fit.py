"""Fits the packs of a run into memory: measures the largest one, and keeps what was found in the run's folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.algorithms.registry import ALGORITHMS
from slimectl.architectures.cards import language_model
from slimectl.architectures.config import read_config
from slimectl.architectures.parallel import ParallelLayout
from slimectl.data.atomic_replace import write_text
from slimectl.protocols import PackProber
from slimectl.runtime import builders
from slimectl.runtime.capacity import estimated_pack, longest_sequence, with_pack_tokens
from slimectl.settings import Settings
from slimectl.settings.keys import flat
from slimectl.system.stdio import logger
from slimectl.types import Loss, TrainingSample

FILE = "memory.json"


class MemoryFit:
    """The settings of a run in `folder`, with what was found. A resume has it again, except for settings it changes."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._given, self._file = settings, folder / FILE
        self._found: dict[str, Any] = {}

    def read(self) -> None:
        """Read what the run has found. An unreadable file counts as none."""
        values = dict(flat(self._given))
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            self._found = {name: value for name, value in saved["fit"].items() if saved["set"][name] == values[name]}

    def adopt(self, found: Mapping[str, Any]) -> None:
        """Use these values, and record them."""
        self._found |= found
        values = dict(flat(self._given))
        record = {"set": {name: values[name] for name in self._found}, "fit": self._found}
        write_text(self._file, json.dumps(record) + "\n")

    @property
    def is_open(self) -> bool:
        """Whether the size of packs has yet to be measured."""
        given = self._given.train.max_tokens_per_gpu
        return given == "auto" and "train.max_tokens_per_gpu" not in self._found

    @property
    def settings(self) -> Settings:
        """The settings with which models are built. An open size of packs is the planner's estimate."""
        if self.is_open:
            return with_pack_tokens(self._given, estimated_pack(self._given))
        train = {name.removeprefix("train."): value for name, value in self._found.items()}
        return self._given.model_copy(update={"train": self._given.train.model_copy(update=train)})


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
