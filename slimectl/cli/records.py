"""Records out of a stage: written, counted, and signed with a manifest where they stay in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from slimectl import stdio
from slimectl.data.bytestreams import is_pipe
from slimectl.data.hashing import content_hash
from slimectl.data.jsonl import JsonlWriter
from slimectl.data.manifest import Manifest, is_manifest
from slimectl.data.ownership import MANIFEST
from slimectl.data.partial import Partial
from slimectl.data.records import sample_to_json
from slimectl.errors import RecordError, SettingsError
from slimectl.settings import Settings
from slimectl.types import Sample

READ_ONCE = "a pipe, read once"
"""Stands in a manifest for the hash of an input that was one."""


def say(text: str) -> None:
    """Words go to stderr; stdout is for data."""
    stdio.say(text)


def up_to_date(stage: str, settings: Settings, inputs: list[str], out: str, force: bool) -> Manifest | None:
    """The manifest to sign the output with; None (and a word) if `out` already is what would be made."""
    named = {*inputs, *_hook_files(settings)}
    pipes = {name for name in named if is_pipe(name)}
    hashes = {name: content_hash(Path(name)) for name in sorted(named - pipes) if Path(name).exists()}
    known = len(hashes) == len(named)
    # What came through a pipe has no hash: nobody can say that it would come again.
    manifest = Manifest(stage, settings.model_dump(by_alias=True), hashes | dict.fromkeys(sorted(pipes), READ_ONCE))
    sidecar = Path(f"{out}.{MANIFEST}")
    if out != "-" and sidecar.exists() and not is_manifest(sidecar):
        raise SettingsError(f"{sidecar}: slimectl did not write it, and would replace it; move it away")
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
    if not is_pipe(out):
        manifest.write(Path(out), counts=dict(counts), parents=inputs)
    return counts


def write_on(
    make: Callable[[Iterator[Sample]], Iterable[Sample]],
    read: Iterable[Sample],
    out: str,
    manifest: Manifest,
    inputs: list[str],
    *,
    seen: Callable[[Sample], None],
    on_gap: Callable[[], None] | None = None,
    force: bool,
    whole_groups: bool,
) -> Counter[str]:
    """What `make` makes of the samples, in order, written as by `write_out`; but work that is cut off is kept.

    Begun again with the same inputs and settings it goes on after the last sample (the last whole group). `seen` is
    shown every sample, those of last time too. Where `make` may leave samples out, `on_gap` is called for each that was
    left out last time.
    """
    counts: Counter[str] = Counter()
    with Partial(out, manifest) as partial:
        if force:
            partial.drop()
        remaining = iter(read)
        for sample in partial.done(whole_groups=whole_groups):
            _pass(sample, remaining, on_gap)
            seen(sample)
            counts.update(("out", str(sample.status)))
        if partial.count:
            say(f"{out}: {partial.count} samples are there from last time; going on after them")
        try:
            for sample in make(remaining):
                seen(sample)
                partial.write(sample)
                counts.update(("out", str(sample.status)))
        except BaseException:
            if partial.count:
                say(f"{partial.path}: {partial.count} samples are kept; the same command goes on after them")
            raise
        if not counts:
            raise RecordError(f"{', '.join(inputs)}: no samples came; look at what the stage before said")
        partial.commit()
    manifest.write(Path(out), counts=dict(counts), parents=inputs)
    return counts


def _pass(done: Sample, read: Iterator[Sample], on_gap: Callable[[], None] | None) -> None:
    """Draw what has been dealt with from `read`: up to the sample that is `done`, or one where none is left out."""
    for sample in read:
        if on_gap is None or (sample.index, sample.group_index) == (done.index, done.group_index):
            return
        on_gap()


def told(counts: Counter[str], what: dict[str, Any]) -> None:
    """One closing line: how many, of which status, and what else there is to say."""
    parts = [f"{counts['out']} samples"]
    parts += [f"{counts[name]} {name}" for name in ("truncated", "aborted", "failed") if counts[name]]
    parts += [f"{name} {value}" for name, value in what.items()]
    say(", ".join(parts))
