"""MkDocs hooks of the site: pages generated from the code, pages from outside of docs/, and links between them."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from slimectl.cli.app import app
from slimectl.cli.metrics import markdown_table
from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.keys import toml_value
from slimectl.settings.reference import entries

ROOT = Path(__file__).parent.parent
TEXTS = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md",
         "benchmarks/RESULTS.md": "benchmarks.md"}  # fmt: skip
"""Files outside of docs/ that are pages of the site."""

FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, uri in TEXTS.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for uri, content in example_pages().items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and write links and fences as MkDocs reads them."""
    uri = page.file.src_uri
    markdown = re.sub(r"^<!-- generated: (.+) -->$", lambda match: GENERATED[match[1]](), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^(```\w+) (?=[\w.]+$)(\w+\.\w+)?.*$", _title, markdown, flags=re.MULTILINE)
    source = next((path for path, target in TEXTS.items() if target == uri), f"docs/{uri}")
    if source in TEXTS:  # lists of GitHub are indented by 3 spaces, and lists of Markdown by 4
        markdown = re.sub(r"^ {3}", "    ", markdown, flags=re.MULTILINE)
    parts = FENCE.split(markdown)
    parts[::2] = [
        re.sub(r"\[([^\[\]]+)\]\(([^)\s]+)\)", lambda link: _link(link, source, uri), part) for part in parts[::2]
    ]
    return "".join(parts)


def _title(fence: re.Match[str]) -> str:
    return f'{fence[1]} title="{fence[2]}"' if fence[2] else fence[1]


def _link(link: re.Match[str], source: str, uri: str) -> str:
    """Return a link of a file as a link of its page, or only its text if the site has no such page."""
    path, mark, anchor = link[2].partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return link[0]
    target = os.path.normpath(os.path.join(os.path.dirname(source), path))
    if target.startswith("examples/"):
        page = f"examples/{Path(target).parts[1].partition('.')[0]}.md"
    elif target.startswith(TEMPLATES):
        page = f"examples/{Path(target).relative_to(TEMPLATES).parts[0]}.md"
    elif target.startswith("docs/"):
        page = target.removeprefix("docs/")
    elif target in TEXTS:
        page = TEXTS[target]
    else:
        return link[1]
    shown = _title_of(ROOT / target) if link[1].endswith(".md") and target.endswith(".md") else link[1]
    return f"[{shown}]({os.path.relpath(page, os.path.dirname(uri) or '.')}{mark}{anchor})"


def _title_of(page: Path) -> str:
    """Return the title of a page, up to a colon, which a link has in place of a file name."""
    return re.search(r"^# ([^:\n]+)", page.read_text(encoding="utf-8"), re.MULTILINE)[1]


LANGUAGES = {".py": "python", ".toml": "toml"}
"""Languages of the files of examples/ by suffix."""
TEMPLATES = "slimectl/recipes/templates/"


def example_pages() -> dict[str, str]:
    """Return a page for each file and folder of examples/, and for each template of `slimectl init`."""
    pages = {}
    templates = {file.parent for file in (ROOT / TEMPLATES).glob("*/slimectl.toml")}
    for path in sorted([*(ROOT / "examples").iterdir(), *templates]):
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        members = [each for each in files if each.suffix in LANGUAGES]
        if path.suffix == ".ipynb":
            text = "\n".join(_cells(path))
        elif not members:  # a cache, or the folder of an editor
            continue
        else:
            text = "".join(
                f'```{LANGUAGES[each.suffix]} title="{each.relative_to(ROOT)}"\n{each.read_text()}```\n\n'
                for each in members
            )
        uri = f"examples/{path.name.partition('.')[0]}.md"
        pages[uri] = pages.get(uri, f"# {path.name.partition('.')[0]}\n\n") + text
    return pages


def _cells(notebook: Path) -> Iterator[str]:
    yield f"This page shows `{notebook.relative_to(ROOT)}`. Open that file in Jupyter to run it.\n"
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        yield re.sub(r"^# .*\n*", "", text) + "\n" if cell["cell_type"] == "markdown" else f"```python\n{text}\n```\n"


def settings() -> str:
    """Return every setting with type, default and meaning, and what algorithms change."""
    grpo = {entry.key: entry for entry in entries() if entry.key.count(".") == 1 and entry.default != entry.key[10:]}
    lines, section = [], ""
    for entry in grpo.values():
        if section != (section := entry.key.partition(".")[0]):
            lines.append(f"## {section}\n")
        lines.append(f"#### {entry.key}\n\n`{_value(entry.default)}` ({entry.kind}). {_escaped(entry.text)}\n")
    lines.append("## Defaults and settings of each algorithm\n")
    for name in ALGORITHMS:
        lines.append(f"### {name}\n")
        own = [entry for entry in entries() if entry.key.startswith(f"algorithm.{name}.") and entry.kind != name]
        for entry in own:
            same = grpo.get(f"algorithm.{entry.key.rpartition('.')[2]}")
            if same is None or same.default != entry.default:
                text = f": {_escaped(entry.text)}" if same is None else ""
                lines.append(f"- `{entry.key.rpartition('.')[2]} = {_value(entry.default)}`{text}")
        lines.append("")
    return "\n".join(lines)


def _value(value: Any) -> str:
    return toml_value(value).replace("\n", " ")


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>{}\[\]|])", r"\\\1", text)


def commands() -> str:
    """Return help, arguments and options of every command."""
    return "\n".join(_command(typer.main.get_command(app), "slimectl"))


def _command(command: Any, name: str) -> Iterator[str]:
    if name != "slimectl":
        yield f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n"
        rows = [(parameter, getattr(parameter, "help", None) or "") for parameter in command.params]
        rows = [(parameter, text) for parameter, text in rows if not getattr(parameter, "hidden", False)]
        if rows:
            yield "| option | meaning |\n|---|---|"
        for parameter, text in rows:
            names = (
                ", ".join([*parameter.opts, *parameter.secondary_opts]) if text or parameter.opts else parameter.name
            )
            yield f"| `{names if names.startswith('-') else names.upper()}` | {_escaped(text)} |"
        yield ""
    for child in getattr(command, "commands", {}).values():
        if not child.hidden:
            yield from _command(child, f"{name} {child.name}")


def metrics(naming: str) -> str:
    """Return the table of `slimectl metrics --naming NAMING --markdown`."""
    return markdown_table(metric for metric in CATALOGUE if metric.naming == naming)


GENERATED = {"settings": settings, "commands": commands, "metrics slime": partial(metrics, "slime"),
             "metrics roll": partial(metrics, "roll")}  # fmt: skip
