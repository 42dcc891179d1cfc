"""`slimectl inspect --follow`: prints samples as a stage or a run writes them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slimectl.cli.inspect_samples import Place, show_places
from slimectl.cli.options import Selection
from slimectl.cli.terminal import safe_json
from slimectl.cli.tokens import legend
from slimectl.cli.viewer import queries
from slimectl.cli.viewer.library import Library, SamplesFile, is_run_folder
from slimectl.data.resumable import partial_output
from slimectl.data.sample_index import SampleIndex
from slimectl.errors import SettingsError
from slimectl.system import stdio

POLL_S = 0.5


def follow_samples(path: Path, selection: Selection) -> None:
    """Print the last samples of a file or a run, then new ones, until the run or stage ends, or Ctrl-C.

    While a stage is writing its output, follows the unfinished file. Raises SettingsError.
    """
    partial = None if path.is_dir() else partial_output(path)
    source = partial or path
    if not source.exists():
        raise SettingsError(f"{path}: no such file or folder")
    if not source.is_file() and not is_run_folder(source):
        raise SettingsError(f"{path}: not a file or a run. Give a samples file or a run's folder (runs/NAME)")
    library = Library([source])
    if any(not run.settings.get("run.keep_samples") for run in library.runs.values()):
        stdio.note(
            f"{path}: has samples of its evaluations only. Set run.keep_samples = true to keep samples of rounds"
        )
    follower = Follower(library, selection)
    if selection.color_by and not selection.as_json:
        print(legend(selection.color_by))
    follower.show_last()
    while True:
        # Check for the end before reading the files, so that no sample written before the end is missed.
        end = _end(path, follower.library, partial)
        follower.show_new()
        if end:
            stdio.note(end)
            return
        time.sleep(POLL_S)


def _end(path: Path, library: Library, partial: Path | None) -> str:
    """Return why no more samples will come, or "" if some may."""
    states = {run.state for run in library.runs.values()}
    if states and "running" not in states:
        return f"{path}: {states.pop()}"
    return f"{path}: is complete" if partial is not None and not partial.exists() else ""


class Follower:
    """Shows the samples of a library's files that have not been shown yet."""

    def __init__(self, library: Library, selection: Selection) -> None:
        self.library = library
        self._selection = selection
        self._positions: dict[Path, tuple[SampleIndex | None, int]] = {}
        """Index and next row of each file. A file without an index has nothing left to show."""

    def show_last(self) -> None:
        """Show the last `rows` samples. Earlier ones count as shown."""
        last: list[Place] = []
        for file in self._files()[::-1]:
            if len(last) < self._selection.rows or file.run is None:
                last = [*self._new(file), *last]
            else:
                self._positions[file.path] = (None, 0)
        self._show(last[len(last) - min(len(last), self._selection.rows) :])

    def show_new(self) -> None:
        for file in self._files():
            self._show(list(self._new(file)))

    def _files(self) -> list[SamplesFile]:
        """Return the files in the order in which they were written."""
        return sorted(self.library.files().values(), key=lambda file: _written(file.path))

    def _new(self, file: SamplesFile) -> Iterator[Place]:
        """Yield the new samples of a file that match the filter. After the file is replaced, all are new."""
        before, start = self._positions.get(file.path, (None, 0))
        if before is None and file.path in self._positions:
            return
        index = self.library.index(file)
        index.extend()
        start = start if index is before else 0
        self._positions[file.path] = (index, len(index))
        if start < len(index):
            rows = queries.matching_rows(index, index.columns(), where=self._selection.condition, start=start)
            yield from (Place(file, index, row) for row in rows.tolist())

    def _show(self, places: list[Place]) -> None:
        if self._selection.as_json:
            for place in places:
                print(safe_json(place.record()))
        else:
            show_places(self.library, places, self._selection)
        sys.stdout.flush()


def _written(path: Path) -> int:
    """Return the modification time of a file in nanoseconds, or 0 if it has been renamed."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
