"""Completion: candidates of a line are those that the command takes, quickly, and a real bash puts them in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from slimectl.cli.app import app
from slimectl.cli.completion import SHELLS, candidates, split

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def offered(line: str) -> list[str]:
    words, last = split(line)
    found = candidates(typer.main.get_command(app), words[1:], last)
    return [word for word, _ in found if word.startswith(last)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("slimectl se", ["serve", "settings"]),
        ("slimectl settings v", ["validate"]),
        ("slimectl run q", ["quickstart"]),
        ("slimectl run --res", ["--resume"]),
        ("slimectl run -s train.lr_w", ["train.lr_warmup_iters="]),
        ("slimectl run quickstart -s run.on_no_signal=", ["run.on_no_signal=warn", "run.on_no_signal=stop"]),
        ("slimectl run -s algorithm.name=gs", ["algorithm.name=gspo"]),
        ("slimectl run -s track.plot=", ["track.plot=true", "track.plot=false"]),
        ("slimectl run -s train.lr=1e-5 --engine ", ["embedded", "sglang", "vllm"]),
        ("slimectl doctor --engine --backend ", ["fsdp", "megatron"]),
        ("slimectl train a.jsonl --algorithm dr", ["dr_grpo"]),
        ("slimectl score a.jsonl --rm-type ma", ["math"]),
        ("slimectl models sh", ["show"]),
        ("slimectl models show glm4-3", ["glm4-32B"]),
        ("slimectl plan --card tin", ["tiny", "tiny-vl"]),
        ("slimectl plan --recompute s", ["selective"]),
        ("slimectl settings explain sft_warmup.l", ["sft_warmup.lr"]),
        ("slimectl score sam", []),
    ],
)
def test_the_candidates_are_what_the_command_takes(line: str, words: list[str]):
    assert offered(line) == words


def test_runs_are_offered_where_a_run_is_taken():
    for name in ("a", "b"):
        (Path("runs") / name).mkdir(parents=True)
    Path("runs/a/run.toml").touch()
    assert offered("slimectl run --resume ") == ["runs/a"]
    assert offered("slimectl inspect runs/") == ["runs/a"]
    assert offered("slimectl inspect --diff runs/a runs/") == ["runs/a"]


def test_a_broken_cache_is_written_again(tmp_path: Path):
    assert offered("slimectl run -s train.min") == ["train.min_lr="]
    [cache] = (tmp_path / "cache" / "slimectl").iterdir()
    cache.write_text("{")
    assert offered("slimectl run -s train.min") == ["train.min_lr="]
    assert cache.read_text().startswith('{"settings"')


def test_candidates_come_without_libraries_that_run_models():
    environment = os.environ | {"_SLIMECTL_COMPLETE": "zsh", "_SLIMECTL_LINE": "slimectl run -s train.lr"}
    command = [sys.executable, "-X", "importtime", "-m", "slimectl"]
    for _ in range(2):  # the first fills the cache, here in the folder that `python -m` searches for modules
        result = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    assert result.stdout.startswith("train.lr=\tLearning rate at its peak\n")
    modules = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "slimectl.cli.completion" in modules
    assert modules & {"torch", "numpy", "transformers", "ray", "aiohttp", "slimectl.builders"} == set()
    assert "slimectl.settings.reference" not in modules, "the second call has not found the cache"


SCRIPTS = {
    "bash": 'source <("$0" completion bash); COMP_LINE="slimectl run -s train.backend="; COMP_POINT=${#COMP_LINE}; '
    '_slimectl "$0"; echo ${COMPREPLY[@]}',
    "fish": "$argv[1] completion fish | source; complete -C 'slimectl run -s train.backend='",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_completes_the_value_behind_a_key(shell: str):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    program = Path(sys.executable).with_name("slimectl")
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    made = subprocess.run(
        [shell, "-c", SCRIPTS[shell], str(program)], env=environment, capture_output=True, text=True, check=True
    )
    assert made.stdout.split() == [
        f"{'' if shell == 'bash' else 'train.backend='}{name}" for name in ("fsdp", "megatron")
    ], made.stderr


def test_the_scripts_of_all_shells_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    for shell in SHELLS:
        app(["completion", shell], standalone_mode=False)
        assert capsys.readouterr().out == (ROOT / "completions" / f"slimectl.{shell}").read_text()
