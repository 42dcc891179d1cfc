"""Messages of the library: one logger that other programs can silence or route, without secrets."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.data import checks
from slimectl.data.records import sample_from_json
from slimectl.system.redaction import MASK, remember
from slimectl.system.stdio import LOG_LEVEL, StderrHandler, log_to_file, logger

WARNING = "Sample.rewrad: unknown key, kept unchanged. Did you mean reward?"


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
from slimectl.system.stdio import logger
sample_from_json({{"rewrad": 1.0}})
logger.info("step 1")
"""


@pytest.mark.parametrize(
    ("set_up", "stderr"),
    [
        ("from slimectl.system import stdio; stdio.log_to_stderr()", f"{WARNING}\nstep 1\n"),
        ("", f"{WARNING}\n"),
        ("logging.getLogger('slimectl').setLevel(logging.CRITICAL)", ""),
        (
            "logging.basicConfig(format='r: %(message)s'); from slimectl.system import stdio; stdio.log_to_stderr()",
            f"{WARNING}\nstep 1\n",
        ),
    ],
    ids=["a command", "a program that says nothing of logging", "a program that wants silence", "a hook's own root"],
)
def test_stderr_of_a_process(set_up: str, stderr: str):
    program = [sys.executable, "-c", PROGRAM.format(set_up=set_up)]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", stderr)


AT = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "


@pytest.mark.parametrize(
    ("set_up", "level", "lines"),
    [
        ("from slimectl.executors.child_processes import redirect; redirect(None)", "info",
         [f"{AT}checks.py:\\d+ - Sample.rewrad", f"{AT}<string>:\\d+ - step 1"]),
        ("from slimectl.system import stdio; stdio.log_to_stderr()", "warning", ["Sample.rewrad"]),
        ("from slimectl.system import stdio; stdio.log_to_stderr()", "debug", [f"{AT}checks.py:", f"{AT}<string>:"]),
        ("from slimectl.system import stdio; stdio.log_to_stderr(); stdio.log_to_stderr()", "none",
         ["Sample", "step 1"]),
    ],
    ids=["a rank", "a quiet command", "a command at level debug", "an unknown level"],
)  # fmt: skip
def test_a_level_decides_which_messages_come_and_whether_with_time_and_place(set_up: str, level: str, lines: list[str]):
    program = [sys.executable, "-c", PROGRAM.format(set_up=set_up)]
    environment = {**os.environ, LOG_LEVEL: level}
    result = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    assert len(result.stderr.splitlines()) == len(lines)
    for line, expected in zip(result.stderr.splitlines(), lines, strict=True):
        assert re.match(expected, line), line


def test_a_file_gets_messages_and_the_error_that_ends_the_work(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="slimectl")  # an attribute alone leaves the logger's cache of levels

    def work() -> None:
        logger.info("step 1")
        logger.warning("slow")
        raise ZeroDivisionError("of http://me:password@host")

    with pytest.raises(ZeroDivisionError), log_to_file(tmp_path / "log.txt"):
        work()
    logger.info("step 2")
    first, second, third = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(AT + r"test_logging.py:\d+ - step 1", first)
    assert re.fullmatch(AT + r"WARNING test_logging.py:\d+ - slow", second)
    assert re.fullmatch(AT + rf"ERROR test_logging.py:\d+ - ZeroDivisionError: of http://{MASK}@host", third)


def test_a_run_has_a_log_in_its_folder_whatever_the_terminal_shows(workshop: Workshop):
    workshop.slimectl("run", "--log-level", "error", "-s", "run.num_rollout=1")
    assert "step" not in workshop.stderr
    log = (workshop.folder / "runs" / "a" / "log.txt").read_text()
    assert re.search(AT + r"stdout.py:\d+ - step    1  reward 0", log)
    workshop.slimectl("run", "--log-level", "loud", code=2)
    assert "'loud' is not one of debug, info, warning, error" in " ".join(workshop.stderr.replace("│", " ").split())


def test_a_progress_bar_leaves_the_lines_of_the_steps_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    from slimectl.protocols import NO_PROGRESS
    from slimectl.trackers.stdout import BarTracker

    caplog.set_level(logging.INFO, logger="slimectl")
    to_stderr = StderrHandler()
    logger.addHandler(to_stderr)
    try:
        with log_to_file(tmp_path / "log.txt"):
            tracker = BarTracker(NO_PROGRESS)
            tracker.log({"rollout/step": 1, "rollout/raw_reward": 0.5, "train/step": 1}, step=1)
            tracker.close()
    finally:
        logger.removeHandler(to_stderr)
    assert re.search(AT + r"stdout.py:\d+ - step    1  reward 0.5\n", (tmp_path / "log.txt").read_text())
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_library_prints_nothing_to_stderr_itself():
    import ast
    from pathlib import Path

    import slimectl

    package = Path(slimectl.__file__).parent
    programs = {"sandbox/program.py", "runtime/doctor/probe.py"}  # of child processes
    apart = {"system/stdio.py", "migrate/torch_file.py", "trackers/stdout.py", *programs}
    names = {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    others = ("cli/", "recipes/templates/")  # commands, and files of users
    library = {name for name in names if not name.startswith(others) and "/bootstrap/" not in name} - apart
    prints = [
        f"{name}:{node.lineno}"
        for name in sorted(library)
        for node in ast.walk(ast.parse(names[name].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []
