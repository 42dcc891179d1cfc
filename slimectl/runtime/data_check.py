"""Compares the data of a run with the data that its checkpoint records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from slimectl.data.run_dir import RunDir
from slimectl.data.source_identity import Identity, changes
from slimectl.errors import SettingsError
from slimectl.settings import Settings
from slimectl.stdio import logger


def check_data(folder: RunDir, settings: Settings, data: Mapping[str, Sequence[Identity]]) -> int:
    """Compare the data with the newest checkpoint of a run, and return its round; 0 without a checkpoint.

    Checkpoints of earlier versions do not record their data. Raises SettingsError as run.on_data_change says; other
    differences are warnings.
    """
    number = max(folder.checkpoints(), default=0)
    checkpoint = folder.step(number)
    before: Mapping[str, Sequence[Identity]] = {}
    with suppress(OSError, ValueError):  # a damaged checkpoint is left out, with a message, when it is loaded
        before = json.loads((checkpoint / "state.json").read_text()).get("data", {})
    for key in before.keys() & data.keys():
        for change in changes(before[key], data[key]):
            message = f"{key}: {change} since {checkpoint} was saved."
            if key != "rollout.data":
                logger.warning(f"{message} Its metrics do not compare with earlier ones.")
            elif settings.run.on_data_change == "warn":
                logger.warning(f"{message} Prompts may repeat or be left out.")
            else:
                raise SettingsError(
                    f"{message} Prompts would repeat or be left out. Restore the data, or continue in the new data: "
                    f"-s run.on_data_change=warn"
                )
    return number
