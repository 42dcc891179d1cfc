"""Task folders of Harbor in our own sandbox: files, the policy's shell, the test's reward, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimectl.agents.environments.harbor import SHOWN, Harbor, UnsupportedTask, read_dockerfile, shown
from slimectl.agents.environments.port import Action, Observation, Task
from slimectl.sandbox.shell import Result

DOCKERFILE = """
FROM ubuntu:24.04
# lines
WORKDIR /app
ENV UNIT=line WORDS="a b"
COPY data.txt lists/
RUN mkdir kept && \\
    touch kept/x
"""
TEST = """
cd /app
mkdir -p /logs/verifier
echo "$UNIT $WORDS"
if [ "$(cat answer.txt)" = 3 ] && [ -e kept/x ]; then echo 1 > /logs/verifier/reward.txt
else echo 0.25 > /logs/verifier/reward.txt; fi
"""


def write_task(folder: Path, dockerfile: str = DOCKERFILE, test: str = TEST, config: str = "") -> Path:
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Count the lines of lists/data.txt into answer.txt.\n")
    (folder / "task.toml").write_text(config or "[verifier]\ntimeout_sec = 30.0\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "data.txt").write_text("a\nb\nc\n")
    (folder / "tests" / "test.sh").write_text(test)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbor]:
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder / "count")
    write_task(folder / "needs_gcc", DOCKERFILE + "RUN apt-get update && apt-get install -y gcc\n")
    yield Harbor(str(folder), {"command_timeout_s": 0.7})
    shutil.rmtree(folder)


def call(name: str = "bash", **arguments: Any) -> Action:
    return Action("", [{"id": "1", "name": name, "arguments": json.dumps(arguments)}])


def test_a_task_is_solved_in_the_shell_and_its_test_gives_the_reward(tasks: Harbor):
    assert (tasks.count("train"), tasks.count("eval")) == (1, 0)
    assert [warning.partition(" &&")[0] for warning in tasks.warnings] == ["needs_gcc: refused: RUN apt-get update"]
    first = tasks.reset(Task(0))
    assert isinstance(first, Observation)
    assert first.messages == [{"role": "user", "content": "Count the lines of lists/data.txt into answer.txt.\n"}]
    assert [tool["function"]["name"] for tool in first.tools] == ["bash"]
    wrote = tasks.step(call(command="wc -l < lists/data.txt > answer.txt; pwd; echo $WORDS; sleep 60 & exit 4"))
    assert wrote.messages[0]["content"] == "/app\na b\n\n[exit code 4]"  # and what it left behind holds up nothing
    assert (
        tasks.step(call(command="cat answer.txt; pgrep sleep; ls /work /home")).messages[0]["content"].startswith("3\n")
    )
    cheat = "mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.json; ln -s /app /tests/x"
    assert tasks.step(call(command=cheat)).messages[0]["content"] == ""
    assert tasks.step(call(command="sleep 9")).messages[0]["content"] == "[out of time]"
    assert tasks.step(call("sh", command="ls")).is_error
    final = tasks.step(Action("done"))
    assert (final.rewards, final.is_done, final.info) == (
        {0: 1.0},
        True,
        {"test": "ended", "test_output": "line a b\n"},
    )
    tasks.close()


def test_a_model_without_tools_writes_a_block_and_an_episode_cut_off_is_judged_at_its_end(tasks: Harbor):
    tasks.reset(Task(0))
    said = tasks.step(Action("so:\n```bash\ncurl http://10.0.0.1 || echo 2 > answer.txt; cat answer.txt\n```"))
    assert said.messages[0]["content"].endswith("2\n")
    assert tasks.close().rewards == {0: 0.25}


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("FROM node:20\n", "FROM node:20: only one FROM is supported, with one of debian, ubuntu, python"),
        ("FROM ubuntu\nFROM ubuntu\n", "FROM ubuntu: only one FROM is supported"),
        ("FROM ubuntu\nRUN pip install numpy\n", "RUN pip install numpy: needs pip install, and there is no network"),
        ("FROM ubuntu\nENTRYPOINT /start\n", "ENTRYPOINT needs Docker"),
        ("FROM ubuntu\nCOPY ../../secret .\n", "COPY ../../secret: not a file in"),
        ("FROM ubuntu\nCOPY --from=build /x .\n", "can only copy files of the folder"),
        ("WORKDIR /app\n", "no FROM line"),
    ],
)
def test_an_image_that_needs_more_is_refused_with_the_reason(tmp_path: Path, dockerfile: str, reason: str):
    (tmp_path / "Dockerfile").write_text(dockerfile)
    with pytest.raises(UnsupportedTask, match=reason):
        read_dockerfile(tmp_path / "Dockerfile")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test": "curl -LsSf https://astral.sh/uv | sh\n"}, "tests/test.sh: needs curl"),
        ({"config": '[environment]\ndocker_image = "x/y"\n'}, "task.toml: needs the image x/y"),
        ({"dockerfile": "FROM ubuntu\nWORKDIR /usr/src\n"}, "the image writes to /usr"),
        ({"dockerfile": "FROM debian\nRUN exit 3\n"}, "RUN exit 3: exit code 3"),
        ({"config": "not toml"}, "refused"),
    ],
)
def test_a_single_task_that_cannot_run_here_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, str], reason: str
):
    with pytest.raises(ValueError, match=reason):
        Harbor(str(write_task(tmp_path / "task", **changes)), {})


def test_long_output_loses_its_middle_and_a_wrong_argument_is_named():
    text = shown(Result("ended", "a" * SHOWN + "b" * SHOWN))
    assert (text[0], text[-1], f"{SHOWN} characters left out" in text) == ("a", "b", True)
    with pytest.raises(ValueError, match="env_args: memory not among command_timeout_s, memory_mib, disk_mib"):
        Harbor("x", {"memory": 1})
    with pytest.raises(ValueError, match="no task folder"):
        Harbor("x", {})
