"""Writes the records of a stage, counts them, and adds a manifest to output files."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimectl.cli.terminal import PICTURES
from slimectl.data.hashing import content_hash
from slimectl.data.io import is_pipe, split_slice
from slimectl.data.jsonl import JsonlWriter
from slimectl.data.manifest import Manifest, is_manifest, manifest_path
from slimectl.data.ownership import MANIFEST
from slimectl.data.resumable import ResumableOutput
from slimectl.errors import RecordError, SettingsError
from slimectl.settings import Settings
from slimectl.stages.failed_attempts import FailureCount
from slimectl.system import stdio
from slimectl.types import Sample

READ_ONCE = "a pipe, read once"
"""Placeholder in a manifest for the hash of a pipe."""


class TextOutput:
    """Writes the text of a model to stdout piece by piece. On a terminal, control characters are made visible."""

    def __init__(self) -> None:
        self._terminal = stdio.is_terminal()
        self._last = "\n"

    def write(self, text: str) -> None:
        sys.stdout.write(text.translate(PICTURES) if self._terminal else text)
        sys.stdout.flush()
        self._last = text[-1:] or self._last

    def end(self) -> None:
        """End the line, unless the text has ended it."""
        if self._last != "\n":
            self.write("\n")


def up_to_date(stage: str, settings: Settings, inputs: list[str], out: str, force: bool) -> StageOutput | None:
    """Return the output of a stage. If it was made from the same inputs and settings, log this, return None."""
    named = {*inputs, *_hook_files(settings)}
    pipes = {name for name in named if is_pipe(name)}
    files = {name: Path(split_slice(name)[0]) for name in sorted(named - pipes)}
    hashes = {name: content_hash(file) for name, file in files.items() if file.exists()}
    all_hashed = len(hashes) == len(named)
    # A pipe has no hash: its content may differ the next time.
    manifest = Manifest(stage, settings.model_dump(by_alias=True), hashes | dict.fromkeys(sorted(pipes), READ_ONCE))
    sidecar = Path(f"{out}.{MANIFEST}")
    if out != "-" and sidecar.exists() and not is_manifest(sidecar):
        raise SettingsError(
            f"{sidecar}: exists, but slimectl did not write it. Move it away so that it is not replaced."
        )
    if out != "-" and not force and all_hashed and manifest.unchanged(Path(out)):
        stdio.note(f"{out}: is up to date with these inputs and settings. Use --force to write it again.")
        return None
    return StageOutput(out, manifest, inputs)


def _hook_files(settings: Settings) -> list[str]:
    """Return the files of the user's functions and agent. They count as inputs, because they change the output."""
    items = [item for section in settings.model_dump().values() for item in section.items()]
    paths = [str(value).rpartition(":")[0] for key, value in items if key.endswith("_path") and value]
    scripts = []
    if settings.rollout.agent:
        from slimectl.agents.command import script_of

        scripts = [script for script in [script_of(shlex.split(settings.rollout.agent))] if script]
    return [path for path in paths if path.endswith(".py")] + scripts


@dataclass(frozen=True)
class StageOutput:
    """Where the samples of a stage go, its manifest, and the names of the inputs."""

    out: str
    manifest: Manifest
    inputs: list[str]

    def refuse_other_inputs(self) -> None:
        """Raise SettingsError if a file that was not made from inputs with these names would be replaced."""
        path = Path(self.out)
        if self.out == "-" or not path.is_file() or not path.stat().st_size:
            return
        same, made = self.manifest.same_inputs(path), is_manifest(manifest_path(path))
        if made and same:
            return
        names = ", ".join(self.inputs)
        reason = f"was made from inputs other than {names}" if made else "exists, but no stage wrote it"
        raise SettingsError(f"{self.out}: {reason}. Give another --out FILE, or --force to replace it.")

    def write(self, samples: Iterable[Sample]) -> Counter[str]:
        """Write samples as they arrive. Return their counts by status."""
        counts: Counter[str] = Counter()
        with JsonlWriter(self.out) as writer:
            for sample in samples:
                writer.write(sample)
                counts.update(("out", str(sample.status)))
            self._refuse_none(counts)
        if not is_pipe(self.out):
            self._sign(counts)
        return counts

    def write_resumable(
        self,
        process: Callable[[Iterator[Sample]], Iterable[Sample]],
        read: Iterable[Sample],
        *,
        on_sample: Callable[[Sample], None],
        on_gap: Callable[[], None] | None = None,
        force: bool,
        whole_groups: bool,
    ) -> Counter[str]:
        """Write the samples that `process` returns, in order, like `write`, but keep the output if interrupted.

        A restart with the same inputs and settings continues after the last sample (or the last complete group).
        `on_sample` gets every sample, including samples of the earlier attempt. If `process` may drop samples, `on_gap`
        is called for each that the earlier attempt dropped.
        """
        counts: Counter[str] = Counter()
        with ResumableOutput(self.out, self.manifest) as partial:
            if force:
                partial.drop()
            remaining = iter(read)
            for sample in partial.done(whole_groups=whole_groups):
                _skip_done(sample, remaining, on_gap)
                on_sample(sample)
                counts.update(("out", str(sample.status)))
            if partial.count:
                samples = stdio.quantity(partial.count, "sample")
                stdio.note(f"{self.out}: continuing after {samples} of an interrupted attempt.")
            try:
                for sample in process(remaining):
                    on_sample(sample)
                    partial.write(sample)
                    counts.update(("out", str(sample.status)))
            except BaseException:
                if partial.count:
                    kept = stdio.quantity(partial.count, "sample")
                    stdio.note(f"{partial.path}: keeping {kept}. Run the same command again to continue.")
                raise
            self._refuse_none(counts)
            partial.commit()
        self._sign(counts)
        return counts

    def _refuse_none(self, counts: Counter[str]) -> None:
        if not counts:
            names = ", ".join(self.inputs) or "<stdin>"
            raise RecordError(f"{names}: no samples. Look at the messages of the stage that wrote them.")

    def _sign(self, counts: Counter[str]) -> None:
        self.manifest.write(Path(self.out), counts=dict(counts), parents=self.inputs)


def _skip_done(done: Sample, samples: Iterator[Sample], on_gap: Callable[[], None] | None) -> None:
    """Advance `samples` past the sample `done`. Without `on_gap`, advance by one, because none can be missing."""
    for sample in samples:
        if on_gap is None or (sample.index, sample.group_index) == (done.index, done.group_index):
            return
        on_gap()


def print_summary(counts: Counter[str], extra: dict[str, Any], failures: FailureCount | None = None) -> None:
    """Print the closing summary line: counts by status, `extra` entries and the failed attempts."""
    shown = ("truncated", "aborted", *(("failed",) if failures is None else ()))
    parts = [stdio.quantity(counts["out"], "sample")]
    parts += [f"{counts[name]} {name}" for name in shown if counts[name]]
    parts += [f"{name} {value}" for name, value in extra.items()]
    parts += [failures.with_cause] if failures is not None and failures.failed else []
    stdio.note(", ".join(parts))
