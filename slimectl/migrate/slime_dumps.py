"""Reads slime's rollout dumps (--save-debug-rollout-data), which are pickles, in a sandboxed process."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from slimectl.data.checks import shown
from slimectl.data.records import sample_from_json
from slimectl.errors import RecordError
from slimectl.migrate import torch_file
from slimectl.sandbox.runner import Limits, run_program
from slimectl.types import Sample

MIB = 1 << 20
MEMORY_PER_MIB = 32
"""Memory limit of the program, per byte of the file. Python numbers are larger than pickled ones."""

OUTPUT_PER_BYTE = 8
"""Limit on bytes of JSON per byte of the file."""


def slime_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a dump. Nothing in the pickle is executed or imported.

    A restricted unpickler reads it in the sandbox that is used for model-written programs: no network, no files,
    another user. Images and routed experts are left out. Raises RecordError, and BackendError if the kernel does not
    allow a sandbox.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    size_mib = len(content) // MIB + 1
    seconds = 30.0 + 4.0 * size_mib
    limits = Limits(
        timeout_s=seconds, test_timeout_s=seconds, memory_mib=512 + MEMORY_PER_MIB * size_mib, processes=1, disk_mib=1,
        max_output=MIB + OUTPUT_PER_BYTE * len(content),
    )  # fmt: skip
    program = f"{inspect.getsource(torch_file)}\nmain()\n"
    [outcome] = run_program(
        program,
        [{"input": base64.b64encode(content).decode()}],
        limits,
        allow_unsandboxed_namespaces=True,
        purpose=f"{path}",
    )
    if outcome.status != "ended":
        reason = outcome.error or outcome.status
        raise RecordError(f"{path}: not a slime rollout dump that can be read here: {reason}")
    for number, line in enumerate(outcome.stdout.splitlines()):
        sample = json.loads(line)
        if not isinstance(sample, dict):
            raise RecordError(
                f"{path}: sample {number}: expected an object, got {shown(sample)}. Use a dump of "
                f"--save-debug-rollout-data"
            )
        try:
            yield sample_from_json(sample, position=number)
        except RecordError as error:
            raise RecordError(f"{path}: sample {number}: {error}") from None
