"""Compares the settings, curves and metrics of two runs, or the responses in two files to the same prompts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slimectl.cli.inspect_samples import THRESHOLD, compact, indexed
from slimectl.cli.options import Selection
from slimectl.cli.run_summary import CURVES, run_facts, skipped_settings
from slimectl.cli.terminal import has_colours, one_line, paint, safe_json, sparkline, visible, width
from slimectl.cli.viewer import queries
from slimectl.cli.viewer.library import RunSource, SamplesFile, is_run_folder, read_settings, read_view
from slimectl.errors import SettingsError
from slimectl.settings.keys import toml_value
from slimectl.system import stdio

MAX_WORDS = 3000
"""Maximum words of a response that is compared word by word. The page has the same limit."""
MAX_NAMES = 8
"""Maximum number of metrics shown of the first step that differs."""
CURVE = 24
"""Width of a curve in columns."""
MIN_CURVE = 4
"""Minimum width of a curve in columns. Narrower ones are not drawn."""


def show_comparison(before: Path, after: Path, selection: Selection) -> None:
    """Print how two runs or two samples files differ. Raises SettingsError for a run and something else."""
    are_runs = [is_run_folder(path) for path in (before, after)]
    if not any(are_runs):
        show_difference(before, after, selection)
        return
    if not all(are_runs):
        raise SettingsError(f"{before} and {after}: one is a run and the other is not. Compare two runs or two files.")
    comparison = run_difference(before, after)
    if selection.as_json:
        print(safe_json({"kind": "run difference", "before": str(before), "after": str(after), **comparison}, indent=2))
        return
    for line in _comparison_lines(before, after, comparison):
        print(one_line(line, max(width(), 40)))


def run_difference(before: Path, after: Path) -> dict[str, Any]:
    """Return the settings in which two runs differ, their curves, and the first step whose metrics differ."""
    runs = [RunSource("", path, read_settings(path)) for path in (before, after)]
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in skipped_settings(run.settings))
    settings = {key: [run.settings.get(key) for run in runs] for key in keys}
    curves: dict[str, list[list[float]]] = {}
    for side, path in enumerate((before, after)):
        for name, values in _curves(run_facts(path)):
            curves.setdefault(name, [[], []])[side] = values
    return {
        "settings": {key: values for key, values in settings.items() if values[0] != values[1]},
        "curves": curves,
        "first_difference": _first_difference(*runs),
    }


def _curves(summary: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Yield the curves of a run by name: reward, length, …, then its evaluations."""
    yield from ((title, summary["curves"][title]) for title, _ in CURVES if title in summary["curves"])
    names = dict.fromkeys(evaluation["name"] for evaluation in summary["evaluations"])
    for name in names:
        yield name, [evaluation["value"] for evaluation in summary["evaluations"] if evaluation["name"] == name]


def _first_difference(before: RunSource, after: RunSource) -> dict[str, Any] | None:
    """Return the first step of metrics.jsonl at which two runs differ, with both values, or None if they are equal."""
    lines = [(line for line in run.all_metrics() if not _is_timing(line)) for run in (before, after)]
    for old, new in zip_longest(*lines):
        if old is None or new is None:
            return {"step": (old or new)["step"], "metrics": {}}
        names = dict.fromkeys([*old["metrics"], *new["metrics"]])
        values = {name: [line["metrics"].get(name) for line in (old, new)] for name in names}
        if different := {name: pair for name, pair in values.items() if pair[0] != pair[1]}:
            return {"step": old["step"], "metrics": different}
    return None


def _is_timing(line: dict[str, Any]) -> bool:
    """Return whether a line is from perf.jsonl, whose times differ between equal runs."""
    return "weight_version" not in line and all(name.startswith(("perf/", "memory/")) for name in line["metrics"])


def _comparison_lines(before: Path, after: Path, comparison: dict[str, Any]) -> Iterator[str]:
    yield f"{before}  ->  {after}"
    settings, columns = comparison["settings"], max(width(), 40)
    yield f"settings that differ: {len(settings)}"
    size = max(map(len, settings), default=0)
    room = max(8, (columns - size - 8) // 2)
    for key, (old, new) in settings.items():
        yield f"  {key:<{size}}  {one_line(toml_value(old), room)}  ->  {one_line(toml_value(new), room)}"
    size = max(map(len, comparison["curves"]), default=0)
    room = min(CURVE, (columns - size - 44) // 2)
    for name, sides in comparison["curves"].items():
        finite = [[value for value in values if math.isfinite(value)] for values in sides]
        last = "  ->  ".join(f"{values[-1]:<9.4g}" if values else "-        " for values in finite)
        change = f"{finite[1][-1] - finite[0][-1]:+.3g}" if all(finite) else ""
        blocks = "  ".join(f"{sparkline(values, room):<{room}}" for values in finite if room >= MIN_CURVE)
        yield f"{name:<{size}}  {last}  {change:<9}  {blocks}".rstrip()
    first = comparison["first_difference"]
    if first is None:
        yield "metrics are equal at every step"
        return
    if not first["metrics"]:
        yield f"metrics are equal until step {first['step']}, which only one run has"
        return
    names = list(first["metrics"].items())
    yield f"metrics first differ at step {first['step']}, in {stdio.quantity(len(names), 'metric')}"
    for name, (old, new) in names[:MAX_NAMES]:
        yield f"  {name}  {_number(old)}  ->  {_number(new)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def show_difference(before: Path, after: Path, selection: Selection) -> None:
    """Print the prompts whose rewards differ most between two files, rounds or runs, with two responses compared.

    Raises SettingsError if no prompt has a reward in both.
    """
    (left_library, left_files), (right_library, right_files) = read_view(before), read_view(after)
    first, second = compared_files(left_files, right_files)
    ((_, old),) = indexed(left_library, [first])
    ((_, new),) = indexed(right_library, [second])
    runs = [*left_library.runs.values(), *right_library.runs.values()]
    threshold = next((run.settings[THRESHOLD] for run in runs if THRESHOLD in run.settings), 1.0)
    answer = queries.compare(
        old, new, threshold=threshold, where=selection.condition, sort=selection.sort, page=slice(selection.rows)
    )
    if not answer["shared"] and not selection.condition:
        raise SettingsError(f"{first.path} and {second.path}: no prompt has a reward in both. Score them first")
    if selection.as_json:
        files = {"before": str(first.path), "after": str(second.path)}
        print(safe_json({**files, "kind": "difference", **answer}, indent=2))
        return
    print(f"{first.path}\n{second.path}")
    mean = _change(answer["before_mean"], answer["after_mean"])
    flips = f"{answer['became_right']} became right, {answer['became_wrong']} wrong"
    matching = f" that match {one_line(selection.condition, 60)}" if selection.condition else ""
    print(f"{stdio.quantity(answer['shared'], 'prompt')} in both{matching}, mean reward {mean}, {flips}")
    for change in answer["prompts"]:
        label = one_line(compact(change["label"]), 30)
        print(one_line(f"--- {_change(change['before'], change['after'])}  label {label}  {change['prompt']}", width()))
        texts = [str(index.record(row).get("response", "")) for index, row in
                 ((old, change["before_row"]), (new, change["after_row"]))]  # fmt: skip
        print("\n".join(differing(*texts)))
    if answer["total"] > len(answer["prompts"]):
        print(f"{answer['total'] - len(answer['prompts'])} more. Use --rows to show them")


def compared_files(before: Sequence[SamplesFile], after: Sequence[SamplesFile]) -> tuple[SamplesFile, SamplesFile]:
    """Return the two files to compare: the newest evaluation of the same dataset, else the newest round.

    Of two runs, both files are of the same round. If nothing is comparable, returns the last file of each side.
    """
    for kind in ("evaluation", "round"):
        pairs = [
            (a, b) for a in before for b in after if a.kind == b.kind == kind and a.dataset == b.dataset
            and (a.round == b.round or len(before) == 1 or len(after) == 1)
        ]  # fmt: skip
        if pairs:
            return max(pairs, key=lambda pair: (pair[0].round or 0, pair[1].round or 0))
    return before[-1], after[-1]


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "unknown"
    return f"{before:.3g} -> {after:.3g} ({after - before:+.3g})"


def differing(before: str, after: str) -> list[str]:
    """Return two texts with their differing words marked, by [-…-] and {+…+} if colours are off."""
    if before == after:
        return [f"  {visible(before)}"]
    old, new = (re.findall(r"\s+|\w+|[^\s\w]", text) for text in (before, after))
    if max(len(old), len(new)) > MAX_WORDS:
        return [f"- {visible(before)}", f"+ {visible(after)}"]
    removal, addition = "- ", "+ "
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        removed, added = visible("".join(old[a:b])), visible("".join(new[c:d]))
        removal += removed if tag == "equal" else _marked(removed, "30;41", "[-", "-]")
        addition += added if tag == "equal" else _marked(added, "30;42", "{+", "+}")
    return [removal, addition]


def _marked(text: str, code: str, opening: str, closing: str) -> str:
    if not text:
        return ""
    return paint(text, code) if has_colours() else opening + text + closing
