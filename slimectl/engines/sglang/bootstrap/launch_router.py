"""Starts sglang-router: `python launch_router.py --policy cache_aware …` accepts the flags of its own launcher."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "supervisor" / "bootstrap"))

from parent_watch import run_apart


def route() -> None:
    from sglang_router.launch_router import launch_router, parse_router_args

    args = parse_router_args(sys.argv[1:])
    # sglang-router 0.3.2 always serves metrics, by default on every address and on a fixed port.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        args.prometheus_host, args.prometheus_port = probe.getsockname()
    launch_router(args)


if __name__ == "__main__":
    run_apart(route)  # sglang-router 0.3.2 holds the GIL while it serves
