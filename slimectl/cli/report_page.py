"""Turns a report in Markdown into one HTML file without scripts, with its pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from slimectl.cli.terminal import visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = Path(__file__).with_name("report.css")


def page(markdown: str, title: str, pictures: Mapping[str, bytes]) -> str:
    """Return a report as HTML. `pictures` are SVG files by the address that the Markdown gives them.

    HTML in the Markdown is shown as text.
    """
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
