"""Python launchers in the style of slime's `execute_train`: flags are followed by the syntax tree, and never run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import Reading, read

IMPORT = "import slime.utils.external_utils.command_utils as U\n"
BASE = '"--hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 4 --rm-type math --rollout-max-response-len 8 "'
TRAIN = "U.execute_train(train_args=BASE + {}, num_gpus_per_node=8, megatron_model_type=None)"


def reading(folder: Path, text: str, **environ: str) -> Reading:
    (folder / "run.py").write_text((IMPORT + text).replace("BASE", BASE), encoding="utf-8")
    return read(folder / "run.py", environ=environ)


def train(flags: str) -> str:
    return TRAIN.replace("{}", flags)


THIRTY, SOME = train('"--num-rollout 30"'), train('f"--num-rollout {n}"')

FOLLOWED = {
    "a text": THIRTY,
    "an f-string": "N = 15\n" + train('f"--num-rollout {N * 2}"'),
    "a format": train('f"--num-rollout {30:d} --lr {1e-5:.1e}"'),
    "texts that are added": 'a = "--num-rollout "\na += "30 "\n' + train("a"),
    "a condition": "FAST = False\n" + train('f"--num-rollout {3 if FAST else 30}"'),
    "a function": "def flags(n, *, m=2):\n    return f'--num-rollout {n * m} '\n" + train("flags(15)"),
    "an early return": 'def f(b):\n    if b == "x":\n        return "--num-rollout 30"\n    raise ValueError\n'
    + train('f("x")'),
    "a main function": f"def main():\n    {THIRTY}\nif __name__ == '__main__':\n    main()",
    "a test function": f"def test_it():\n    {THIRTY}",
    "a table of flags": 'T = {"num-rollout": 30, "colocate": None}\n'
    + train('" ".join(f"--{k}" if v is None else f"--{k} {v}" for k, v in T.items())'),
    "blocks that are joined": 'B = ["--num-rollout 30 ", "", " --lr 1e-5"]\n'
    + train('" ".join(b.strip() for b in B if b.strip())'),
    "a loop": 'a = ""\nfor name, n in [("rollout-seed", 1), ("num-rollout", 30)]:\n    a += f"--{name} {n} "\n'
    + train("a"),
    "a match": 'match "fsdp":\n    case "megatron":\n        n = 1\n    case "fsdp" | "other":\n        n = 30\n'
    + SOME,
    "a dataclass": "from dataclasses import dataclass, field\n@dataclass\nclass A(U.ExecuteTrainConfig):\n"
    "    n: int = field(default=3)\n    def __post_init__(self):\n        self.n = self.n * 10\na = A()\n"
    + train('f"--num-rollout {a.n} --actor-num-nodes {a.num_nodes}"'),
    "a class": "class A:\n    def __init__(self, n):\n        self.n = n\n    @property\n    def flags(self):\n"
    "        return f'--num-rollout {self.n}'\n" + train("A(30).flags"),
    "an application of typer": "import typer\napp = typer.Typer()\n@app.command()\n"
    f"def run(n: int = typer.Option(30, help='rounds')):\n    {SOME}\napp()",
    "a parser of arguments": "import argparse\np = argparse.ArgumentParser()\n"
    "p.add_argument('--num-rounds', type=int, default=30)\np.add_argument('--fast', action='store_true')\n"
    "a = p.parse_args()\n" + train('f"--num-rollout {a.num_rounds} " + ("--colocate" if a.fast else "")'),
    "a switch of the environment": "N = 3 if U.get_bool_env_var('FEW', 'false') else 30\n"
    + train('f"--num-rollout {N}"'),
    "a variable of the environment": "import os\n" + train("f\"--num-rollout {os.environ.get('ROUNDS', '30')}\""),
    "a variable that is set": "import os\n" + train("f\"--num-rollout {os.environ['SET']}\""),
    "an old signature": 'U.execute_train(train_args=BASE + "--num-rollout 30", num_gpus=8, model_type="qwen3-4B")',
    "positional arguments": 'U.execute_train(BASE + "--num-rollout 30", 8, None)',
    "a list of words": "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py', *(BASE).split(), "
    "'--num-rollout', str(30)], check=True)",
    "a command of a shell": "import os\nos.system('ray job submit -- python3 train.py ' + BASE + ' --num-rollout 30')",
    "a command of a helper": "U.exec_command('cd /x && python3 train.py ' + BASE + ' --num-rollout 30')",
    "lines without backslashes": 'a = """\n--num-rollout 30\n--lr 1e-5\n""".replace("\\n", " ")\n' + train("a"),
}


@pytest.mark.parametrize("program", FOLLOWED.values(), ids=FOLLOWED)
def test_a_launcher_is_followed(program: str, tmp_path: Path):
    ast.parse(program)
    values = reading(tmp_path, program, SET="30").conversion.values
    assert (values["run.num_rollout"], values["model.path"]) == ("30", "/m")


LEFT: dict[str, tuple[str, dict[str, str]]] = {
    "a function elsewhere": (train('f"--wandb-group {U.create_run_id()}"'), {"--wandb-group": "track.group"}),
    "a variable that is not set": (
        "import os\n" + train("f\"--lr {os.environ['LR']}\""), {"--lr": "LR is not set in the environment"}),
    "a condition": (
        'import torch\na = ""\nif torch.cuda.is_available():\n    a = "--lr 1e-5 --colocate "\n'
        + train('a + "--num-rollout 30"'),
        {"--lr": "a condition that is not evaluated (line 4)", "--colocate": "cluster.colocate"}),
    "two branches": (
        'import torch\nif torch.cuda.is_available():\n    a = "--lr 1e-5 "\nelse:\n    a = "--seed 3 "\n' + train("a"),
        {"--lr": "train.lr", "--seed": "run.seed"}),
    "an attribute": (
        "import torch\nclass A:\n    def __init__(self):\n        self.lr = 1e-6\n"
        "        if torch.cuda.is_available():\n            self.lr = 1e-5\na = A()\n"
        + train('f"--lr {a.lr}"'), {"--lr": "a condition"}),
    "a list of the module": (
        "import torch\nF = ['--seed 3']\ndef f():\n    if torch.cuda.is_available():\n"
        "        F.append('--lr 1e-5')\nf()\n"
        + train('" ".join(F)'), {"--lr": "a condition"}),
    "a table": (
        "import torch\nT = {'lr': 1}\nif torch.cuda.is_available():\n    T['lr'] = 2\n"
        + train("f\"--lr {T['lr']}\""), {"--lr": "a condition"}),
    "an exception": (
        "try:\n    import flash_attn\n    a = '--seed 3 '\nexcept ImportError:\n    a = '--lr 1e-5 '\n" + train("a"),
        {"--seed": "a condition", "--lr": "a condition"}),
    "a required argument": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--model', required=True)\n"
        "a = p.parse_args()\n" + train('f"--hf-checkpoint {a.model}"'), {"--hf-checkpoint": "when the program starts"}),
    "a text that is too long": (train('f"--wandb-group {1:>999999999}"'), {"--wandb-group": "track.group"}),
}  # fmt: skip


@pytest.mark.parametrize(("program", "expected"), LEFT.values(), ids=LEFT)
def test_what_a_launcher_alone_does_not_tell_is_left_to_the_user(
    program: str, expected: dict[str, str], tmp_path: Path
):
    omissions = reading(tmp_path, program).conversion.omissions
    reasons = {item.flag.split()[0]: item.reason for item in omissions if item.by_hand}
    assert {flag: expected[flag] in reason for flag, reason in reasons.items()} == dict.fromkeys(expected, True)


def test_every_flag_has_the_line_that_it_is_written_in(tmp_path: Path):
    program = "flags = (\n" + '    "--num-rollout 30 "\n    f"--lr {1e-5} "\n    "--colocate "\n)\n' + train("flags")
    sources = reading(tmp_path, program).conversion.sources
    lines = {key: sources[key].rpartition(":")[2].rstrip(")") for key in ("run.num_rollout", "train.lr", "model.path")}
    assert lines == {"run.num_rollout": "3", "train.lr": "4", "model.path": "7"}


def test_tracking_that_the_environment_decides_is_noted(tmp_path: Path):
    result = reading(tmp_path, train('f"{U.get_default_wandb_args(__file__)} --num-rollout 30"'))
    assert [note.text.endswith("Set track.with by hand") for note in result.notes] == [True]


def test_a_training_that_may_not_start_is_noted(tmp_path: Path):
    notes = reading(tmp_path, "import torch\nif torch.cuda.is_available():\n    " + THIRTY).notes
    assert [note.text.startswith("whether this command is started: it depends on") for note in notes] == [True]
    raises = "import torch\nif not torch.cuda.is_available():\n    raise RuntimeError\n" + THIRTY
    assert reading(tmp_path, raises).notes == []
    guarded = "try:\n    U.exec_command('mkdir /x')\nexcept Exception:\n    pass\n" + THIRTY
    assert reading(tmp_path, guarded).conversion.values["run.num_rollout"] == "30"


def test_a_launcher_may_start_the_asynchronous_program(tmp_path: Path):
    call = 'U.execute_train(BASE, 8, None, train_script="train_async.py")'
    assert reading(tmp_path, call).conversion.values["run.async_level"] == 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("for n in (1, 2):\n    " + SOME, "is started 2 times with other flags"),
        ("for i in range(9):\n  for j in range(9999):\n    k = j\n" + train('""'), "needs more than 30000 steps"),
        ("x = (\n" + train('""'), r"run.py:\d: not valid Python"),
        ('U.exec_command("mkdir /x")', "has no trainer"),
        ("f = lambda: f()\nf()\n" + "-" * 90 + "1", "has no trainer"),
    ],
)
def test_a_launcher_that_is_not_one_is_refused(program: str, message: str, tmp_path: Path):
    with pytest.raises(SettingsError, match=message):
        reading(tmp_path, program)


def test_a_launcher_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("os.system", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    touch = f"import os\nopen({str(tmp_path / 'touched')!r}, 'w')\nos.system('touch x')\n"
    reading(tmp_path, touch + train('"--num-rollout 30"'))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.py"]
