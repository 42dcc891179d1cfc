"""An engine of another package: it answers with a part of the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimectl.protocols import NamedTensors
from slimectl.runtime.builders.engines import EngineBackend
from slimectl.settings import Settings
from slimectl.settings.base import PositiveInt, Section
from slimectl.types import Completion, SamplingParams


class EchoSettings(Section):
    """How much is echoed."""

    tokens: PositiveInt = 3
    """Tokens of the prompt that make the answer."""


class EchoEngine:
    """Answers with tokens of the prompt from a place that the seed says, and is sure of them."""

    def __init__(self, text: Any, tokens: int) -> None:
        self._text = text
        self._tokens = tokens
        self._version = "0"

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        start = (params.seed or 0) % (len(tokens) - self._tokens + 1)
        answer = tokens[start : start + min(self._tokens, params.max_tokens)]
        return Completion(
            tokens=answer,
            log_probs=[0.0] * len(answer),
            text=self._text.decode(answer),
            finish_reason="stop",
            weight_versions=[self._version] * len(answer),
        )

    def load_weights(self, tensors: NamedTensors, *, version: str) -> None:
        for _ in tensors:
            pass
        self._version = version

    async def abort(self) -> None: ...

    async def close(self) -> None: ...


class EchoBackend(EngineBackend):
    """engine.backend = "echo"."""

    in_process = True
    settings_class = EchoSettings

    def engine(self, settings: Settings, folder: Path, text: Any, *, load: bool) -> EchoEngine:
        return EchoEngine(text, settings.part_section("echo", EchoSettings).tokens)
