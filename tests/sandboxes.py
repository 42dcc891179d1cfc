"""Sandboxes for tests: as they are on this machine, and where the kernel grants no namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import BackendError
from slimectl.sandbox.privileges import landlock_version
from slimectl.sandbox.runner import Limits, Outcome, run_program

PATIENT = {"timeout_s": 60.0, "test_timeout_s": 30.0}
"""So that a busy machine fails no program that ends by itself."""

ROOT = Path(__file__).parents[1]
RUN_JOB = """
import ctypes, json, os, sys
from dataclasses import asdict
from slimectl.errors import BackendError
from slimectl.sandbox.runner import Limits, run_program
from slimectl.sandbox.seccomp import ALLOW, EQUAL, ERRNO, LOAD, RETURN, _assembled
from slimectl.sandbox.privileges import PR_SET_NO_NEW_PRIVS, install_filter, libc
program, cases, limits, allowed, namespaces = json.load(sys.stdin)
unshare = 272 if os.uname().machine == "x86_64" else 97
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, unshare), (RETURN, 0, 0, ERRNO | 1), (RETURN, 0, 0, ALLOW)]
if not namespaces:
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    install_filter(_assembled(steps))
try:
    outcomes = run_program(program, cases, Limits(**limits), allow_unsandboxed_namespaces=allowed)
    print(json.dumps([asdict(outcome) for outcome in outcomes]))
except BackendError as error:
    print(json.dumps(str(error)))
"""


def refusal() -> str:
    """Return why this machine has no sandbox; "" if it has."""
    try:
        run_program("", [{"input": ""}], Limits())
    except BackendError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(refusal()), reason=refusal())
needs_landlock = pytest.mark.skipif(landlock_version() < 1, reason="the kernel has no Landlock")


def run(program: str, *cases: dict[str, Any], **limits: Any) -> list[Outcome]:
    """Run a program in the sandbox with all the time that it needs."""
    return run_program(program, list(cases) or [{"input": ""}], Limits(**{**PATIENT, **limits}))


def command(user: int) -> list[str]:
    """Return how to start Python as that user: root, or another who can read the interpreter wherever it lies."""
    python = [sys.executable, "-c", RUN_JOB]
    home, base = str(Path.home()), os.path.realpath(sys.base_prefix)
    if os.getuid() != 0:
        if user == 0:
            pytest.skip("only root can be root")
        return python
    if base.startswith(home + "/"):  # which only root may enter: show it through an open folder of the same name
        hold = "/mnt" if os.path.isdir("/mnt") else "/media"
        script = (
            f"mount --make-rprivate / && mount -t tmpfs -o mode=755 none {hold} && mkdir {hold}/base && "
            f"mount --bind {base} {hold}/base && mount -t tmpfs -o mode=755 none {home} && mkdir -p {base} && "
            f'mount --move {hold}/base {base} && umount {hold} && exec "$@"'
        )
        python = ["unshare", "-m", "sh", "-c", script, "sh", *(become(user) if user else []), *python]
        return python
    return [*(become(user) if user else []), *python]


def become(user: int) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def run_without_namespaces(
    program: str, *cases: dict[str, Any], user: int = 65534, allowed: bool = True, **limits: Any
) -> list[Outcome] | str:
    """Run a program as that user where the kernel grants no namespaces; return outcomes or the refusal."""
    return run_as(user, program, *cases, allowed=allowed, namespaces=False, **limits)


def run_as(
    user: int,
    program: str,
    *cases: dict[str, Any],
    allowed: bool = False,
    namespaces: bool = True,
    **limits: Any,
) -> list[Outcome] | str:
    """Run a program in a sandbox that this user starts; return outcomes or the refusal."""
    job = json.dumps([program, list(cases) or [{"input": ""}], {**PATIENT, **limits}, allowed, namespaces])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/", "TMPDIR": "/tmp"}
    result = subprocess.run(
        command(user), input=job, env=environment, capture_output=True, text=True, check=False, cwd="/"
    )
    if not result.stdout:
        raise AssertionError(result.stderr)
    answer = json.loads(result.stdout)
    return answer if isinstance(answer, str) else [Outcome(**outcome) for outcome in answer]
