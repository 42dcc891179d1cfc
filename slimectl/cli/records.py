"""Records out of a stage: written, counted, and signed with a manifest where they stay in a file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimectl.data.hashing import content_hash
from slimectl.data.jsonl import JsonlWriter
from slimectl.data.manifest import Manifest
from slimectl.data.records import sample_to_json
from slimectl.errors import RecordError
from slimectl.settings import Settings
from slimectl.types import Sample


def say(text: str) -> None:
    """Words go to stderr; stdout is for data."""
    print(text, file=sys.stderr, flush=True)


def up_to_date(stage: str, settings: Settings, inputs: list[str], out: str, force: bool) -> Manifest | None:
    """The manifest to sign the output with; None (and a word) if `out` already is what would be made."""
    named = {*inputs, *_hook_files(settings)}
    hashes = {name: content_hash(Path(name)) for name in sorted(named) if Path(name).exists()}
    manifest = Manifest(stage, settings.model_dump(by_alias=True), hashes)
    known = len(hashes) == len(named)
    if out != "-" and not force and known and manifest.unchanged(Path(out)):
        say(f"{out}: is made of the same inputs and settings already; --force makes it again")
        return None
    return manifest


def _hook_files(settings: Settings) -> list[str]:
    """The files of the user's own functions: a changed one makes other records under the same settings."""
    given = [item for section in settings.model_dump().values() for item in section.items()]
    paths = [str(value).rpartition(":")[0] for key, value in given if key.endswith("_path") and value]
    return [path for path in paths if path.endswith(".py")]


def write_out(samples: Iterable[Sample], out: str, manifest: Manifest, inputs: list[str]) -> Counter[str]:
    """Write samples as they come; the counts by status."""
    counts: Counter[str] = Counter()
    with JsonlWriter(out) as writer:
        for sample in samples:
            writer.write(sample_to_json(sample))
            counts["out"] += 1
            counts[str(sample.status)] += 1
        if not counts:
            raise RecordError(f"{', '.join(inputs) or 'stdin'}: no samples came; look at what the stage before said")
    if out != "-":
        manifest.write(Path(out), counts=dict(counts), parents=inputs)
    return counts


def told(counts: Counter[str], what: dict[str, Any]) -> None:
    """One closing line: how many, of which status, and what else there is to say."""
    parts = [f"{counts['out']} samples"]
    parts += [f"{counts[name]} {name}" for name in ("truncated", "aborted", "failed") if counts[name]]
    parts += [f"{name} {value}" for name, value in what.items()]
    say(", ".join(parts))
