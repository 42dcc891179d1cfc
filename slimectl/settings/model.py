"""Which model, and what samples from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimectl.settings.base import Section


class ModelSettings(Section):
    """The model that is trained and sampled."""

    path: str | None = None
    """Hugging Face directory, .gguf file, or package:NAME for a GGUF inside an installed Python package."""

    card: str | None = None
    """Model card to build a new model of random weights from, where no path is given (see `slimectl models`)."""


class EngineSettings(Section):
    """The engine that writes the answers."""

    kind: Literal["embedded"] = "embedded"
    """Which engine; embedded runs inside this process, on a CPU or one GPU."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and KV cache; float32 agrees with the trainer to the last digits, bfloat16 is faster."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto takes the GPU if there is one."""

    max_running_requests: Annotated[int, Field(ge=1)] = 64
    """Sequences that decode at the same time; more wait and join as others finish."""
