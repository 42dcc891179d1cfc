"""Exports a view as one self-contained page, with the page's modules and the answers to its questions."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slimectl.cli.viewer.api import ViewApi, json_text
from slimectl.cli.viewer.library import SamplesFile
from slimectl.cli.viewer.server import PAGE_FILES
from slimectl.data.atomic_replace import write_text

MAX_BYTES = 40 << 20
"""Maximum bytes of answers before compression, so that browsers can open the file."""
GROUPS = (8, 50)
"""Groups to include per samples file, with all their samples: first 8 of every file, then up to 50."""
FULL_BYTES = 64 << 10
"""Remaining bytes below which no further page is tried."""
IMPORT = re.compile(r'from "\./([a-z_]+\.js)"')
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"

UNRESERVED = "!'()*~"
"""Characters that a browser's encodeURIComponent does not escape, unlike Python's quote."""

Question = tuple[str, dict[str, str]]


def write_page(api: ViewApi, path: Path) -> str:
    """Write the page. Return a line with its size and the number of omitted pages. Raises StorageError."""
    answers: dict[str, Any] = {}
    size = skipped = 0
    for question, parameters in _questions(api):
        if MAX_BYTES - size < FULL_BYTES:
            skipped += 1
            continue
        text = json_text(api.answer(question, parameters))
        if size + len(text) > MAX_BYTES:
            skipped += 1
            continue
        size += len(text)
        answers[_address(question, parameters)] = json.loads(text)
    write_text(path, _html(answers))
    omission = f", without {skipped} pages beyond {MAX_BYTES >> 20} MiB" if skipped else ""
    return f"{path}: {path.stat().st_size / 1e6:.1f} MB, opens in any browser{omission}"


def _address(question: str, parameters: dict[str, str]) -> str:
    """Return the address that api.js builds for a question."""
    query = "&".join(f"{name}={quote(value, safe=UNRESERVED)}" for name, value in sorted(parameters.items()) if value)
    return f"{question}?{query}" if query else question


def _questions(api: ViewApi) -> Iterator[Question]:
    """Yield the questions that the page asks while it is browsed, newest evaluations and rounds first."""
    library = api.library
    yield "catalogue", {}
    yield "definitions", {}
    yield "settings", {}
    yield "runs", {}
    for run in library.runs:
        yield "metrics", {"run": run}
        yield "metrics", {"run": run, "naming": "roll"}
        yield "findings", {"run": run}
        yield from _timeline(api, run)
    files = list(library.files().values())
    for file in files:
        library.index(file).extend()
    yield from _comparisons(files)
    files = _newest_first(files)
    for file in files:
        yield "histograms", {"file": file.id}
        yield "groups", {"file": file.id}
        if file.kind == "round":
            yield "dropped", {"file": file.id}
    prompts: set[tuple[str, str]] = set()
    for first, last in pairwise((0, *GROUPS)):
        for file in files:
            groups = api.answer("groups", {"file": file.id})["groups"][first:last]
            for line in groups:
                yield from _group(api, file, line)
                prompt = file.run or "", str(line["hash"])
                if prompt not in prompts:
                    prompts.add(prompt)
                    yield "prompt", {"run": prompt[0], "hash": prompt[1]}


def _timeline(api: ViewApi, run: str) -> Iterator[Question]:
    """Yield the questions with which the page reads a timeline to its end."""
    parameters, more = {"run": run}, True
    while more:
        yield "timeline", parameters
        answer = api.answer("timeline", parameters)
        parameters, more = {"run": run, "offset": str(answer["offset"])}, answer["more"]


def _group(api: ViewApi, file: SamplesFile, line: dict[str, Any]) -> Iterator[Question]:
    """Yield the questions of the page of a group and of the pages of its samples."""
    yield "group", {"file": file.id, "group": str(line["group"])}
    for row in line["rows"]:
        place = {"file": file.id, "row": str(row)}
        yield "sample", place
        yield "raw", place
        if api.library.index(file).record(row).get("multimodal_inputs"):
            yield "images", place


def _newest_first(files: list[SamplesFile]) -> list[SamplesFile]:
    """Return files given by path, then the files of all runs, newest first, an evaluation before its round."""
    places: Counter[str | None] = Counter()
    ranks = []
    for file in sorted(files, key=lambda file: (-(file.round or 0), file.kind != "evaluation")):
        ranks.append((places[file.run], file))
        places[file.run] += file.run is not None
    return [file for _, file in sorted(ranks, key=lambda pair: pair[0])]


def _comparisons(files: list[SamplesFile]) -> Iterator[Question]:
    """Yield comparisons of the first and last evaluation of each dataset, and of two files given by path."""
    datasets = {(file.run, file.dataset) for file in files if file.kind == "evaluation"}
    pairs = []
    for run, dataset in sorted(datasets, key=str):
        evaluations = [file for file in files if (file.run, file.dataset) == (run, dataset)]
        pairs += [(evaluations[0], evaluations[-1])] if len(evaluations) > 1 else []
    named = [file for file in files if file.kind == "samples"]
    pairs += [(named[0], named[-1])] if len(named) > 1 else []
    for before, after in pairs:
        for only in ("", "right", "wrong"):
            yield "compare", {"before": before.id, "after": after.id, "only": only}


def _html(answers: dict[str, Any]) -> str:
    """Return index.html with embedded styles, modules and answers."""
    modules = {
        file.name: IMPORT.sub(r'from "view/\1"', file.read_text(encoding="utf-8"))
        for file in PAGE_FILES.iterdir()
        if file.name.endswith(".js")
    }
    imports = {f"view/{name}": _data_address(text) for name, text in modules.items()}
    styles = "\n".join((PAGE_FILES / name).read_text(encoding="utf-8") for name in ("uplot.css", "style.css"))
    data = base64.b64encode(gzip.compress(json.dumps(answers).encode(), 6)).decode()
    license_text = (PAGE_FILES / "uplot-license.txt").read_text(encoding="utf-8")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<!-- uPlot: {license_text.strip()} -->\n<style>{styles}</style>\n"
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
        f'<script type="application/gzip" id="answers">{data}</script>\n'
        '<script type="module">import "view/main.js";</script>'
    )
    page = (PAGE_FILES / "index.html").read_text(encoding="utf-8")
    links = re.compile(r'<link rel="stylesheet".*?>\n|<script type="module".*?</script>', re.DOTALL)
    return links.sub("", page).replace("</head>", f"{head}\n</head>", 1)


def _data_address(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
