"""Starts a real vLLM server: `python launch_server.py --model DIR …` accepts the flags of `vllm serve`.

`python launch_server.py --describe` prints the flags of the installed vLLM as JSON instead. vLLM's worker processes
import the module worker_extension next to this file.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "supervisor" / "bootstrap"))

import hidden_keys
from describe import describe


def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def fork_engine() -> None:
    """Fork the engine's process on a CPU. vLLM 0.32.0 spawns it, which imports torch and vLLM again.

    vLLM does so to set OpenMP variables, which the launch command already sets. Delete when vLLM forks.
    """
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def serve() -> None:
    gc.disable()  # collections would scan the objects of all modules again and again
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    args = parser().parse_args([*sys.argv[1:], *hidden_keys.flags(())])
    validate_parsed_serve_args(args)
    if os.environ.get("SLIMECTL_VLLM_FORK") == "1":
        fork_engine()
    gc.freeze()
    gc.enable()
    uvloop.run(run_server(args))


if __name__ == "__main__":
    hidden_keys.mask_logs()
    if sys.argv[1:] == ["--describe"]:
        described = parser()
        print(json.dumps(describe(described, {action.dest for action in described._actions})))
    else:
        from parent_watch import leave_with_parent

        leave_with_parent()
        serve()
