"""Settings with which the models of a run fit into memory, as the run found out. Its folder keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.data.atomic_replace import write_text
from slimectl.runtime.capacity import estimated_pack, with_pack_tokens
from slimectl.settings import Settings
from slimectl.settings.keys import flat

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
