"""`slimectl inspect RUN` is one screen: state, settings, curves, time by phase, warnings, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.cli.run import curve
from slimectl.cli.run_summary import changed_settings, warnings
from slimectl.cli.terminal import shortened, sparkline
from slimectl.cli.viewer.library import Library
from slimectl.data.run_dir import RunDir

SETTINGS = """
[model]
path = "m"
[train]
lr = 1e-3
[run]
name = "a"
num_rollout = 60
[eval]
data = {data}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped run of 40 of 60 rounds with four evaluations, and a log of warnings, one of which attacks."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/a")
    (folder / "step_000040" / "policy").mkdir(parents=True)
    names = ["one", "two", "three", "four"]
    data = ", ".join(f'{name} = "a-file-with-a-long-name-{name}.jsonl"' for name in names)
    (folder / "run.toml").write_text(SETTINGS.format(data=f"{{ {data} }}"))
    (folder / "manifest.json").write_text(json.dumps({"slimectl": "0.2.0", "stage": "run", "recipe": "quickstart"}))
    metrics, perf = [], []
    for step in range(1, 41):
        seconds = {"total": 2.0, "generate": 1.0, "reward": 0.2, "actor_train": 0.5, "wait": 1.2}
        values = {"rollout/step": step, "rollout/raw_reward": step / 40, "rollout/response_len/mean": 100.0 - step,
                  "rollout/entropy": 0.5, "train/entropy_loss": 9.0, "train/loss": -1.0}  # fmt: skip
        metrics.append({"step": step, "rollout_id": step, "metrics": values})
        perf.append({"step": step, "metrics": {f"perf/{name}_time": value for name, value in seconds.items()}})
    for step in (0, 40):
        values = {f"eval/{name}_accuracy": step / 80 for name in names}
        metrics.append({"step": step, "rollout_id": step, "metrics": values})
    perf.append({"step": 40, "metrics": {"perf/eval_time": 20.0}})
    for name, lines in (("metrics", metrics), ("perf", perf)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    at = "[2026-01-01 00:00:00]"
    log = [f"{at} run.py:1 - WARNING of nothing", *[f"{at} WARNING run.py:2 - slow answers ({n})" for n in range(3)],
           f"{at} WARNING run.py:3 - \x1b[2Jcleared " + "x" * 500, f"{at} ERROR run.py:4 - DivergedError: loss is nan",
           "Traceback of another program", f"{at} WARNING run.py:5 - rare"]  # fmt: skip
    (folder / "log.txt").write_text("\n".join(log) + "\n")
    return folder


def screen(run: Path, columns: int = 80) -> list[str]:
    result = CliRunner().invoke(app, ["inspect", str(run)], env={"COLUMNS": str(columns), "LINES": "24"})
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def named(lines: list[str]) -> dict[str, str]:
    return {line[:13].strip(): line[13:] for line in lines}


def test_the_best_checkpoint_is_named_with_and_without_links(run: Path):
    (run / "run.toml").write_text((run / "run.toml").read_text().replace("60", '60\nsave_best = "one_accuracy"', 1))
    state = {"evaluations": [[0, {"eval/one_accuracy": 0.0}], [40, {"eval/one_accuracy": 0.5}]]}
    (run / "step_000040" / "state.json").write_text(json.dumps(state))
    (run / "best").symlink_to("step_000040")
    assert named(screen(run))["best"] == "step_000040: eval/one_accuracy 0.5"
    (run / "best").unlink()
    (run / "best").write_text("step_000040\n")  # on a file system without links
    assert named(screen(run))["best"] == "step_000040: eval/one_accuracy 0.5"


def test_few_or_equal_values_are_a_line_and_not_a_plot(monkeypatch: pytest.MonkeyPatch):
    assert curve([(1, 0.5), (2, 0.25), (3, 1 / 3)], title="loss") == "loss: 0.5, 0.25, 0.333"
    assert curve([(number, 0.0) for number in range(5)], title="reward") == "reward: 0 in all 5"
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = curve([(number, float(number)) for number in range(5)], title="reward").splitlines()
        assert max(map(cell_len, lines)) == min(columns, 160)


@pytest.mark.parametrize("columns", [80, 40])
def test_it_fits_one_screen(run: Path, columns: int):
    lines = screen(run, columns)
    assert sum(-(-cell_len(line) // columns) for line in lines) <= 23
    assert max(map(cell_len, lines[:-2])) <= columns  # the last ones are commands, to be copied whole
    assert not [letter for line in lines for letter in line if ord(letter) < 32]


def test_it_says_how_far_the_run_is_and_where_its_time_goes(run: Path):
    lines = screen(run)
    assert lines[0] == "runs/a: 40 rounds of 60, stopped, 100 s"
    sections = named(lines)
    assert sections["reward"].split()[0::2] == ["0.025", "1", "to"]  # first value, last one, and both extremes
    assert [sections["reward"].split()[1][at] for at in (0, -1)] == ["▁", "█"]
    assert sections["length"].split()[1][0] == "█"
    assert sections["entropy"].split()[0] == "0.5"  # rollout/entropy, not the step's
    assert "loss" not in sections
    assert sections["three"].split() == ["0", "▁█", "0.5"]
    assert "four" not in sections
    assert sections["time"] == "generate 40%, train 20%, evaluate 20%, other 12%, grade 8%"
    assert sections["checkpoints"] == "step_000040"
    assert lines[-2:] == ["next         slimectl view runs/a", "             slimectl run --resume runs/a"]


def test_the_settings_that_differ_are_those_beside_its_recipe(run: Path):
    lines = screen(run)
    assert lines[1] == "settings that differ from quickstart (its value)"
    assert [line for line in screen(run, 40) if line.endswith("more in run.toml")]
    facts = json.loads(CliRunner().invoke(app, ["inspect", str(run), "--json"]).stdout)
    assert facts["settings"]["differ_from"] == "quickstart"
    assert facts["settings"]["values"]["train.lr"] == ["0.001", "0.0005"]
    assert "run.name" not in facts["settings"]["values"]
    (run / "manifest.json").write_text(json.dumps({"slimectl": "0.2.0", "stage": "run", "recipe": "/gone/my.toml"}))
    facts = json.loads(CliRunner().invoke(app, ["inspect", str(run), "--json"]).stdout)
    assert facts["settings"]["values"].keys() == {"model.path", "train.lr", "run.num_rollout", "eval.data"}
    assert facts["settings"]["values"]["train.lr"] == ["0.001", "1e-06"]


def test_the_worst_warnings_come_first_with_their_count(run: Path):
    lines = [line for line in screen(run) if line.startswith(("error", "warning"))]
    assert lines[0] == "error        DivergedError: loss is nan"
    assert lines[1] == "warning      3x slow answers (2)"
    assert lines[2].startswith("warning      ␛[2Jcleared xxx")
    assert len(lines) == 3


def test_a_run_that_goes_on_says_for_how_long(run: Path):
    (run / "step_000040" / "samples.jsonl").touch()
    with RunDir(run).lock():
        lines = screen(run)
    assert lines[0] == "runs/a: 40 rounds of 60, running, 100 s, 50 s left"
    commands = [line.strip() for line in lines[-2:]]
    assert commands == ["slimectl inspect runs/a --follow", "slimectl inspect runs/a --sort reward --explain"]


def test_curves_are_drawn_in_ascii_where_stdout_takes_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimectl.cli.terminal.is_utf8", lambda: False)
    assert sparkline([0.0, 1.0, float("nan"), 7.0], 4) == "_.#"
    assert sparkline([1.0, 3.0, 5.0, 7.0], 2) == "_#"
    assert shortened("a long line", 8) == "a lon..."


def test_wide_letters_take_two_columns():
    assert shortened("漢字漢字", 8) == "漢字漢字"
    assert shortened("漢字漢字", 7) == "漢字漢…"


def test_an_interruption_that_was_resumed_from_is_left_out(run: Path):
    at = "[2026-01-01 00:00:00]"
    way_on = "Continue with: slimectl run --resume runs/a"
    with (run / "log.txt").open("a") as log:
        log.write(f"{at} WARNING report_loop.py:1 - interrupted after round 3. {way_on}\n")
    messages = [warning["message"] for warning in warnings(run / "log.txt")]
    assert f"interrupted after round 3. {way_on}" in messages
    with (run / "log.txt").open("a") as log:
        log.write(f"{at} run.py:2 - resuming runs/a after round 3\n")
    assert [warning["message"] for warning in warnings(run / "log.txt")] == [
        message for message in messages if "interrupted" not in message
    ]


def test_where_an_engine_is_installed_is_no_setting_of_a_run_without_it(run: Path):
    settings = (run / "run.toml").read_text()
    (run / "run.toml").write_text(settings + '[sglang]\npython = "a"\n[vllm]\npython = "b"\n')
    assert not {"sglang.python", "vllm.python"} & changed_settings(run)[1].keys()
    assert "vllm.python" not in str(Library([run]).settings_table())
    (run / "run.toml").write_text(settings + '[engine]\nbackend = "vllm"\n[vllm]\npython = "b"\n')
    assert "vllm.python" in changed_settings(run)[1]
