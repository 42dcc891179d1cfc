"""Starts a real SGLang server: `python launch_server.py --model-path DIR …` accepts the flags of sglang.launch_server.

`python launch_server.py --describe` prints the flags of the installed SGLang as JSON instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "supervisor" / "bootstrap"))

import hidden_keys
from describe import describe

hidden_keys.mask_logs()


def described() -> dict[str, dict[str, Any]]:
    """Describe every field of ServerArgs that has a flag: the flag, its possible values, and the default."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return describe(parser, {name for name in ServerArgs.__annotations__ if not name.startswith("_")})


def serve() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs, prepare_server_args
    from sglang.srt.utils import kill_process_tree

    fields = {name for name in ServerArgs.__annotations__ if not name.startswith("_")}
    try:
        run_server(prepare_server_args([*sys.argv[1:], *hidden_keys.flags(fields)]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    if sys.argv[1:] == ["--describe"]:
        print(json.dumps(described()))
    else:
        from parent_watch import leave_with_parent

        leave_with_parent()
        serve()
