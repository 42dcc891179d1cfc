"""Settings of the model."""

from __future__ import annotations

from slimectl.settings.base import Section


class ModelSettings(Section):
    """The model that is trained and sampled."""

    path: str | None = None
    """Hugging Face directory, .gguf file, or package:NAME for a GGUF inside an installed Python package."""

    verify: bool = False
    """Hash every file that the model's manifest.json names; else those above 32 MiB only where all have up to 1 GiB."""

    card: str | None = None
    """Model card to build a new model of random weights from, where no path is given (see `slimectl models`)."""
