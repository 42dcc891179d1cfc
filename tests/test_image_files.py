"""Dockerfiles: what a linter and a parser see without building them."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parent.parent
FILES = ("Dockerfile", "Dockerfile.gpu")
HADOLINT = Path(sys.executable).with_name("hadolint")
INSTALLED = {"uv", "slimectl", "fi", "exit"}
"""Programs that an earlier step of the files installs, and words of the shell."""


class Stage:
    """A stage of a Dockerfile: its base, its name, and its instructions."""

    def __init__(self, line: str) -> None:
        self.base, _, self.name = line.partition(" AS ")
        self.steps: list[tuple[str, str]] = []

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]


def stages(file: str) -> dict[str, Stage]:
    found: list[Stage] = []
    for step in DockerfileParser(fileobj=(ROOT / file).open("rb"), env_replace=False).structure:
        if step["instruction"] == "FROM":
            found.append(Stage(step["value"]))
        elif found and step["instruction"] != "COMMENT":
            found[-1].steps.append((step["instruction"], step["value"]))
    return {stage.name: stage for stage in found}


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE))


@pytest.mark.parametrize("file", FILES)
def test_the_linter_finds_nothing(file: str):
    result = subprocess.run([HADOLINT, file], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_linter_finds_a_fault(tmp_path: Path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    result = subprocess.run([HADOLINT, "Dockerfile"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "DL3006" in result.stdout  # no tag


@pytest.mark.parametrize("file", FILES)
def test_the_last_stage_runs_slimectl_as_a_user_without_rights(file: str):
    last = list(stages(file).values())[-1]
    installed = stages(file)[last.base]
    assert last.name == "slimectl"
    assert last.values("USER") == ["1000"]
    assert installed.values("ENTRYPOINT") == ['["tini", "--", "slimectl"]']
    assert installed.values("WORKDIR")[-1] == "/workspace"  # launch.folder of a Kubernetes job
    assert any("/etc/profile.d/slimectl.sh" in step for step in installed.values("RUN"))  # KubeRay's login shell


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_exists_and_is_sent_to_the_builder(file: str):
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignore if line.startswith("!")]
    sources = {name for stage in stages(file).values() for value in stage.values("COPY") for name in value.split()[:-1]}
    assert {"pyproject.toml", "slimectl", "models", "completions"} < sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), source


def test_the_build_of_the_wheel_finds_its_files():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {value.split()[0] for value in stages("Dockerfile")["installed"].values("COPY")}
    for needed in (*wheel["packages"], *wheel["force-include"]):
        assert needed.split("/")[0] in copied, needed


def test_engine_images_have_the_versions_of_the_constraints():
    gpu = stages("Dockerfile.gpu")
    assert gpu["sglang"].base == f"lmsysorg/sglang:v{pins('constraints-gpu.txt')['sglang']}-cu130-runtime"
    assert gpu["vllm"].base == f"vllm/vllm-openai:v{pins('constraints-gpu-vllm.txt')['vllm']}"
    assert gpu["sglang"].values("COPY") == ["constraints-gpu.txt /tmp/slimectl/constraints.txt"]
    assert gpu["vllm"].values("COPY") == ["constraints-gpu-vllm.txt /tmp/slimectl/constraints.txt"]
    assert gpu["installed"].base == "${ENGINE}"
    for file in FILES:  # one uv for both
        assert stages(file)["installed"].values("ARG")[-1] == "UV_VERSION=0.13.9"


@pytest.mark.parametrize("file", FILES)
def test_the_extras_exist_and_ray_has_its_job_server(file: str):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join(stages(file)["installed"].values("RUN"))
    asked = {name.strip('"') for name in re.findall(r"--extra (\S+)", text)} - {"${ENGINE}"}
    assert "ray" in asked
    assert asked <= extras.keys()
    assert "'ray[default]'" in text


@pytest.mark.parametrize("file", FILES)
def test_every_command_is_a_program_of_the_image(file: str):
    apt = " ".join(re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", (ROOT / file).read_text()))
    for stage in stages(file).values():
        for step in stage.values("RUN"):
            script = re.sub(r"--mount=\S+|'[^']*'|\"[^\"]*\"", "x", step)
            for command in re.split(r"&&|\|\||\||;", script):
                words = [word for word in command.split() if word != "x" and not re.fullmatch(r"\w+=\S*", word)]
                name = next((word for word in words if word not in ("{", "if", "then", "}", "!")), None)
                assert name is None or name in INSTALLED or shutil.which(name) or name in apt, command
