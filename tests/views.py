"""A running view, and samples whose content attacks it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from slimectl.cli.viewer.api import ViewApi
from slimectl.cli.viewer.library import Library
from slimectl.cli.viewer.server import running
from slimectl.runtime import builders

TOKEN = "a-token-of-this-test"
HOSTILE = {
    "script": "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>",
    "end of data": "</script><script>window.attacked = 1</script><!--",
    "direction": "left \u202eright to left\u202c end \u2066isolated\u2069",
    "nul": "a\x00b\x1b[31mred\x1b[0m\x07 \x9b31m",
    "surrogate": "half \ud800 of a pair",
    "long": "x" * 300_000,
    "blank": " \n\t ",
}


@dataclass
class View:
    """A view that answers at an address."""

    address: str
    port: int

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        request = urllib.request.Request(self.address + path, headers=dict(headers or {}))
        return _answer(request)

    def ask(self, question: str) -> Any:
        status, text = self.get(f"api/{question}")
        assert status == 200, text
        return json.loads(text)


def _answer(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def viewing(*paths: Path) -> Iterator[View]:
    """Serve a view of the paths in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    api = ViewApi(Library(paths), builders.tokenizer)
    loop, ended, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with running(api, TOKEN, listening):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(300)
    port = listening.getsockname()[1]
    try:
        yield View(f"http://127.0.0.1:{port}/{TOKEN}/", port)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def page_answers(page: Path) -> dict[str, Any]:
    """Return the answers that a self-contained page carries."""
    text = page.read_text().partition('id="answers">')[2].partition("</script>")[0]
    answers: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    return answers


def hostile_samples(path: Path) -> None:
    """Write a group for each hostile text, which stands in prompt, answer, label and metadata."""
    lines = []
    for group, (name, text) in enumerate(HOSTILE.items()):
        for index in range(2):
            explanation = {"extracted": text[:20], "from": text[:20], "why": text[:50], "span": [0, 4]}
            lines.append({
                "group_index": group, "index": 2 * group + index, "prompt": text[:1000], "response": f"{name}: {text}",
                "label": text[:50], "reward": float(index), "status": "completed", "weight_versions": [text[:20]],
                "response_length": 2, "tokens": [1, 2, 3], "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -4.0],
                "metadata": {"explanation": explanation, "error": text[:60]},
            })  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
