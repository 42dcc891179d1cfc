"""Harbor task folders in our own sandbox: an instruction, files, a shell for the policy, and a test with a reward."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Messages, Observation, Task
from slimectl.sandbox.runner import Limits
from slimectl.sandbox.shell import Result, Shell

BASES = ("debian", "ubuntu", "python")
"""Base images that this machine's own programs can replace: a shell, the usual tools, Python."""
NETWORK = re.compile(
    r"\b(apt-get|apt|apk|dnf|yum|curl|wget|npm|npx|uv|uvx|git clone|pip3? install|conda|cargo|go get)\b"
)
IGNORED = ("ARG", "CMD", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER")
FENCED = re.compile(r"```(?:bash|sh|shell)\n(.*?)```", re.DOTALL)
SHELL_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the task's folder and read what it prints.",
        "parameters": {
            "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"],
        },
    },
}  # fmt: skip
SHOWN = 8000
"""Characters of a command's output that the policy reads, half from its start and half from its end."""


class UnsupportedTask(Exception):
    """A task needs what the sandbox does not have."""


@dataclass(slots=True)
class Image:
    """The contents of a Dockerfile that are possible without Docker."""

    folder: str = "/app"
    environment: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, str]] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)
    """Commands of RUN with their folders."""


class Harbor(Environment):
    """A task folder of Harbor, or a folder of them. Only tasks that need nothing beyond their base image are used.

    The policy calls the tool `bash`, or writes a fenced bash block if its template has no tools. The first answer with
    neither ends the episode. Then tests/test.sh runs and writes /logs/verifier/reward.txt or reward.json.
    Arguments: `command_timeout_s` (60), `memory_mib` (2048), `disk_mib` (512).
    """

    tasks = "rows"

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        defaults = {"command_timeout_s": 60.0, "memory_mib": 2048, "disk_mib": 512}
        if unknown := set(arguments) - set(defaults):
            raise ValueError(f"env_args: {', '.join(sorted(unknown))} not among {', '.join(defaults)}")
        options = defaults | dict(arguments)
        self._seconds = float(options["command_timeout_s"])
        self._limits = Limits(memory_mib=int(options["memory_mib"]), disk_mib=int(options["disk_mib"]), processes=64)
        root = Path(target)
        folders = [root] if (root / "instruction.md").exists() else sorted(root.glob("*/"))
        folders = [folder for folder in folders if (folder / "instruction.md").exists()]
        if not folders:
            raise ValueError("no task folder (instruction.md, task.toml, environment/Dockerfile, tests/test.sh)")
        self._folders: list[Path] = []
        for folder in folders:
            try:
                self._begin(folder).close()
                self._folders.append(folder)
            except (UnsupportedTask, OSError, tomllib.TOMLDecodeError) as error:
                self.warnings = (*self.warnings, f"{folder.name}: refused: {error}")
        if not self._folders:
            more = f" (and {len(folders) - 1} more)" if len(folders) > 1 else ""
            raise ValueError(self.warnings[0] + more)

    def count(self, split: str) -> int:
        return len(self._folders) if split == "train" else 0

    def reset(self, task: Task) -> Observation:
        self._folder = self._folders[task.index or 0]
        self._shell = self._begin(self._folder)
        self._is_judged = False
        instruction = (self._folder / "instruction.md").read_text(encoding="utf-8")
        return Observation([{"role": "user", "content": instruction}], tools=[SHELL_TOOL])

    def step(self, action: Action) -> Observation:
        blocks = FENCED.findall(action.text)
        if action.tool_calls:
            results = [self._call(call) for call in action.tool_calls]
            messages: Messages = [message for message, _ in results]
            return Observation(messages, {0: 0.0}, is_error=any(failed for _, failed in results))
        if blocks:
            result = self._run(blocks[-1], self._seconds)
            return Observation([{"role": "user", "content": shown(result)}], {0: 0.0})
        return self._judged()

    def close(self) -> Observation:
        observation = Observation(is_done=True) if self._is_judged else self._judged()
        self._shell.close()
        return observation

    def _call(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the message with a call's result, and whether the call was invalid."""
        try:
            command = json.loads(call["arguments"])["command"]
            is_valid = call["name"] == "bash" and isinstance(command, str)
        except (ValueError, TypeError, KeyError):
            is_valid = False
        text = shown(self._run(command, self._seconds)) if is_valid else "error: there is one tool, bash(command)"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}, not is_valid

    def _run(self, command: str, seconds: float) -> Result:
        return self._shell.run(command, folder=self._image.folder, environment=self._environment(), seconds=seconds)

    def _environment(self) -> dict[str, str]:
        python = os.path.dirname(sys.executable)
        path = f"/usr/local/bin:/usr/bin:/bin:{python}"
        return {
            "PATH": path,
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        } | self._image.environment

    def _begin(self, folder: Path) -> Shell:
        """Open a shell with the files of the task's image. Raises UnsupportedTask, or OSError without a sandbox."""
        self._image = image = read_dockerfile(folder / "environment" / "Dockerfile")
        _check(folder)
        tops = {"/" + path.lstrip("/").partition("/")[0] for path in (image.folder, *(to for _, to in image.copies))}
        tops |= {"/app", "/tests", "/logs", "/root"}
        if system := tops & {"/usr", "/bin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys", "/", "/sbin"}:
            raise UnsupportedTask(f"the image writes to {min(system)}")
        shell = Shell(sorted(tops - {"/tmp"}), self._limits)
        try:
            shell.clear(image.folder)
            for source, to in image.copies:
                _copy(shell, source, to)
            for command, place in image.commands:
                shell.run(f"mkdir -p {shlex.quote(place)}", folder="/", environment=self._environment(), seconds=10)
                result = shell.run(command, folder=place, environment=self._environment(), seconds=60)
                if result.status != "ended":
                    raise UnsupportedTask(f"RUN {command[:80]}: {result.status}: {result.output.strip()[-200:]}")
        except BaseException:
            shell.close()
            raise
        return shell

    def _judged(self) -> Observation:
        """Run the task's test and return the reward that it writes."""
        self._is_judged = True
        config = _config(self._folder)
        for place in ("/tests", "/logs"):
            self._shell.clear(place)
        self._shell.clear("/logs/verifier")
        _copy(self._shell, self._folder / "tests", "/tests")
        seconds = float(config.get("verifier", {}).get("timeout_sec", 600.0))
        result = self._run("bash /tests/test.sh", seconds)
        info = {"test": result.status, "test_output": result.output[-2000:]}
        return Observation(rewards={0: self._reward()}, is_done=True, info=info)

    def _reward(self) -> Any:
        """Return the number in reward.txt or the object in reward.json, or 0 if the test wrote neither."""
        try:
            if content := self._shell.read("/logs/verifier/reward.json"):
                values = json.loads(content)
                return {str(name): float(value) for name, value in values.items()}
            return float(self._shell.read("/logs/verifier/reward.txt") or 0.0)
        except (ValueError, AttributeError, TypeError):
            return 0.0


def read_dockerfile(path: Path) -> Image:
    """Read a Dockerfile. Raises UnsupportedTask for anything but files and commands on a base image."""
    image, has_base = Image(), False
    for line in _instructions(path):
        word, _, arguments = line.partition(" ")
        word, arguments = word.upper(), arguments.strip()
        if word == "FROM":
            name = arguments.split()[0].rpartition("/")[2].partition(":")[0]
            if has_base or name not in BASES:
                raise UnsupportedTask(f"FROM {arguments}: only one FROM is supported, with one of {', '.join(BASES)}")
            has_base = True
        elif word == "WORKDIR":
            image.folder = os.path.normpath(os.path.join(image.folder if has_base else "/", arguments))
        elif word == "ENV":
            image.environment |= _variables(arguments)
        elif word in ("COPY", "ADD"):
            *sources, to = [part for part in shlex.split(arguments) if not part.startswith("--chmod")]
            if any(part.startswith(("--", "http")) for part in sources) or not sources:
                raise UnsupportedTask(f"{line[:80]}: can only copy files of the folder")
            image.copies += [
                _placed(path.parent, source, to, image.folder, many=len(sources) > 1) for source in sources
            ]
        elif word == "RUN":
            if need := NETWORK.search(arguments):
                raise UnsupportedTask(f"RUN {arguments[:80]}: needs {need[0]}, and there is no network")
            image.commands.append((arguments, image.folder))
        elif word not in IGNORED:
            raise UnsupportedTask(f"{line[:80]}: {word} needs Docker")
    if not has_base:
        raise UnsupportedTask("environment/Dockerfile: no FROM line")
    return image


def _instructions(path: Path) -> Iterator[str]:
    """Yield the instructions of a Dockerfile, with continued lines joined."""
    if not path.exists():
        raise UnsupportedTask("environment/Dockerfile: no such file")
    text = "\n".join(
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")
    )
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        if line.strip():
            yield line.strip()


def _variables(text: str) -> dict[str, str]:
    """Return the variables of ENV in either form."""
    if "=" in text.split()[0]:
        return dict(part.split("=", 1) for part in shlex.split(text) if "=" in part)
    name, _, value = text.partition(" ")
    return {name: value.strip()}


def _placed(context: Path, source: str, to: str, folder: str, *, many: bool) -> tuple[Path, str]:
    """Return a source of COPY with its target. Raises UnsupportedTask for a pattern or a path outside the folder."""
    path = (context / source.lstrip("/")).resolve()
    if not path.is_relative_to(context.resolve()) or not path.exists():
        raise UnsupportedTask(f"COPY {source}: not a file in {context.name}/")
    place = os.path.join(folder, to)
    is_folder = to.endswith(("/", ".")) or many
    return path, os.path.normpath(os.path.join(place, path.name) if path.is_file() and is_folder else place)


def _copy(shell: Shell, source: Path, to: str) -> None:
    """Write a file, or the files of a folder, into the shell's folders."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for file in files:
        place = to if source.is_file() else f"{to}/{file.relative_to(source)}"
        shell.write(place, file.read_bytes(), file.stat().st_mode & 0o755)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "task.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _check(folder: Path) -> None:
    """Raise UnsupportedTask for a task with its own image, several containers, or a test that needs the network."""
    if image := _config(folder).get("environment", {}).get("docker_image"):
        raise UnsupportedTask(f"task.toml: needs the image {image}")
    if list((folder / "environment").glob("*compose*.y*ml")):
        raise UnsupportedTask("environment: needs Docker Compose")
    test = folder / "tests" / "test.sh"
    if not test.exists():
        raise UnsupportedTask("tests/test.sh: no such file")
    script = re.sub(r"#.*", "", test.read_text(encoding="utf-8"))
    if need := NETWORK.search(script):
        raise UnsupportedTask(f"tests/test.sh: needs {need[0]}, and there is no network")


def shown(result: Result) -> str:
    """Return a command's output as the policy reads it, with its status and without the middle of a long output."""
    text = result.output
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n… {len(text) - SHOWN} characters left out …\n{text[-SHOWN // 2 :]}"
    return text if result.status == "ended" else f"{text}\n[{result.status}]".lstrip("\n")
