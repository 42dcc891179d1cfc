"""Start a worker of Ray by forking a process that has imported torch and transformers already.

A machine of Ray runs this program in place of `ray/_private/workers/setup_worker.py`, with the same arguments. Ray's
own starts two interpreters one after the other for every worker, and each imports for seconds. This one asks the
process of `forkserver.ray_workers` for the worker, and ends when the worker has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys

import zygote

ADDRESS = "TEST_RAY_WORKERS"
"""The environment variable with the address of the process that forks."""

RUN_FILE = """
import runpy, sys, ray._raylet, zygote
ray._raylet.setproctitle = lambda title: zygote.write_command_line([title])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Code of `python -c` that runs the file that its first argument names; Ray finds no memory for titles in a fork."""


def main(words: list[str]) -> None:
    """Start `python PROGRAM` in the environment that Ray describes, and wait for its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--language", required=True, choices=["PYTHON"])
    parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
    options, program = parser.parse_known_args(words)
    env = {**os.environ, **options.serialized_runtime_env_context.get("env_vars", {})}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[ADDRESS])
        streams = {0: 0, 1: 1, 2: 2}
        request = zygote.describe(["-c", RUN_FILE, *program], streams, env)
        socket.send_fds(server, [request], [*streams.values()])
        worker = os.pidfd_open(int(server.recv(64)))
    select.select([worker], [], [])


if __name__ == "__main__":
    main(sys.argv[1:])
