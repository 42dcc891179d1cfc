"""Completion: candidates of a line are those that the command takes, quickly, and a real bash puts them in."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
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
        ("slimectl run qu", ["quickstart"]),
        ("slimectl run --res", ["--resume"]),
        ("slimectl run -s train.lr_warmup_i", ["train.lr_warmup_iters="]),
        ("slimectl run quickstart -s run.on_no_signal=", ["run.on_no_signal=warn", "run.on_no_signal=stop"]),
        ("slimectl run -s algorithm.name=gs", ["algorithm.name=gspo"]),
        ("slimectl run -s track.plot=", ["track.plot=true", "track.plot=false"]),
        ("slimectl run -s train.lr=1e-5 --engine ", ["auto", "embedded", "sglang", "transformers", "vllm"]),
        ("slimectl doctor --engine --backend ", ["fsdp", "megatron"]),
        ("slimectl train a.jsonl --algorithm dr", ["dr_grpo"]),
        ("slimectl score a.jsonl --rm-type ma", ["math"]),
        ("slimectl models sh", ["show"]),
        ("slimectl models show glm4-3", ["glm4-32B"]),
        ("slimectl plan --card tin", ["tiny", "tiny-qwen3.5", "tiny-vl", "tiny-vl3"]),
        ("slimectl plan --recompute s", ["selective"]),
        ("slimectl settings explain sft_warmup.l", ["sft_warmup.lr"]),
        ("slimectl convert a b --quantize fp8_", ["fp8_tensor", "fp8_channel"]),
        ("slimectl rollout --env gym", ["gymnasium:"]),
        ("slimectl inspect runs/a --sort re", ["reward", "response_length"]),
        ("slimectl inspect runs/a --sort -re", ["-reward", "-response_length"]),
        ("slimectl inspect runs/a --color-by r", ["ratio", "reference"]),
        ("slimectl metrics rollout/no_s", ["rollout/no_signal"]),
        ("slimectl init --from r", ["reward"]),
        (
            "slimectl run -s algorithm.name=s",
            ["algorithm.name=sapo", "algorithm.name=step_reinforce"],
        ),  # not sft
        (
            "slimectl train -s algorithm.name=s",
            ["algorithm.name=sapo", "algorithm.name=step_reinforce", "algorithm.name=sft"],
        ),
        ("slimectl run -s rollout.env=text", ["rollout.env=textarena:"]),
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


def test_settings_that_are_paths_offer_files():
    Path("rewards").mkdir()
    for name in ("rewards/math.py", "rw.py", ".hidden"):
        Path(name).touch()
    assert offered("slimectl run -s score.custom_rm_path=r") == [
        "score.custom_rm_path=rewards/", "score.custom_rm_path=rw.py"
    ]  # fmt: skip
    assert offered("slimectl run -s score.custom_rm_path=rewards/") == ["score.custom_rm_path=rewards/math.py"]


def test_a_broken_cache_is_written_again(tmp_path: Path):
    assert offered("slimectl run -s train.min") == ["train.min_lr="]
    [cache] = (tmp_path / "cache" / "slimectl").iterdir()
    cache.write_text("{")
    assert offered("slimectl run -s train.min") == ["train.min_lr="]
    assert cache.read_text().startswith('{"settings"')


def imported(*command: str, line: str | None = None) -> set[str]:
    """The modules that Python imports for a command; with a `line`, for its completion, which has words to offer."""
    environment = os.environ | ({"_SLIMECTL_COMPLETE": "zsh", "_SLIMECTL_LINE": line} if line else {})
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command], env=environment, capture_output=True, check=True, text=True
    )
    assert result.stdout or not line
    return {text.rpartition("|")[2].strip() for text in result.stderr.splitlines() if text.startswith("import time")}


COMPLETED = (
    "slimectl run --res", "slimectl run -s train.lr", "slimectl run q", "slimectl models show glm4-3",
    "slimectl score a.jsonl --rm-type ma",
)  # fmt: skip


def test_a_completion_imports_little_beyond_the_command_line():
    """So it costs what that costs: 0.13 s of CPU time each on the machine where this was written."""
    command_line = imported("-c", "import slimectl.cli.app")
    assert (
        command_line & {"torch", "numpy", "transformers", "ray", "aiohttp", "pydantic", "slimectl.runtime.builders"}
        == set()
    )
    imported("-m", "slimectl", line=COMPLETED[1])  # fills the cache, here in a folder that is searched for modules
    for line in COMPLETED:
        more = imported("-m", "slimectl", line=line) - command_line
        own = {name for name in more if name.startswith("slimectl")}
        assert {name.partition(".")[0] for name in more - own} <= sys.stdlib_module_names, line
        assert len(own) <= 8, (line, own)
        assert not any(name.startswith("slimectl.settings") for name in own), "the cache is not used"


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


ZSH = """
PS1= RPS1= PROMPT_EOL_MARK=; setopt no_beep no_list_beep; autoload -Uz compinit && compinit -u -D
source <(slimectl completion zsh)
show-line() { print -r -- "BEGIN${BUFFER}END"; BUFFER=; zle accept-line }
zle -N show-line; bindkey '^X' show-line; print READY-$((1+1))
"""
DEADLINE_S = 60.0
"""Seconds after which a shell that says nothing has failed."""


class Terminal:
    """A zsh in a pseudo-terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        pid, self.fd = pty.fork()
        if not pid:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self.pid, self.output = pid, ""

    def type(self, text: str, *, until: str) -> str:
        """Type, and return the first match of `until` in what the shell prints from then on."""
        start, deadline = len(self.output), time.monotonic() + DEADLINE_S
        os.write(self.fd, text.encode())
        while (match := re.search(until, self.output[start:])) is None:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.output
            self.output += os.read(self.fd, 65536).decode(errors="replace")
        return match[1]

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.mark.slow
def test_zsh_puts_in_values_keys_and_files(tmp_path: Path):
    if shutil.which("zsh") is None:
        pytest.skip("needs zsh")
    program = Path(sys.executable).with_name("slimectl")
    (tmp_path / "sampled.jsonl").touch()
    (tmp_path / "setup.zsh").write_text(ZSH)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "xterm", "COLUMNS": "200", "ZDOTDIR": str(tmp_path),
    }  # fmt: skip
    terminal = Terminal(tmp_path, environment)
    try:
        terminal.type("source ./setup.zsh\n", until=r"(READY-2)")
        for typed, completed in {
            "slimectl run -s train.backend=m": "slimectl run -s train.backend=megatron ",
            "slimectl run -s train.lr_warmup_i": "slimectl run -s train.lr_warmup_iters=",  # no blank before the value
            "slimectl score sam": "slimectl score sampled.jsonl ",
        }.items():
            assert terminal.type(f"{typed}\t\x18", until=r"BEGIN(.*)END") == completed
    finally:
        terminal.close()


def test_the_scripts_of_all_shells_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    for shell in SHELLS:
        app(["completion", shell], standalone_mode=False)
        assert capsys.readouterr().out == (ROOT / "completions" / f"slimectl.{shell}").read_text()
