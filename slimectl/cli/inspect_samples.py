"""Selects and prints samples of files and runs for `slimectl inspect`: filtered, sorted, or of one prompt."""

from __future__ import annotations

import heapq
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.cli.chat_text import messages_text
from slimectl.cli.options import Selection
from slimectl.cli.score import explanation_text
from slimectl.cli.terminal import has_colours, one_line, safe_json, sparkline, visible, width
from slimectl.cli.tokens import legend, tokens_text
from slimectl.cli.viewer import queries
from slimectl.cli.viewer.conversation import conversation, prompt_messages, response_turns
from slimectl.cli.viewer.library import Library, SamplesFile, read_view
from slimectl.cli.viewer.token_view import sample_view
from slimectl.data.images import thumbnail
from slimectl.data.prompt_images import record_images
from slimectl.data.records import sample_from_json
from slimectl.data.sample_index import SampleIndex
from slimectl.errors import RecordError, SettingsError, SlimectlError
from slimectl.rewards.components import ComponentValues, means_text
from slimectl.system import stdio
from slimectl.types import ImageSource

THRESHOLD = "eval.success_threshold"
MAX_CHOICES = 8
"""Maximum number of prompts listed in a message."""
MAX_REASON = 400
"""Maximum width of the line that explains a sample's reward, in columns."""

MOST_READ = 10_000
"""Maximum number of samples that are read for the means of their rewards' components."""


@dataclass(frozen=True)
class Place:
    """A sample's row in a file."""

    file: SamplesFile
    index: SampleIndex
    row: int

    def record(self) -> dict[str, Any]:
        """Return the sample's record. If it has no `index`, it gets its position."""
        record = self.index.record(self.row)
        record.setdefault("index", int(self.index.columns()["index"][self.row]))
        return record


@dataclass(frozen=True)
class Matches:
    """Rows of a file that match a filter."""

    file: SamplesFile
    index: SampleIndex
    rows: np.ndarray


def indexed(library: Library, files: Sequence[SamplesFile]) -> Iterator[tuple[SamplesFile, SampleIndex]]:
    """Yield the files with their complete indexes. Lines that are not samples are logged."""
    for file in files:
        index = library.index(file)
        index.extend()
        if index.bad_lines:
            bad = stdio.quantity(index.bad_lines, "line")
            stdio.note(f"{file.path}: {bad} skipped, e.g. {index.errors[0]}", level="warning")
        yield file, index


def show_selection(path: Path, selection: Selection) -> None:
    """Print the samples of a file or a run that match the filter, newest file first. Raises SettingsError."""
    library, files = read_view(path)
    matches = [
        Matches(file, index, queries.matching_rows(index, index.columns(), where=selection.condition))
        for file, index in indexed(library, files[::-1])
    ]
    counts = {"samples": sum(len(match.index) for match in matches), **_counts(matches)}
    places = _first(matches, selection.sort, selection.rows)
    if selection.as_json:
        rows = [place.record() for place in places]
        for row, explanation in zip(rows, explanations(library, places, selection), strict=True):
            if explanation is not None:
                row["metadata"] = {**(row.get("metadata") or {}), "explanation": explanation}
        print(safe_json({"path": str(path), "kind": "samples", **counts, "rows": rows}, indent=2))
        return
    count = stdio.quantity(counts["samples"], "sample")
    if selection.condition:
        count = f"{counts['matches']} of {count} match {one_line(selection.condition, 60)}:"
    mean = "not scored" if counts["mean_reward"] is None else f"mean reward {counts['mean_reward']:.4g}"
    of = "" if selection.condition else "of "
    print(f"{path}: {count} {of}{stdio.quantity(counts['prompts'], 'prompt')}, {mean}{_component_means(matches)}")
    if selection.color_by:
        print(legend(selection.color_by))
    show_places(library, places, selection)
    if counts["matches"] > len(places):
        print(f"{counts['matches'] - len(places)} more. Use --rows to show them")


def _counts(matches: Sequence[Matches]) -> dict[str, Any]:
    """Return the number of matching samples and of their prompts, and the mean of their numeric rewards."""
    rewards = np.concatenate([match.index.columns()["reward"][match.rows] for match in matches])
    prompts = set().union(*(_prompts(match) for match in matches))
    finite = rewards[np.isfinite(rewards)]
    mean = float(finite.mean()) if len(finite) else None
    return {"matches": len(rewards), "prompts": len(prompts), "mean_reward": mean}


def _component_means(matches: Sequence[Matches]) -> str:
    """Return the mean of each component of the matching rewards, or "" if they are numbers or more than MOST_READ."""
    rows = [(match, int(row)) for match in matches for row in match.rows]
    if not rows or len(rows) > MOST_READ or not isinstance(rows[0][0].index.record(rows[0][1]).get("reward"), dict):
        return ""
    values = ComponentValues(rows[0][0].file.reward_key)
    for match, row in rows:
        values.add(match.index.record(row).get("reward"), prompt=int(match.index.columns()["group"][row]))
    return visible(means_text(values.means()))


def _prompts(match: Matches) -> set[int]:
    """Return the hashes of the rows' prompts. The branches of an attempt begin with the prompt of its group."""
    groups, attempts, prompts = (match.index.columns()[name][match.rows] for name in ("group", "trajectory", "prompt"))
    attempts, rows = np.unique(np.stack([groups, attempts]), axis=1, return_counts=True)
    branched = np.isin(groups, attempts[0][rows > 1])
    _, first = np.unique(groups[branched], return_index=True)
    return {*prompts[~branched].tolist(), *prompts[branched][first].tolist()}


def _first(matches: Sequence[Matches], name: str, count: int) -> list[Place]:
    """Return the first places sorted by a field, or the last ones if it begins with -. Missing values come last.

    Raises SettingsError if no sample has the field.
    """
    places = (Place(match.file, match.index, row) for match in matches for row in match.rows.tolist())
    if not name:
        return list(islice(places, count))
    descending, missing, total = name.startswith("-"), list[Place](), 0

    def ranked() -> Iterator[tuple[tuple[int, float, str], Place]]:
        nonlocal total
        for value, place in zip(_values(matches, name.removeprefix("-")), places, strict=True):
            if (rank := queries.sort_rank(value)) is not None:
                total += 1
                yield rank, place
            elif len(missing) < count:
                missing.append(place)

    best = (heapq.nlargest if descending else heapq.nsmallest)(max(count, 1), ranked(), key=itemgetter(0))
    if missing and not total:
        raise queries.unknown_field(name, missing[0].record())
    return [*(place for _, place in best), *missing][:count]


def _values(matches: Sequence[Matches], name: str) -> Iterator[Any]:
    for match in matches:
        yield from queries.field_values(match.index, match.index.columns(), match.rows, name)


def show_places(library: Library, places: Sequence[Place], selection: Selection) -> None:
    """Print each sample with a heading, and an explanation of its reward if there is one."""
    for place, explanation in zip(places, explanations(library, places, selection), strict=True):
        record = place.record()
        print(heading(record, place.file))
        if selection.color_by and record.get("tokens"):
            print(coloured_tokens(library, place, record, selection))
        else:
            print(texts_of(record, library, place.file, selection))
        if explanation is not None:
            print(one_line(f"why: {explanation_text(explanation)}", MAX_REASON))


def explanations(library: Library, places: Sequence[Place], selection: Selection) -> list[dict[str, Any] | None]:
    """Return the explanation of each sample's reward from its record, or with --explain by grading it again.

    Raises SettingsError for a file without a run that tells how it was graded.
    """
    reasons: list[dict[str, Any] | None] = []
    for place in places:
        explanation = (place.record().get("metadata") or {}).get("explanation")
        reasons.append(explanation if isinstance(explanation, dict) and _is_whole(explanation) else None)
    if selection.explain:
        from slimectl.cli.viewer.api import graded_again

        for file in {place.file.id: place.file for place in places}.values():
            rows = [at for at, place in enumerate(places) if place.file.id == file.id and reasons[at] is None]
            for at, sample in zip(rows, graded_again(library, file, [places[at].record() for at in rows]), strict=True):
                reasons[at] = sample.metadata.get("explanation")
    return reasons


def _is_whole(explanation: Mapping[str, Any]) -> bool:
    """Return whether an explanation from a file, which may contain anything, has the fields that a verifier writes."""
    texts = [explanation.get(name) for name in ("from", "why", "extracted")]
    return all(isinstance(text, str) for text in texts[:2]) and isinstance(texts[2], str | None)


def heading(record: Mapping[str, Any], file: SamplesFile | None = None) -> str:
    """Return the line above a sample: its place, status, reward and label. If it failed, add a line with the error."""
    place = f"{file.title}, " if file is not None and file.run is not None else ""
    status = record.get("status", "completed" if "response" in record else "pending")
    reward, label = (one_line(compact(record.get(name)), 200) for name in ("reward", "label"))
    error = (record.get("metadata") or {}).get("error") if isinstance(record.get("metadata"), dict) else None
    shown = f"\nfailed: {one_line(error, 500)}" if isinstance(error, str) else ""
    if rewards := [turn["reward"] for turn in response_turns(record) if "reward" in turn]:
        reward += f" of turns {one_line(' '.join(f'{value:.4g}' for value in rewards), 200)}"
    return f"--- {place}sample {record.get('index', 0)} ({one_line(status, 20)}, reward {reward}, label {label}){shown}"


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else repr(value)


def texts_of(record: Mapping[str, Any], library: Library, file: SamplesFile, selection: Selection) -> str:
    """Return prompt and response of a sample as text that is safe to print, chats by role.

    The turns of a response with several authors are found by its tokens.
    """
    decode = selection.decoder(library, file) if len(response_turns(record)) > 1 else None
    messages = conversation(record, decode)
    prompt, response = (
        messages_text(message for message in messages if (message.author == "prompt") == is_prompt)
        for is_prompt in (True, False)
    )
    return f"{prompt}\n{image_lines(record, library, file)}{response}"


def image_lines(record: Mapping[str, Any], library: Library, file: SamplesFile) -> str:
    """Return a line for each image of a sample. If colours are on, also draws the image in coarse blocks."""
    lines = []
    for number, source in enumerate(record_images(record, file.path.parent), start=1):
        name = source if isinstance(source, str) else "in the record"
        lines.append(f"image {number}: {visible(name, 500)}")
        if has_colours():
            try:
                lines += picture(source, folders=library.image_folders(file))
            except SlimectlError as error:
                lines[-1] += f" ({visible(error, 200)})"
    return "".join(f"{line}\n" for line in lines)


def picture(source: ImageSource, *, folders: Sequence[Path], columns: int = 24) -> list[str]:
    """Return an image as lines of half blocks, two pixels per character. Raises RecordError, MissingExtraError."""
    small = thumbnail(source, side=columns, folders=folders)
    from PIL import Image  # `thumbnail` raises MissingExtraError if it is missing

    pixels_HWC = np.asarray(Image.open(io.BytesIO(small)).convert("RGB"))
    pixels_HWC = pixels_HWC[: len(pixels_HWC) // 2 * 2]
    return [
        "".join(f"\x1b[38;2;{a};{b};{c};48;2;{d};{e};{f}m▀" for (a, b, c), (d, e, f) in zip(upper, lower, strict=True))
        + "\x1b[0m"
        for upper, lower in zip(pixels_HWC[::2].tolist(), pixels_HWC[1::2].tolist(), strict=True)
    ]


def coloured_tokens(library: Library, place: Place, record: Mapping[str, Any], selection: Selection) -> str:
    """Return the tokens of a sample in colours. If its record is invalid, return its texts and the error."""
    try:
        sample_from_json(record)
    except RecordError as error:
        return f"{texts_of(record, library, place.file, selection)}\n({error})"
    view = sample_view(place.index, place.row, start=0, decode=selection.decoder(library, place.file))
    return tokens_text(view, selection.color_by)


# --- one prompt ------------------------------------------------------------------------------------------------------


def show_prompt(path: Path, name: str, selection: Selection) -> None:
    """Print one prompt and its responses in every round, evaluation or file. Raises SettingsError."""
    library, files = read_view(path)
    indexes = list(indexed(library, files))
    number, prompt = _selected_prompt(path, name, [index for _, index in indexes])
    appearances = [
        (file, index, answers) for file, index in indexes
        if (answers := queries.prompt_in(index, number, answers=selection.rows)) is not None
    ]  # fmt: skip
    if selection.as_json:
        lines = [{"file": file.to_json(), **answers} for file, _, answers in appearances]
        print(safe_json({"path": str(path), "kind": "prompt", "prompt": prompt, "appearances": lines}, indent=2))
        return
    _, first_index, first = appearances[0]
    label = first_index.record(first["rows"][0]).get("label")
    print(visible(prompt, 2000) if isinstance(prompt, str) else messages_text(prompt_messages(prompt)))
    means = [answers["mean"] for _, _, answers in appearances if answers["mean"] is not None]
    curve = f", mean reward {means[0]:.3g} {sparkline(means, 30)} {means[-1]:.3g}" if len(means) > 1 else ""
    answers_count = stdio.quantity(sum(len(answers["rows"]) for _, _, answers in appearances), "response")
    files_count = stdio.quantity(len(appearances), "file")
    print(f"label {one_line(compact(label), 60)}, {answers_count} in {files_count}{curve}")
    if selection.color_by:
        print(legend(selection.color_by))
    columns = width()
    for file, index, answers in appearances:
        rewards = " ".join("-" if reward is None else f"{reward:.3g}" for reward in answers["rewards"])
        mean = "" if answers["mean"] is None else f", mean {answers['mean']:.3g}"
        length = "" if answers["length"] is None else f", length {answers['length']:.3g}"
        print(one_line(f"--- {file.title}: reward {rewards}{mean}{length}", max(columns, 40)))
        for answer in answers["answers"]:
            if selection.color_by:
                place = Place(file, index, answer["row"])
                print(coloured_tokens(library, place, index.record(answer["row"]), selection))
            else:
                reward = "-" if answer["score"] is None else f"{answer['score']:.3g}"
                print(one_line(f"{reward:>6}  {answer['response']}", columns))


def _selected_prompt(path: Path, name: str, indexes: Sequence[SampleIndex]) -> tuple[int, Any]:
    """Return the hash and text of the prompt with this text or group number.

    Raises SettingsError if there is none. If there are several, the error lists them.
    """
    if re.fullmatch(r"\d{1,18}", name):
        for index in indexes:
            columns = index.columns()
            for row in (columns["group"] == int(name)).nonzero()[0][:1].tolist():
                return int(columns["prompt"][row]), index.record(row).get("prompt", "")
    prompts: dict[int, Any] = {}
    for index in indexes:
        prompts |= queries.prompts_with(index, name)
    exact = [number for number, prompt in prompts.items() if queries.prompt_text(prompt) == name]
    if len(prompts) == 1 or len(exact) == 1:
        number = (exact or list(prompts))[0]
        return number, prompts[number]
    if not prompts:
        raise SettingsError(f"{path}: no prompt contains {one_line(repr(name), 60)}, and no group has this number")
    choices = [
        f"  {_group_of(indexes, number)}  {one_line(queries.preview(prompt), 60)}"
        for number, prompt in list(prompts.items())[:MAX_CHOICES]
    ]
    more = [f"  … {len(prompts) - MAX_CHOICES} more"] if len(prompts) > MAX_CHOICES else []
    raise SettingsError(
        "\n".join(
            [
                f"{path}: {len(prompts)} prompts contain {one_line(repr(name), 60)}. Give the number of one:",
                *choices,
                *more,
            ]
        )
    )


def _group_of(indexes: Sequence[SampleIndex], number: int) -> int:
    """Return the first group of a prompt."""
    for index in indexes:
        columns = index.columns()
        for row in (columns["prompt"] == number).nonzero()[0][:1].tolist():
            return int(columns["group"][row])
    return 0
