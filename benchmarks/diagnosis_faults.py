"""Mistakes of users, as functions of a run: rewards, agents and hooks that benchmarks/diagnosis.py induces."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from slimectl.data.chat import Conversation, Generate
from slimectl.types import Sample, SamplingParams

VOWELS = frozenset("aeiou")


def constant(sample: Sample) -> float:
    """Pay the same for every response."""
    return 0.5


def longer(sample: Sample) -> float:
    """Pay for length."""
    return len(sample.response) / 16


def shorter(sample: Sample) -> float:
    """Charge for length."""
    return -len(sample.response) / 16


def vowels(sample: Sample) -> float:
    """Pay for a property that good responses seem to have, here their share of vowels."""
    return sum(letter in VOWELS for letter in sample.response) / max(1, len(sample.response))


def lenient(sample: Sample) -> float:
    """Return the share of the label's letters that the response has in their order, with anything between them."""
    letters = iter(sample.response)
    return sum(letter in letters for letter in str(sample.label)) / len(str(sample.label))


def any_letter(sample: Sample) -> float:
    """Call a response right if it has a letter of the label."""
    return float(bool(set(sample.response) & set(str(sample.label))))


def negated(sample: Sample) -> float:
    """Return a penalty for right answers instead of a reward."""
    return -similarity(sample)


def similarity(sample: Sample) -> float:
    """Return the share of letters that are right, in their place."""
    label = str(sample.label)
    right = sum(a == b for a, b in zip(sample.response, label, strict=False))
    return right / max(len(label), len(sample.response))


def slow(sample: Sample) -> float:
    """Take 4 ms for each sample, one after another."""
    time.sleep(0.004)
    return similarity(sample)


def stuck(sample: Sample) -> float:
    """Hang on some responses, as symbolic mathematics does, beyond the time limit of a call."""
    if sample.index % 40 == 0:
        time.sleep(0.5)
    return similarity(sample)


def undecided(sample: Sample) -> float | None:
    """Return None where a parser failed."""
    return None if sample.index % 3 == 0 else similarity(sample)


def nearly_divided_by_zero(sample: Sample) -> float:
    """Divide by a number that is nearly 0 for a few samples."""
    return similarity(sample) * (300.0 if sample.index % 700 == 7 else 1.0)


LEAKED: list[bytes] = []
CONTROL_GROUP = Path("/sys/fs/cgroup")


def leaking(sample: Sample) -> float:
    """Keep 100 KiB of each sample, in a control group with room for 3500 samples.

    The control group is simulated: its files are in a file system of the run's own.
    """
    LEAKED.append(bytes(bytearray(100 * 1024)))
    if len(LEAKED) % 100 == 1:
        resident = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
        if len(LEAKED) == 1:
            (CONTROL_GROUP / "memory.max").write_text(f"{resident + 3500 * 100 * 1024}")
        (CONTROL_GROUP / "memory.current").write_text(f"{resident}")
        (CONTROL_GROUP / "memory.stat").write_text("inactive_file 0\n")
    return similarity(sample)


async def cooler(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Sample at another temperature than the one that the trainer knows."""
    sampling_params["temperature"] = 0.5  # type: ignore[index]
    return await one_turn(sample, sampling_params, generate, tokenizer)


async def failing(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Raise an error in two of five attempts."""
    if sample.index % 5 < 2:
        raise ConnectionError("the tool server is not answering")
    return await one_turn(sample, sampling_params, generate, tokenizer)


async def waiting(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Wait for a slow tool in every attempt."""
    await asyncio.sleep(8)
    return await one_turn(sample, sampling_params, generate, tokenizer)


async def straggling(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Wait long in one attempt of a round."""
    if sample.index % 256 == 100:
        await asyncio.sleep(8)
    return await one_turn(sample, sampling_params, generate, tokenizer)


async def copied(samples: list[Sample], sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Any:
    """Give three of four members of a group the response of another, as a cache in front of a server does."""
    for i, sample in enumerate(samples):
        if i % 4 == 0:
            source = await one_turn(sample, sampling_params, generate, tokenizer)
            continue
        sample.tokens = source.tokens[: len(source.tokens) - source.response_length]
        sample.append_response_tokens(
            source.tokens[len(sample.tokens) :], log_probs=source.rollout_log_probs, text=source.response
        )
        sample.status, sample.weight_versions = source.status, source.weight_versions
    return samples


async def one_turn(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Generate as without a function."""
    await Conversation(sample, tokenizer, generate, sampling_params, max_turns=1).ask()
    return sample


def noisy_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Return random numbers as advantages: rewards attached to the wrong samples."""
    rng = random.Random(len(rollout_data["tokens"]))
    rollout_data["advantages"] = [[rng.gauss(0, 1)] * length for length in rollout_data["response_lengths"]]
