"""Answers the page's questions, which have a name and string parameters, with JSON values."""

from __future__ import annotations

import base64
import json
import math
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.cli.viewer import queries
from slimectl.cli.viewer.commands import commands
from slimectl.cli.viewer.conversation import Decode, attempt_tree, conversation, prompt_messages
from slimectl.cli.viewer.library import Library, SamplesFile, size_of
from slimectl.cli.viewer.run_table import findings, seed_groups, settings_columns, summary
from slimectl.cli.viewer.token_view import Decoders, sample_view
from slimectl.data.images import thumbnail
from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.data.prompt_images import record_images
from slimectl.data.records import sample_from_json
from slimectl.data.sample_index import SampleIndex
from slimectl.errors import SettingsError, SlimectlError
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.layers import from_file
from slimectl.settings.loading import resolve
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.types import Sample

INDEX_S = 0.5
"""Seconds that a question waits for an index to grow. The page asks again until the index is complete."""
MAX_UNTRAINED = 100
"""Maximum length of the list of samples that no step trained on."""
MAX_BRANCHES = 200
CLOCKS = ("perf/total_time", "perf/eval_time")
"""Metrics that the page sums to the time axis, which ROLL does not have."""

Parameters = Mapping[str, str]


class ViewApi:
    """Answers the page's questions about a library."""

    def __init__(self, library: Library, load_tokenizer: Callable[[Path], Any]) -> None:
        self.library = library
        self._decoders = Decoders(load_tokenizer)
        self._summaries: dict[str, tuple[int, dict[str, Any]]] = {}
        """For each run, the size of its metrics and its summary."""
        self._diagnoses: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        """For each run, the size of its records and its findings."""
        self.questions: dict[str, Callable[[Parameters], Any]] = {
            "catalogue": lambda parameters: self.library.catalogue(),
            "definitions": lambda parameters: {metric.name: [metric.unit, metric.definition] for metric in CATALOGUE},
            "settings": lambda parameters: self.library.settings_table(),
            "runs": lambda parameters: self._runs(),
            "metrics": self._metrics,
            "findings": self._findings,
            "timeline": lambda p: self.library.run(_text(p, "run")).timeline(_integer(p, "offset", 0)),
            "histograms": self._histograms,
            "dropped": self._dropped,
            "groups": self._groups,
            "group": self._group,
            "sample": self._sample,
            "raw": self._raw,
            "images": self._images,
            "explain": self._explain,
            "prompt": self._prompt,
            "compare": self._compare,
        }

    def answer(self, question: str, parameters: Parameters) -> Any:
        """Return the answer to a question. Raises SettingsError for an unknown question or a wrong parameter."""
        if question not in self.questions:
            raise SettingsError(f"{question}: unknown question. Ask one of {', '.join(self.questions)}")
        return self.questions[question](parameters)

    def preload(self) -> None:
        """Load the tokenizer of the first run or file, before a page asks for it."""
        for file in self.library.files().values():
            if self._decoders.decoder(self.library.model_folder(file)) is not None:
                return

    def _file(self, parameters: Parameters, name: str = "file") -> SamplesFile:
        return self.library.file(_text(parameters, name))

    def _index(self, parameters: Parameters, name: str = "file") -> SampleIndex:
        """Return the index of a file, after extending it for at most INDEX_S seconds."""
        index = self.library.index(self._file(parameters, name))
        index.extend(INDEX_S)
        return index

    def _runs(self) -> dict[str, Any]:
        """Return the table of runs. The metrics of a run are read again only if they have grown."""
        runs = self.library.runs
        for run in runs.values():
            size = size_of(run.path / "metrics.jsonl")
            if self._summaries.get(run.id, (None, {}))[0] != size:
                self._summaries[run.id] = size, summary(run)
        rows = [
            {"id": run.id, "name": run.name} | settings_columns(run) | self._summaries[run.id][1] | {"state": run.state}
            for run in runs.values()
        ]
        return {"runs": rows, "groups": seed_groups(runs.values())}

    def _metrics(self, parameters: Parameters) -> dict[str, Any]:
        run = self.library.run(_text(parameters, "run"))
        offsets = {name: _integer(parameters, name, 0) for name in ("metrics", "perf")}
        answer = run.metrics(offsets)
        if parameters.get("naming") == "roll":
            prompts = int(run.settings.get("run.rollout_batch_size", 1))
            for line in (*answer["metrics"], *answer["perf"]):
                clocks = {name: value for name, value in line["metrics"].items() if name in CLOCKS}
                line["metrics"] = builders.roll_named(line["metrics"], prompts_per_round=prompts) | clocks
        return answer

    def _findings(self, parameters: Parameters) -> list[dict[str, Any]]:
        """Return the findings of `slimectl diagnose` about a run, read again if its records have grown."""
        run = self.library.run(_text(parameters, "run"))
        size = size_of(run.path / "metrics.jsonl") + size_of(run.path / "perf.jsonl")
        if self._diagnoses.get(run.id, (None, []))[0] != size:
            self._diagnoses[run.id] = size, findings(run.path)
        return self._diagnoses[run.id][1]

    def _histograms(self, parameters: Parameters) -> dict[str, Any]:
        file = self._file(parameters)
        # The samples of round n update the weights of version n - 1. An evaluation updates nothing.
        version = file.round - 1 if file.kind == "round" and file.round is not None else None
        return queries.histograms(self._index(parameters), version=version)

    def _dropped(self, parameters: Parameters) -> dict[str, Any]:
        """Return the counts of dropped or marked samples of a round, and if known, the samples not trained on."""
        file = self._file(parameters)
        if file.run is None or file.round is None or file.kind != "round":
            raise SettingsError(f"file {file.id!r}: not the samples of a round")
        counts = self.library.run(file.run).dropped(file.round, _integer(parameters, "offset", 0))
        rows = self._index(parameters).rows_without_training()
        return counts | {"untrained": rows and rows[:MAX_UNTRAINED], "untrained_total": rows and len(rows)}

    def _groups(self, parameters: Parameters) -> dict[str, Any]:
        return queries.list_groups(
            self._index(parameters),
            where=parameters.get("where", ""),
            search=parameters.get("search", ""),
            sort=parameters.get("sort", "group"),
            descending=parameters.get("order") == "down",
            page=_page(parameters),
        )

    def _group(self, parameters: Parameters) -> dict[str, Any]:
        """Return a group, with the messages of multi-turn responses and the trees of attempts with branches."""
        file, index = self._file(parameters), self._index(parameters)
        decode = self._decoders.decoder(self.library.model_folder(file))
        answer = queries.group(index, _integer(parameters, "group"))
        attempts: defaultdict[int, list[int]] = defaultdict(list)
        for sample in answer["samples"]:
            attempts[sample["trajectory"]].append(sample["row"])
            messages = conversation(index.record(sample["row"]), decode)
            response = [message._asdict() for message in messages if message.author != "prompt"]
            sample["messages"] = response if len(response) > 1 else None
        trees = {number: _tree(index, rows, decode, answer["prompt"]) for number, rows in attempts.items()}
        return answer | {"trees": {number: tree for number, tree in trees.items() if tree is not None}}

    def _sample(self, parameters: Parameters) -> dict[str, Any]:
        file, index = self._file(parameters), self._index(parameters)
        decode = self._decoders.decoder(self.library.model_folder(file))
        row = _integer(parameters, "row")
        view = sample_view(index, row, start=_integer(parameters, "start", 0), decode=decode)
        columns = index.columns()
        group = int(columns["group"][row])
        run = None if file.run is None else self.library.run(file.run)
        again = commands(run, file, view["record"], row)
        answer = view | {"group": group, "hash": int(columns["prompt"][row]), "commands": again,
                         "samples": len(columns["group"])}  # fmt: skip
        if view["start"]:
            return answer
        rows = np.flatnonzero((columns["group"] == group) & (columns["trajectory"] == columns["trajectory"][row]))
        messages = [message._asdict() for message in conversation(index.record(row), decode)]
        return answer | {"messages": messages, "tree": _tree(index, rows.tolist(), decode)}

    def _raw(self, parameters: Parameters) -> Any:
        return self._index(parameters).record(_integer(parameters, "row"))

    def _images(self, parameters: Parameters) -> list[dict[str, str]]:
        """Return thumbnails of a sample's images as data URLs, or the error for an image that cannot be read."""
        file, record = self._file(parameters), self._index(parameters).record(_integer(parameters, "row"))
        folders, answers = self.library.image_folders(file), []
        for source in record_images(record, file.path.parent):
            name = source if isinstance(source, str) else "in the record"
            try:
                data = base64.b64encode(thumbnail(source, folders=folders)).decode()
                answers.append({"name": name, "address": f"data:image/png;base64,{data}"})
            except SlimectlError as error:
                answers.append({"name": name, "error": str(error)})
        return answers

    def _explain(self, parameters: Parameters) -> dict[str, Any]:
        """Grade a sample again with the run's verifier and return the explanation."""
        index = self._index(parameters)
        record = index.record(_integer(parameters, "row"))
        (sample,) = graded_again(self.library, self._file(parameters), [record])
        return {"reward": sample.reward, "explanation": sample.metadata.get("explanation")}

    def _prompt(self, parameters: Parameters) -> dict[str, Any]:
        """Return the responses to one prompt in every file of a run, or in all files given by path."""
        number = _integer(parameters, "hash")
        run = parameters.get("run", "")
        files = self.library.run(run).files() if run else list(self.library.named_files.values())
        appearances, complete, prompt, label = [], True, None, None
        deadline = time.monotonic() + INDEX_S
        for file in files:
            index, seconds = self.library.index(file), deadline - time.monotonic()
            complete &= index.extend(seconds) if seconds > 0 else index.complete
            answers = queries.prompt_in(index, number)
            if answers is not None:
                appearances.append({"file": file.to_json(), **answers})
                if prompt is None:
                    record = index.record(answers["rows"][0])
                    prompt, label = record.get("prompt", ""), record.get("label")
        return {"prompt": prompt, "label": label, "appearances": appearances, "complete": complete}

    def _compare(self, parameters: Parameters) -> dict[str, Any]:
        return queries.compare(
            self._index(parameters, "before"),
            self._index(parameters, "after"),
            threshold=_number(parameters, "threshold", 1.0),
            only=parameters.get("only", ""),
            page=_page(parameters),
        )


def _tree(index: SampleIndex, rows: Sequence[int], decode: Decode | None, prompt: Any = None) -> dict[str, Any] | None:
    """Return the branches of an attempt as a tree of messages without the group's prompt, or None for one row."""
    if len(rows) < 2:
        return None
    messages = {row: conversation(index.record(row), decode) for row in rows[:MAX_BRANCHES]}
    start = [] if prompt is None else prompt_messages(prompt)
    if all(branch[: len(start)] == start for branch in messages.values()):
        messages = {row: branch[len(start) :] for row, branch in messages.items()}
    return attempt_tree(messages)


def graded_again(library: Library, file: SamplesFile, records: Sequence[dict[str, Any]]) -> list[Sample]:
    """Grade records of a file with the verifier of its run, with explanations. Raises SettingsError, RecordError."""
    from slimectl.runtime.stage_functions import score

    settings = _score_settings(library, file)
    samples = [
        sample_from_json({key: value for key, value in record.items() if key != "custom_rm_path"}, position=position)
        for position, record in enumerate(records)
    ]
    return list(score(samples, settings))


def _score_settings(library: Library, file: SamplesFile) -> Settings:
    """Return the settings that grade a file's samples in a worker with explanations.

    Raises SettingsError if the reward is a user's function, because a view does not run such code.
    """
    if file.run is None:
        raise SettingsError(
            f"{file.path}: not part of a run, so its verifier is unknown. Use slimectl score FILE --explain"
        )
    path = library.run(file.run).path / "run.toml"
    settings = resolve([from_file(path)]).settings
    if file.dataset is not None and file.dataset in settings.eval.datasets:
        settings = resolve_dataset_settings(settings, file.dataset)
    if own := settings.score.own_functions:
        raise SettingsError(
            f"the reward is {', '.join(own)}, which a view does not run. Use "
            f"slimectl score {shlex.quote(str(file.path))} -c {shlex.quote(str(path))} --explain"
        )
    worker = settings.score.model_copy(update={"workers": 1, "explain": True})
    return settings.model_copy(update={"score": worker})


def json_text(answer: Any) -> str:
    """Return an answer as JSON for a browser: ASCII, with null for numbers that are not finite."""
    try:
        return json.dumps(answer, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(answer), allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _text(parameters: Parameters, name: str) -> str:
    if name not in parameters:
        raise SettingsError(f"{name}: is missing")
    return parameters[name]


def _page(parameters: Parameters) -> slice:
    offset = _integer(parameters, "offset", 0)
    return slice(offset, offset + _integer(parameters, "limit", queries.PAGE.stop))


def _integer(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = parameters.get(name, "" if default is None else str(default))
    try:
        number = int(text)
    except ValueError:
        raise SettingsError(f"{name}: {text[:40]!r} is not a whole number") from None
    if number < 0 or number >= 1 << 63:
        raise SettingsError(f"{name}: {text[:40]} is out of range")
    return number


def _number(parameters: Parameters, name: str, default: float) -> float:
    try:
        return float(parameters.get(name, default))
    except ValueError:
        raise SettingsError(f"{name}: {parameters[name][:40]!r} is not a number") from None
