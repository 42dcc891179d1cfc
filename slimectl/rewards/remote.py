"""Rewards from a remote reward server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slimectl.errors import BackendError, SettingsError
from slimectl.rewards.base import Grade, Remote, check_url, is_number
from slimectl.system.client import HttpClient, RetryPolicy
from slimectl.system.redaction import redact_text
from slimectl.types import Sample


@dataclass(frozen=True)
class RemoteRm(Remote):
    """Reward from the server at `url` for a POST of {"prompt", "response", "label"}: a number, or a dict of them.

    With `batch_size` above 1, and for whole groups (score.group_rm), a list is posted and a list of the same length
    comes back. A failed request is repeated up to `max_retries` times with exponential, jittered back-off, within
    `timeout_s` seconds in total.
    Raises BackendError if the server does not answer or answers something else: a missing reward is not a reward of 0.
    """

    bounds = (-math.inf, math.inf)
    takes_groups = True

    ALIASES: ClassVar[dict[str, str]] = {"tries": "max_retries"}

    url: str
    batch_size: int = 1
    max_retries: int = 4
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.batch_size < 1 or self.timeout_s <= 0:
            raise SettingsError("score.rm_options: batch_size and timeout_s of remote_rm must be above 0")
        if self.max_retries < 0:
            raise SettingsError(f"score.rm_options.max_retries: {self.max_retries} must not be below 0")

    @property
    def together(self) -> int:
        return self.batch_size

    @property
    def patience_s(self) -> float:
        return self.timeout_s

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        bodies = [{"prompt": s.prompt, "response": s.response, "label": s.label} for s in samples]
        listed = self.batch_size > 1 or len(samples) > 1
        answer = await http.post(
            self.url,
            bodies if listed else bodies[0],
            patience=RetryPolicy(self.timeout_s, 1 + self.max_retries),
            wanted_by="the reward model",
        )
        rewards = self._listed(answer, samples) if listed else [answer]
        return [self._verdict(*pair) for pair in zip(rewards, samples, strict=True)]

    def extract(self, sample: Sample) -> str | None:
        return sample.response

    def _listed(self, answer: Any, samples: Sequence[Sample]) -> list[Any]:
        if isinstance(answer, list) and len(answer) == len(samples):
            return answer
        content = f"{len(answer)} rewards" if isinstance(answer, list) else f"{str(answer)[:60]!r}"
        first, last = samples[0].index, samples[-1].index
        raise BackendError(
            f"the reward model at {self.url}: answered {content} for {len(samples)} samples ({first} to {last}). "
            f"Expected a list of {len(samples)}."
        )

    def _verdict(self, reward: Any, sample: Sample) -> Grade:
        if not is_number(reward) and not isinstance(reward, dict):
            raise BackendError(
                f"the reward model at {self.url}: answered {str(reward)[:60]!r} for sample {sample.index}. "
                f"Expected a number or an object."
            )
        explanation = redact_text(f"{self.url} answered {str(reward)[:200]}")
        return Grade(reward, "whole response", explanation, sample.response, (0, len(sample.response)))
