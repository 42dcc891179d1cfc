"""Messages of the library: one logger that other programs can silence or route, without secrets."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from slimectl.data import checks
from slimectl.data.records import sample_from_json
from slimectl.redaction import MASK, remember
from slimectl.stdio import logger

WARNING = "Sample.rewrad: unknown key, kept as it is; did you mean reward?"


class Routed(logging.Handler):
    """Collects messages, as an embedding program would."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.module}: {self.format(record)}")


@pytest.fixture
def routed():
    handler = Routed()
    logging.getLogger("slimectl").addHandler(handler)
    yield handler
    logging.getLogger("slimectl").removeHandler(handler)


def test_a_message_of_the_library_goes_to_a_handler_and_names_its_module(routed: Routed):
    checks._warned.clear()
    sample_from_json({"rewrad": 1.0})
    assert routed.lines == [f"WARNING checks: {WARNING}"]


def test_secrets_are_masked_before_any_handler_sees_them(routed: Routed):
    remember("s3cret-of-the-log")
    logger.warning("asked %s with s3cret-of-the-log", "http://me:password@host/v1")
    assert routed.lines == [f"WARNING test_logging: asked http://{MASK}@host/v1 with {MASK}"]


PROGRAM = """
import logging, sys
{set_up}
from slimectl.data.records import sample_from_json
from slimectl.stdio import logger
sample_from_json({{"rewrad": 1.0}})
logger.info("step 1")
"""


@pytest.mark.parametrize(
    ("set_up", "stderr"),
    [
        ("from slimectl.stdio import log_to_stderr; log_to_stderr()", f"{WARNING}\nstep 1\n"),
        ("", f"{WARNING}\n"),
        ("logging.getLogger('slimectl').setLevel(logging.CRITICAL)", ""),
        (
            "logging.basicConfig(format='r: %(message)s'); from slimectl.stdio import log_to_stderr; log_to_stderr()",
            f"{WARNING}\nstep 1\n",
        ),
    ],
    ids=["a command", "a program that says nothing of logging", "a program that wants silence", "a hook's own root"],
)
def test_stderr_of_a_process(set_up: str, stderr: str):
    program = [sys.executable, "-c", PROGRAM.format(set_up=set_up)]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", stderr)


def test_the_library_prints_nothing_to_stderr_itself():
    import ast
    from pathlib import Path

    import slimectl

    package = Path(slimectl.__file__).parent
    apart = {"stdio.py", "sandbox/program.py", "trackers/stdout.py"}
    names = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    library = {name for name in names if not name.startswith("cli/") and "/bootstrap/" not in name} - apart
    prints = [
        f"{name}:{node.lineno}"
        for name in sorted(library)
        for node in ast.walk(ast.parse(names[name].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []
