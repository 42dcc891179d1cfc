"""slimectl report"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.errors import MissingExtraError, SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.cli.plot import Chart

SUFFIXES = (".md", ".html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = Path(__file__).with_name("report.css")


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, or a folder that contains runs")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Output: FILE.md or FILE.html. Default: stdout")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing output")] = False,
) -> None:
    """Write a report on runs to send to someone, as Markdown or as one HTML file.

    It has the result, changed settings, curves, findings, evaluations, best and worst samples, versions, hardware,
    data, and the command that repeats the run. No model is loaded. Markdown refers to its curves as FILE.svg.

    Example:

        slimectl report runs/quickstart -o quickstart.html
    """
    from slimectl.cli.run_report import Report
    from slimectl.cli.viewer.library import Library

    picture = out.with_suffix(".svg") if out is not None and out.suffix == ".md" else None
    if out is not None and out.suffix not in SUFFIXES:
        raise SettingsError(f"--out {out}: give a file that ends in {' or '.join(SUFFIXES)}")
    if existing := next((path for path in (out, picture) if path is not None and path.exists() and not force), None):
        raise SettingsError(f"{existing}: already exists. Add --force to replace it")
    library = Library(paths)
    if library.named_files:
        stranger = next(iter(library.named_files.values())).path
        raise SettingsError(f"{stranger}: not a run. Give a run's folder: slimectl report runs/NAME")
    if out is None:
        stdio.emit(Report(library).markdown().rstrip("\n"))
        return
    drawn: dict[str, bytes] = {}

    def draw(charts: Sequence[Chart]) -> str:
        from urllib.parse import quote

        from slimectl.cli.plot import drawing

        parts = {f"curve-{at}": [chart] for at, chart in enumerate(charts)}
        if picture is not None:
            parts = {quote(picture.name): list(charts)}
        try:
            drawn.update((name, drawing(shown, kind="svg", axis="round")) for name, shown in parts.items())
        except MissingExtraError as error:
            return f"No pictures: {error}"
        return "\n".join(f"![curves]({name})" for name in drawn)

    _write(out, Report(library, draw).markdown(), drawn, picture)


def _write(out: Path, markdown: str, drawn: dict[str, bytes], picture: Path | None) -> None:
    from slimectl.data.atomic_replace import write_text

    if picture is None:
        write_text(out, page(markdown, out.stem, drawn))
    else:
        write_text(out, markdown)
        for data in drawn.values():
            write_text(picture, data.decode())
    beside = f", with curves in {picture}" if picture is not None and drawn else ""
    stdio.note(f"{out}: {out.stat().st_size / 1e3:.0f} kB{beside}")


def page(markdown: str, title: str, pictures: Mapping[str, bytes]) -> str:
    """Return a report as HTML. `pictures` are SVG files by the address that the Markdown gives them.

    HTML in the Markdown is shown as text.
    """
    from markdown_it import MarkdownIt

    from slimectl.cli.terminal import visible

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")

    def image(renderer: Any, tokens: Sequence[Any], at: int, *_: Any) -> str:
        source, text = str(tokens[at].attrs.get("src", "")), escape(tokens[at].content)
        if source not in pictures:
            return text
        data = base64.b64encode(pictures[source]).decode()
        return f'<img alt="{text}" src="data:image/svg+xml;base64,{data}">'

    parser.add_render_rule("image", image)
    parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    body = str(parser.render(markdown))
    if pictures:
        body = body.replace("<p><img", '<p class="charts"><img')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(visible(title))}</title>\n<style>{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
