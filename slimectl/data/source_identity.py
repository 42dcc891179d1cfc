"""Identity of prompt sources, which a resumed run compares before it continues reading them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slimectl.data.hashing import content_hash
from slimectl.data.io import is_pipe, split_slice
from slimectl.data.json_values import jsonable
from slimectl.data.run_dir import RunDir
from slimectl.data.sources import generated_rows, source_files
from slimectl.data.tables import Listed
from slimectl.errors import SettingsError
from slimectl.settings import Settings
from slimectl.system.stdio import logger
from slimectl.types import Prompt

Identity = dict[str, Any]
"""`source` is its name in the settings. `files` holds path, bytes and SHA-256 of each file. Other sources have `rows`
(their number) and `first` (a hash of the first row)."""


def source_identity(source: str) -> Identity:
    """Return the identity of a source. For pipes, stdin and environment tasks, it is only the name.

    Files are read once to hash them. Functions and generators are called for their first row.
    """
    path, _ = split_slice(source)
    if is_pipe(path) or (path.partition(":")[0] == "env" and not Path(path).exists()):
        return {"source": source}
    if (table := generated_rows(path)) is None:
        return {"source": source, "files": [[str(file.resolve()), *_stamped_hash(file)] for file in source_files(path)]}
    first = next(((row.text, row.label) if isinstance(row, Prompt) else row for _, row in table.scan()), None)
    rows = {"rows": len(table)} if isinstance(table, Listed) else {}
    return {"source": source, **rows, "first": json.dumps(jsonable(first), sort_keys=True)}


def changes(before: Sequence[Identity], now: Sequence[Identity]) -> Iterator[str]:
    """Yield a description of each source that differs. The same files at another path are the same source.

    >>> list(changes([{"source": "a", "rows": 3}], [{"source": "a", "rows": 4}]))
    ['a: changed (3 rows then, 4 rows now)']
    """
    for old, new in zip_longest(before, now, fillvalue={"source": "nothing"}):
        if _content(old) == _content(new):
            continue
        if old["source"] != new["source"]:
            yield f"{new['source']}: replaces {old['source']}"
            continue
        sizes = [_size(identity) for identity in (old, new)]
        how = f"{sizes[0]} then, {sizes[1]} now" if sizes[0] != sizes[1] else f"{sizes[0]}, with other content now"
        yield f"{new['source']}: changed ({how})"


def _content(identity: Identity) -> Any:
    """Return the part of an identity that must not change: files or rows, or else the name."""
    facts = {key: value for key, value in identity.items() if key not in ("source", "files")}
    part = identity["source"].removeprefix(split_slice(identity["source"])[0])
    files = [entry[1:] for entry in identity.get("files", ())]
    return (part, files, facts) if files or facts else identity["source"]


def _size(identity: Mapping[str, Any]) -> str:
    if files := identity.get("files"):
        total = f"{sum(entry[1] for entry in files)} bytes"
        return total if len(files) == 1 else f"{total} in {len(files)} files"
    return f"{identity['rows']} rows" if "rows" in identity else "these rows"


def _stamped_hash(file: Path) -> tuple[int, str]:
    status = os.stat(file)
    return status.st_size, _hash(str(file), status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4096)
def _hash(file: str, *_: int) -> str:
    """Return the hash of a file. The other arguments distinguish it from an earlier file of the same name."""
    return content_hash(file)


def check_data(folder: RunDir, settings: Settings, data: Mapping[str, Sequence[Identity]]) -> int:
    """Compare the data with the newest checkpoint of a run. Return its round, or 0 without a checkpoint.

    Checkpoints of earlier versions do not record their data. Raises SettingsError depending on run.on_data_change.
    Other differences are warnings.
    """
    number = max(folder.checkpoints(), default=0)
    checkpoint = folder.step(number)
    before: Mapping[str, Sequence[Identity]] = {}
    with suppress(OSError, ValueError):  # a damaged checkpoint is reported and skipped when it is loaded
        before = json.loads((checkpoint / "state.json").read_text()).get("data", {})
    for key in before.keys() & data.keys():
        for change in changes(before[key], data[key]):
            message = f"{key}: {change} since {checkpoint} was saved."
            if key != "rollout.data":
                logger.warning(f"{message} Its metrics are not comparable with earlier ones.")
            elif settings.run.on_data_change == "warn":
                logger.warning(f"{message} Prompts may be repeated or skipped.")
            else:
                raise SettingsError(
                    f"{message} Prompts would be repeated or skipped. Restore the data, or continue with the new data: "
                    f"-s run.on_data_change=warn"
                )
    return number
