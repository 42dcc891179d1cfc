"""A small real HTTP server as the child of a ServerProcess."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram

SERVER = """
    import http.server, os, subprocess, sys, threading, time
    host, port = sys.argv[1], int(sys.argv[2])
    {before}
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_):
            pass
    http.server.ThreadingHTTPServer((host, port), Answer).serve_forever()
"""


def command(code: str, host: str, port: int) -> list[str]:
    return [sys.executable, "-c", code, host, str(port)]


def server(folder: Path, before: str = "", *, name: str = "small server", **options: Any) -> ServerProcess:
    """The process of a server, whose program does `before` first; further arguments are in sys.argv[3:]."""
    code = textwrap.dedent(SERVER).format(before=textwrap.dedent(before))
    options = {"log": folder / "server.log", "start_timeout_s": 20.0} | options
    return ServerProcess(name, ServerProgram(partial(command, code)), ServerOptions(**options))
