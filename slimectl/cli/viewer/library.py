"""The runs and samples files of a view, with their rounds, evaluations, metrics and settings."""

from __future__ import annotations

import json
import math
import re
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimectl.data.locks import holder_of
from slimectl.data.manifest import manifest_path
from slimectl.data.ownership import LOCK, is_run
from slimectl.data.sample_index import SampleIndex, TrainedSampleIndex
from slimectl.data.sources import source_folders
from slimectl.errors import SettingsError
from slimectl.system.model_files import follow_links

ROUND = re.compile(r"step_(\d{6,})")
EVALUATION = re.compile(r"(.+)-(\d{6,})\.jsonl")
DROPPED = re.compile(r"drop|filter|truncat|abort|fail|too_long|stale|no_signal|zero_std")
"""Metrics that count dropped or marked samples of a round."""
DATA = re.compile(r"(rollout|sft_warmup)\.data|eval\.data\.[^.]+(\.path)?")
"""Settings with paths of prompts."""
PLACES = ("*/", "runs/*/", "trial_*/*/")
"""Runs in a folder: its children, those in its folder `runs`, or the trials of a sweep."""
MAX_METRICS_BYTES = 8 << 20
"""Maximum bytes of a metrics file per answer. The page asks for the rest immediately."""


@dataclass(frozen=True)
class SamplesFile:
    """A samples file of a view: of a round, of an evaluation, or given by path."""

    id: str
    path: Path
    title: str
    kind: str
    """"round", "evaluation" or "samples"."""
    run: str | None = None
    """Identifier of its run."""
    round: int | None = None
    dataset: str | None = None
    reward_key: str | None = None

    @property
    def training(self) -> Path | None:
        """File with the training data of a round, if the run kept it."""
        path = self.path.with_name("train_data.jsonl")
        return path if self.kind == "round" and _is_file(path) else None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "path": str(self.path), "title": self.title, "kind": self.kind, "run": self.run,
            "round": self.round, "dataset": self.dataset, "bytes": size_of(self.path),
        }  # fmt: skip


@dataclass
class RunSource:
    """A run's folder."""

    id: str
    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Values of run.toml by dotted key."""

    @property
    def name(self) -> str:
        """Name of the folder. For a run of a sweep, trial_001/seed_1."""
        folder = self.path.absolute()
        return f"{folder.parent.name}/{folder.name}" if (folder.parent / "trial.toml").exists() else folder.name

    @property
    def state(self) -> str:
        """ "running", "finished" or "stopped"."""
        holder = holder_of(self.path / LOCK)
        if holder is not None and holder.is_alive():
            return "running"
        with suppress(OSError, ValueError):
            if "finished" in json.loads((self.path / "manifest.json").read_text()):
                return "finished"
        return "stopped"

    def files(self) -> list[SamplesFile]:
        """Return the samples files of the run: rounds, then evaluations, in order."""
        key = self.settings.get("score.reward_key")
        rounds = []
        for folder in sorted(self.path.glob("step_*")):
            match = ROUND.fullmatch(folder.name)
            if match and _is_file(folder / "samples.jsonl"):
                number = int(match[1])
                rounds.append(SamplesFile(f"{self.id}.r{number}", folder / "samples.jsonl", f"round {number}", "round",
                                          self.id, number, None, key))  # fmt: skip
        evaluations = []
        for path in sorted((self.path / "eval").glob("*.jsonl")):
            match = EVALUATION.fullmatch(path.name)
            if match and _is_file(path):
                name, number = match[1], int(match[2])
                key = self.settings.get(f"eval.data.{name}.reward_key", key)
                evaluations.append(SamplesFile(f"{self.id}.e{number}.{name}", path, f"{name} after round {number}",
                                               "evaluation", self.id, number, name, key))  # fmt: skip
        return rounds + sorted(evaluations, key=lambda file: (file.round or 0, file.dataset or ""))

    def model_folder(self) -> Path | None:
        """Return a folder with the tokenizer of the run's model, or None if there is none."""
        newest = follow_links(self.path / "latest" / "policy")
        candidates = [self.path / "model", self.path / "warmup", newest]
        if path := self.settings.get("model.path"):
            candidates.insert(0, Path(path))
        return next((folder for folder in candidates if (folder / "tokenizer_config.json").exists()), None)

    def metrics(self, offsets: dict[str, int]) -> dict[str, Any]:
        """Return the lines of metrics.jsonl and perf.jsonl from byte offsets on, and the offsets after them."""
        answer: dict[str, Any] = {"offsets": {}, "more": False}
        for name in ("metrics", "perf"):
            lines, end, more = _json_lines(self.path / f"{name}.jsonl", offsets.get(name, 0), _has_metrics)
            answer[name], answer["offsets"][name] = lines, end
            answer["more"] |= more
        return answer

    def timeline(self, offset: int) -> dict[str, Any]:
        """Return the spans of timeline.jsonl from a byte offset on, the offset after them, and whether more follow."""
        spans, end, more = _json_lines(self.path / "timeline.jsonl", offset, _is_span)
        return {"spans": spans, "offset": end, "more": more}

    def dropped(self, number: int, offset: int = 0) -> dict[str, Any]:
        """Return the counts of dropped or marked samples of a round: metric to its value in each step.

        `offset` is where the lines of the round begin, from an earlier answer, so that a long file is not read again.
        """
        mark, path = re.compile(rb'"rollout_id": ?%d\b' % number), self.path / "metrics.jsonl"
        first, steps, more = None, list[dict[str, Any]](), True
        while more:
            text, start, more = _whole_lines(path, offset)
            offset = start + len(text)
            for match in mark.finditer(text):
                begin = text.rfind(b"\n", 0, match.start()) + 1
                line = _json_line(text[begin : text.find(b"\n", match.end())])
                metrics = line.get("metrics") if line.get("rollout_id") == number else None
                if isinstance(metrics, dict) and any(not name.startswith("eval/") for name in metrics):
                    first = start + begin if first is None else first
                    steps.append(metrics)
        names = dict.fromkeys(name for metrics in steps for name in metrics if DROPPED.search(name))
        counts = {name: [metrics.get(name) for metrics in steps] for name in names if not name.startswith("eval/")}
        return {"steps": len(steps), "offset": offset if first is None else first,
                "counts": {name: values for name, values in counts.items() if any(values)}}  # fmt: skip

    def all_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield every line of metrics.jsonl and perf.jsonl. Only a part of the files is in memory."""
        offsets: dict[str, int] = {}
        more = True
        while more:
            answer = self.metrics(offsets)
            offsets, more = answer["offsets"], answer["more"]
            yield from answer["metrics"]
            yield from answer["perf"]


class Library:
    """The runs and files of one view, with an index of each samples file, which is created on first use."""

    def __init__(self, paths: Sequence[Path], *, model: Path | None = None) -> None:
        """`model` is the tokenizer's folder for all files. Without it, runs and manifests tell theirs."""
        self._model = model
        self.runs: dict[str, RunSource] = {}
        self.named_files: dict[str, SamplesFile] = {}
        self._indexes: dict[Path, SampleIndex] = {}
        self._lock = threading.Lock()
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        """Add a run, a samples file, or every run in a folder (see PLACES). Raises SettingsError."""
        if path.is_file():
            number = f"f{len(self.named_files)}"
            self.named_files[number] = SamplesFile(number, path, path.name, "samples", reward_key=_reward_key(path))
        elif is_run_folder(path):
            number = f"n{len(self.runs)}"
            self.runs[number] = RunSource(number, path, read_settings(path))
        elif runs := [child for place in PLACES for child in path.glob(place) if is_run_folder(child)]:
            for child in sorted(runs):
                self._add(child)
        elif not path.exists():
            raise SettingsError(f"{path}: no such file or folder")
        else:
            raise SettingsError(
                f"{path}: not a run, and contains no runs. Give a run's folder (runs/NAME) or a samples file"
            )

    def files(self) -> dict[str, SamplesFile]:
        """Return all current samples files by identifier."""
        run_files = (file for run in self.runs.values() for file in run.files())
        return {file.id: file for file in (*run_files, *self.named_files.values())}

    def file(self, identifier: str) -> SamplesFile:
        """Return a samples file. Raises SettingsError for an unknown identifier."""
        try:
            return self.files()[identifier]
        except KeyError:
            raise SettingsError(f"file {identifier!r}: is not in this view") from None

    def run(self, identifier: str) -> RunSource:
        """Return a run. Raises SettingsError for an unknown identifier."""
        try:
            return self.runs[identifier]
        except KeyError:
            raise SettingsError(f"run {identifier!r}: is not in this view") from None

    def index(self, file: SamplesFile) -> SampleIndex:
        """Return the index of a file, which the caller extends. A file that was replaced gets a new index."""
        with self._lock:
            if file.path not in self._indexes or self._indexes[file.path].replaced:
                training, key = file.training, file.reward_key
                self._indexes[file.path] = (
                    SampleIndex(file.path, reward_key=key)
                    if training is None
                    else TrainedSampleIndex(file.path, training, reward_key=key)
                )
            return self._indexes[file.path]

    def open_indexes(self) -> list[SampleIndex]:
        """Return the indexes created so far."""
        with self._lock:
            return list(self._indexes.values())

    def model_folder(self, file: SamplesFile) -> Path | None:
        """Return a folder with the tokenizer for a file, or None if neither run nor manifest has one."""
        if self._model is not None:
            return self._model
        if file.run is not None:
            return self.run(file.run).model_folder()
        path = _manifest(file.path).get("settings", {}).get("model", {}).get("path")
        folder = Path(path) if isinstance(path, str) else None
        return folder if folder is not None and (folder / "tokenizer_config.json").exists() else None

    def image_folders(self, file: SamplesFile) -> list[Path]:
        """Return the folders from which images of a file's samples may be read.

        These are the folder of the run or file, and the folders of the data in run.toml. For a file without a run, the
        data is taken from the manifest.
        """
        if file.run is not None:
            run = self.run(file.run)
            return [run.path, *_data_folders(run.settings)]
        settings = _manifest(file.path).get("settings")
        return [file.path.parent, *_data_folders(dict(_flat(settings)) if isinstance(settings, dict) else {})]

    def catalogue(self) -> dict[str, Any]:
        """Return the runs and files for the page."""
        runs = [
            {"id": run.id, "name": run.name, "path": str(run.path), "state": run.state,
             "files": [file.to_json() for file in run.files()],
             "metrics_bytes": size_of(run.path / "metrics.jsonl"),
             "timeline_bytes": size_of(run.path / "timeline.jsonl")}
            for run in self.runs.values()
        ]  # fmt: skip
        return {"runs": runs, "files": [file.to_json() for file in self.named_files.values()]}

    def settings_table(self) -> dict[str, Any]:
        """Return the settings that differ between the runs, with their values. For one run, return all settings."""
        from slimectl.settings.keys import unused_interpreters

        backends = [run.settings.get("engine.backend", "auto") for run in self.runs.values()]
        unused = {name for backend in backends for name in unused_interpreters(backend)}
        needed = {f"{backend}.python" for backend in backends}
        names = sorted({name for run in self.runs.values() for name in run.settings} - (unused - needed))
        rows = []
        for name in names:
            values = [run.settings.get(name) for run in self.runs.values()]
            if len(values) == 1 or any(value != values[0] for value in values[1:]):
                rows.append({"name": name, "values": values})
        return {"runs": [run.name for run in self.runs.values()], "rows": rows}


def read_view(path: Path) -> tuple[Library, list[SamplesFile]]:
    """Return the library of a path, and the samples files at or below it, oldest first.

    A path in a run's folder (a round, `latest`, an evaluation's file) is looked up in that run, to find its model and
    reward. Raises SettingsError if there are no samples.
    """
    path = follow_links(path)
    target = path.resolve()
    run = next((folder for folder in (path, *path.absolute().parents[:2]) if is_run_folder(folder)), None)
    library = Library([path if run is None else run])
    files = sorted(library.files().values(), key=lambda file: (file.round or 0, file.kind != "round"))
    if run is not None:
        files = [file for file in files if target in (resolved := file.path.resolve(), *resolved.parents)]
    if not files and run is not None and path.is_file():  # another file of the run, such as its training data
        (source,) = library.runs.values()
        key = source.settings.get("score.reward_key")
        files = [SamplesFile(f"{source.id}.x", path, path.name, "samples", source.id, reward_key=key)]
    if not files:
        raise SettingsError(
            f"{path}: has no samples. A run keeps the samples of its rounds with run.keep_samples = true"
        )
    return library, files


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is a run: by its manifest, or by its files if an earlier version wrote no manifest.

    A run.toml is not enough, because it may be a user's settings file.
    """
    return is_run(path) or (
        (path / "run.toml").exists() and any(any(path.glob(name)) for name in ("metrics.jsonl", "step_*"))
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the values of a run's run.toml by dotted key, or an empty dict if it cannot be read."""
    with suppress(OSError, ValueError):
        return dict(_flat(tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))))
    return {}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        pairs += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return pairs


def _data_folders(settings: dict[str, Any]) -> Iterator[Path]:
    """Yield the folders of the prompts in settings, which are given by dotted key."""
    for key, value in settings.items():
        if DATA.fullmatch(key):
            for source in value if isinstance(value, list) else [value]:
                with suppress(OSError, ValueError):
                    yield from source_folders(str(source))


def _json_lines(
    path: Path, offset: int, is_valid: Callable[[dict[str, Any]], bool]
) -> tuple[list[dict[str, Any]], int, bool]:
    """Return the valid lines of a file from a byte offset on, the offset after them, and whether more follow.

    If the file became shorter, e.g. by a resume, returns no lines and offset 0, so that it is read from its start.
    """
    if offset > size_of(path):
        return [], 0, _is_file(path)
    text, start, more = _whole_lines(path, offset)
    return list(filter(is_valid, map(_json_line, text.splitlines()))), start + len(text), more


def _has_metrics(line: dict[str, Any]) -> bool:
    return "step" in line and isinstance(line.get("metrics"), dict)


def _is_span(line: dict[str, Any]) -> bool:
    """Return whether a line has what every span of a timeline has."""
    times = (line.get("start"), line.get("end"))
    has_times = all(isinstance(moment, int | float) and math.isfinite(moment) for moment in times)
    return has_times and isinstance(line.get("lane"), str) and isinstance(line.get("name"), str)


def _whole_lines(path: Path, offset: int) -> tuple[bytes, int, bool]:
    """Return the next complete lines of a file, where they begin, and whether more follow.

    They begin at 0 if the file became shorter than the offset.
    """
    if not _is_file(path):
        return b"", 0, False
    with path.open("rb") as file:
        start = offset if offset <= size_of(path) else 0
        file.seek(start)
        text = file.read(MAX_METRICS_BYTES)
    lines = text[: text.rfind(b"\n") + 1]
    return lines, start, len(text) == MAX_METRICS_BYTES and bool(lines)


def _json_line(line: bytes) -> dict[str, Any]:
    """Return the object in a line, or an empty one if there is none."""
    with suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def _manifest(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        manifest = json.loads(manifest_path(path).read_text(encoding="utf-8"))
        if isinstance(manifest, dict):
            return manifest
    return {}


def _reward_key(path: Path) -> str | None:
    key = _manifest(path).get("settings", {}).get("score", {}).get("reward_key")
    return key if isinstance(key, str) else None


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file. Links do not count, so that no other folder is shown."""
    return path.is_file() and not path.is_symlink()


def size_of(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
