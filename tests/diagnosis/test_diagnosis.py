"""Diagnosis of whole runs: live and afterwards, killed, empty, old, of demonstrations; and what the command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.cli.diagnose import finding_lines
from slimectl.data.run_dir import RunDir
from slimectl.diagnosis import Diagnosis, Finding, diagnose_run
from slimectl.diagnosis.diagnosis import read_lines
from slimectl.errors import SettingsError
from slimectl.runtime.recorder import RunRecorder
from slimectl.settings import Settings

NOTHING = ("-s", "score.custom_rm_path=none", "-s", "score.rm_type=exact", "-s", "eval.interval=none")
"""No answer of an untrained model is exactly its label."""
KINDS = ["no-signal", "learning-rate-zero", "truncation"]
"""Findings of a run with NOTHING and a learning rate of 0, the errors first."""


def beginnings(diagnosis: Diagnosis, lines: list[dict]) -> list[tuple[int, str, str]]:
    return [
        (finding.first_round, finding.kind, finding.title)
        for line in lines
        for finding in diagnosis.observe(line)
        if finding.lasts
    ]


def test_a_run_reports_once_what_diagnose_finds_afterwards(workshop: Workshop):
    workshop.slimectl("run", *NOTHING, "--name", "b", "-s", "run.num_rollout=5", "-s", "train.lr=0")
    log, folder = workshop.stderr, workshop.folder / "runs/b"
    diagnosis = Diagnosis({"run.num_rollout": 5, "train.lr": 0.0, "rollout.max_response_len": 12}, folder)
    found = beginnings(diagnosis, list(read_lines(folder)))
    assert [(first, kind) for first, kind, _ in found] == [(1, "learning-rate-zero"), (1, "no-signal"),
                                                           (1, "truncation")]  # fmt: skip
    for _, _, title in found:
        assert log.count(f"{title} (since round 1). ") == 1
    assert log.count("no learning signal in") == 0  # the finding has said it
    assert [finding.kind for finding in diagnose_run(folder)] == KINDS

    screen = workshop.slimectl("diagnose", "runs/b").decode()
    assert screen.startswith(
        "runs/b: 5 rounds, finished, 3 findings\n\nerror     No learning signal: every reward is 0 (since round 1)\n"
    )
    assert "read      docs/reference/findings.md#no-signal\n" in screen
    assert "look      slimectl inspect runs/b --sort reward --explain\n" in screen
    assert b"reward 0" in workshop.slimectl("inspect", "runs/b", "--sort", "reward", "--explain")
    objects = [json.loads(line) for line in workshop.slimectl("diagnose", "runs/b", "--json").splitlines()]
    assert [(each["kind"], each["last_round"]) for each in objects] == [(kind, None) for kind in KINDS]
    assert objects[1]["evidence"][0] == {"metric": "train/lr", "rounds": [1, 2, 3, 4, 5], "values": [0.0] * 5}

    # Lines that are no records, half a line, as a killed run leaves it, and the loss of the times change nothing.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnull\n{"step": 6, "metrics": 7}\n{"step": 6, "metr')
    assert [finding.kind for finding in diagnose_run(folder)] == KINDS
    (folder / "perf.jsonl").unlink()
    assert [finding.kind for finding in diagnose_run(folder)] == KINDS


def test_an_error_ends_a_run_that_can_be_resumed(workshop: Workshop):
    stop = ("-s", "run.on_finding=stop", "-s", "run.num_rollout=5", "-s", "run.no_signal_rounds=2")
    workshop.slimectl("run", *NOTHING, *stop, "--name", "b", code=1)
    assert re.search(
        r"slimectl: No learning signal: every reward is 0 \(since round 1\)\. .*on_finding = stop", workshop.stderr
    )
    assert (workshop.folder / "runs/b/step_000002/policy").exists()
    assert [finding.kind for finding in diagnose_run(workshop.folder / "runs/b")] == ["no-signal"]  # not "stopped"
    workshop.slimectl("run", "--resume", "runs/b")
    assert len([line for line in workshop.metrics("b") if "rollout/step" in line["metrics"]]) == 5
    assert "No learning signal" not in workshop.stderr  # it was reported before the resume


def test_a_recorder_logs_a_finding_unless_rounds_have_logged_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = RunDir(tmp_path / "run")
    folder.start("", force=False)
    recorder = RunRecorder(folder, Settings())
    recorder.rewind(print)
    for number in (1, 2, 3):
        metrics = {"rollout/reward_timeouts": 0.5, "rollout/truncated_ratio": 0.9, "train/lr": 0.0}
        recorder.append("metrics.jsonl", {"step": number, "rollout_id": number, "metrics": metrics})
        recorder.append("perf.jsonl", {"step": number, "metrics": {"perf/total_time": 1.0}})
    assert recorder.diagnosis
    kinds = ["learning-rate-zero", "truncation", "verifier-timeouts"]
    assert [finding.kind for finding in recorder.diagnosis.findings] == kinds
    messages = [record.message for record in caplog.records]
    assert [message.partition(" (since")[0] for message in messages] == [
        "The learning rate is 0", "90% of the responses are cut at rollout.max_response_len = 256"]  # fmt: skip
    assert [finding.kind for finding in recorder.errors] == ["learning-rate-zero"]
    recorder.rewind(print)  # without a checkpoint, all records go
    assert recorder.diagnosis.findings == recorder.errors == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"not a run\. Give a run's folder"):
        diagnose_run(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(SettingsError, match=r"not a run\. Give a run's folder"):
        diagnose_run(tmp_path / "a.txt")
    (tmp_path / "run.toml").write_text("[run")
    with pytest.raises(SettingsError, match=r"run\.toml: cannot be read"):
        diagnose_run(tmp_path)
    (tmp_path / "run.toml").write_text("")
    assert diagnose_run(tmp_path) == []


def test_times_are_read_after_the_step_to_which_they_belong(tmp_path: Path):
    """A warm-up has no times, a save has nothing else, and step 2 was killed before its times were written."""
    metrics = [(1, None, "warmup"), (0, 0, "eval"), (1, 1, "train"), (1, 1, "eval"), (2, 2, "train")]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {"step": step} | ({} if number is None else {"rollout_id": number}) | {"metrics": {f"{name}/x": 1}}
            )
            + "\n"
            for step, number, name in metrics
        )
    )
    times = [(0, "eval_time"), (1, "total_time"), (1, "eval_time"), (1, "save_model_time")]
    (tmp_path / "perf.jsonl").write_text(
        "".join(json.dumps({"step": step, "metrics": {f"perf/{name}": 1}}) + "\n" for step, name in times)
    )
    order = [(line["step"], next(iter(line["metrics"]))) for line in read_lines(tmp_path)]
    assert order == [
        (1, "warmup/x"), (0, "eval/x"), (0, "perf/eval_time"), (1, "train/x"), (1, "perf/total_time"), (1, "eval/x"),
        (1, "perf/eval_time"), (1, "perf/save_model_time"), (2, "train/x"),
    ]  # fmt: skip


def test_demonstrations_have_findings_too(tmp_path: Path):
    lines = [
        {"step": number, "rollout_id": number, "metrics": {"train/loss": 1.0, "train/sft_loss": 1.0, "train/lr": 0.0,
                                                           "train/grad_norm": 1.0}}
        for number in range(1, 4)
    ]  # fmt: skip
    (tmp_path / "run.toml").write_text("[train]\nlr = 0.0\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(finding.kind, finding.first_round) for finding in diagnose_run(tmp_path)] == [("learning-rate-zero", 1)]


def test_an_error_that_ended_the_run_is_the_first_finding(tmp_path: Path):
    (tmp_path / "run.toml").write_text("")
    log, entry = tmp_path / "log.txt", "[2026-11-29 05:00:00] {} run.py:12 - {}\n"
    for level, message, kinds in [
        ("ERROR", "round 3: the loss is nan", ["stopped"]),
        ("WARNING", "slow", []),
        ("ERROR", "CUDA out of memory", ["out-of-memory"]),
        ("", "resuming runs/a after round 3", []),
    ]:
        with log.open("a") as file:
            file.write(entry.format(level, message).replace("]  ", "] "))
        assert [finding.kind for finding in diagnose_run(tmp_path)] == kinds
        assert all(message in finding.title for finding in diagnose_run(tmp_path))


def test_a_title_cannot_write_to_the_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    finding = Finding("disk", "\x1b[31mred", "warning", 3, 4, (), (), ("a",), ("b",))
    text = "\n".join(finding_lines(finding))
    assert "\x1b" not in text
    assert "(rounds 3 to 4)" in text
