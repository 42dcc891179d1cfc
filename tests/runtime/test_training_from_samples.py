"""`slimectl train --name`: a file of samples takes the place of sampled rounds; the rest is that of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slimectl import load_settings
from slimectl.data.records import sample_to_json
from slimectl.errors import SettingsError, StorageError
from slimectl.runtime.rounds import RecordedRounds
from slimectl.runtime.run import TrainingRun
from slimectl.stages.recorded_rounds import SampleFiles, repeated
from slimectl.types import Sample, Status

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SETTINGS: dict[str, Any] = {
    "algorithm.name": "sft",
    "train.lr": 1e-3,
    "train.lr_decay_style": "cosine",
    "rollout.apply_chat_template": False,
    "rollout.shuffle": True,
    "rollout.max_response_len": 4,
    "rollout.max_prompt_len": 12,
    "run.name": "sft",
    "run.num_epoch": 2,
    "run.rollout_batch_size": 4,
    "run.save_interval": 2,
    "run.keep_checkpoints": None,
    "run.keep_samples": True,
    "eval.data.small": "words.jsonl@[0:2]",
    "eval.interval": 2,
    "eval.rm_type": "exact",
    "track.with": ["jsonl"],
}


@dataclass
class Training:
    """A folder with a file of demonstrations, and settings of a training on it."""

    folder: Path
    settings: dict[str, Any]

    def run(self, file: str = "words.jsonl", *, resume: bool = False, **changes: Any) -> TrainingRun:
        settings = load_settings(values=self.settings | changes)
        return TrainingRun(settings, rounds=RecordedRounds(settings, SampleFiles([self.file(file)])))

    def file(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def outcome(run: Path) -> tuple[bytes, dict[str, Any]]:
    """Metrics, and the hashes of the weights and the optimizer at the end."""
    files = json.loads((run / "latest" / "manifest.json").read_text())["files"]
    return (run / "metrics.jsonl").read_bytes(), {name: facts for name, facts in files.items() if "safetensors" in name}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> Training:
    """A whole training of five steps; `after-N` is its folder as a kill after step N leaves it.

    The eleventh row is too long for it.
    """
    folder = tmp_path_factory.mktemp("training")
    rows = [{"prompt": f"say {word} ", "label": word} for word in [*WORDS, "supercalifragilistic"]]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SETTINGS | {"model.path": str(model_dir("llama")), "run.dir": str(folder / "runs")}
    settings["eval.data.small"] = str(folder / settings["eval.data.small"])
    trained = Training(folder, settings)
    for report in trained.run().reports():
        shutil.copytree(trained.runs / "sft", trained.runs / f"after-{report.step}", symlinks=True)
    return trained


def test_every_row_is_seen_once_an_epoch_and_each_epoch_has_an_order_of_its_own(training: Training) -> None:
    rounds = [lines(training.runs / "sft" / f"step_{i:06d}" / "samples.jsonl") for i in range(1, 6)]
    labels = [sample["label"] for samples in rounds for sample in samples]
    assert sorted(labels[:10]) == sorted(labels[10:]) == sorted(WORDS)
    assert labels[:10] != labels[10:]


def test_rows_that_are_too_long_are_counted_and_take_no_part(training: Training) -> None:
    records = lines(training.runs / "sft" / "metrics.jsonl")
    assert sum(line["metrics"].get("rollout/prompts_too_long", 0) for line in records) == 2


def test_it_evaluates_before_at_its_interval_and_at_the_end_and_tracks_it_all(training: Training) -> None:
    records = lines(training.runs / "sft" / "metrics.jsonl")
    assert [line["step"] for line in records if "eval/small" in line["metrics"]] == [0, 2, 4, 5]
    tracked = lines(training.runs / "sft" / "tracked.jsonl")
    for name in ("eval/small", "train/loss"):
        assert [line["step"] for line in tracked if name in line["metrics"]] == [
            line["step"] for line in records if name in line["metrics"]
        ]


def test_the_cosine_ends_with_the_last_step_of_the_last_epoch(training: Training) -> None:
    rates = [
        line["metrics"]["train/lr"]
        for line in lines(training.runs / "sft" / "metrics.jsonl")
        if "train/lr" in line["metrics"]
    ]
    # 1e-3 (1 + cos(pi k / 5)) / 2 for k from 0 to 4
    assert rates == pytest.approx([1e-3, 9.045085e-4, 6.545085e-4, 3.454915e-4, 9.54915e-5])


@pytest.mark.parametrize("step", [1, 3, 5])
def test_it_goes_on_from_wherever_it_was_killed_to_the_same_bytes_and_weights(training: Training, step: int) -> None:
    job = training.run(**{"run.name": f"after-{step}"})
    assert job.execute(resume=True)
    assert outcome(job.folder.path) == outcome(training.runs / "sft")
    tracked, whole = (lines(training.runs / name / "tracked.jsonl") for name in (f"after-{step}", "sft"))
    assert [line["step"] for line in tracked if "train/loss" in line["metrics"]] == [1, 2, 3, 4, 5]
    assert [line.get("rows") for line in tracked if "table" in line] == [
        line.get("rows") for line in whole if "table" in line
    ]


def test_a_resume_with_more_rounds_says_how_the_rate_changes(training: Training, caplog: pytest.LogCaptureFixture):
    shutil.copytree(training.runs / "sft", training.runs / "longer", symlinks=True)
    training.run(**{"run.name": "longer", "run.num_epoch": 4}).execute(resume=True)
    # after all five steps: 1e-3 (1 + cos(pi 5 / 10)) / 2
    changes = "changes from 0 to 0.0005 (end of the decay 10, was 5)"
    assert f"the learning rate of the next step {changes}" in caplog.text
    assert "schedule of the learning rate counted" not in caplog.text


def test_dropped_groups_that_leave_a_schedule_unfinished_are_said_once(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    scored(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    flat = [row | {"reward": 1.0} if row["group_index"] in (0, 1, 2) else row for row in rows]
    (tmp_path / "flat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in flat))
    changes = {"algorithm.name": "dapo", "train.global_batch_size": 2, "run.num_epoch": 1, "eval.data": {}}
    trained = Training(tmp_path, training.settings | changes | {"run.dir": str(tmp_path / "runs")})
    del trained.settings["eval.data.small"]
    assert trained.run("flat.jsonl", **{"eval.interval": None, "rollout.n_samples_per_prompt": 2}).execute()
    # 12 rollouts are six steps; the three of the groups with signal have rates 1, 0.933 and 0.75 of the peak
    assert caplog.text.count("counted 6 steps, and the run made 3: it ended at 0.00075, 0.75 of its peak") == 1


def test_pairs_of_scored_samples_are_counted_not_their_groups(training: Training, tmp_path: Path):
    scored(tmp_path)
    rows = [json.loads(line) | {"group_index": i // 4} for i, line in enumerate((tmp_path / "scored.jsonl").open())]
    (tmp_path / "fours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"algorithm.name": "dpo", "algorithm.pairs": "all", "train.global_batch_size": 3, "run.num_epoch": 1}
    trained = Training(tmp_path, training.settings | changes | {"run.dir": str(tmp_path / "runs"), "eval.data": {}})
    del trained.settings["eval.data.small"]
    assert trained.run("fours.jsonl", **{"eval.interval": None}).execute()
    records = lines(trained.runs / "sft" / "metrics.jsonl")
    rates = [record["metrics"]["train/lr"] for record in records if "train/lr" in record["metrics"]]
    # each of the three groups has 2 x 2 pairs of a right and a wrong answer: 12 pairs, four steps
    assert rates == pytest.approx([1e-3, 8.535534e-4, 5e-4, 1.464466e-4])


def scored(folder: Path) -> None:
    """Write six groups of two samples, one right and one wrong."""
    with (folder / "scored.jsonl").open("w") as file:
        for i in range(12):
            answer = ("no", "yes")[i % 2]
            sample = Sample(
                group_index=i // 2, index=i, tokens=[*f"say {i:x}{answer}".encode()], response=answer,
                response_length=len(answer), reward=float(i % 2), status=Status.COMPLETED,
            )  # fmt: skip
            print(json.dumps(sample_to_json(sample)), file=file)


def preferences(folder: Path) -> None:
    rows = [{"prompt": f"say {word} ", "chosen": word, "rejected": "no"} for word in WORDS[:6]]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("file", "write", "changes", "steps"),
    [
        # 24 samples in rounds of four groups, six of a round's eight to a step
        ("scored.jsonl", scored, {"algorithm.name": "grpo", "train.global_batch_size": 6}, 4),
        ("scored.jsonl", scored, {"algorithm.name": "dpo"}, 3),
        ("preferences.jsonl", preferences, {"algorithm.name": "dpo"}, 3),
    ],
    ids=["grpo", "dpo on samples", "dpo"],
)
def test_every_algorithm_goes_on_with_the_pass_that_it_was_in(
    training: Training, tmp_path: Path, file: str, write: Callable[[Path], None], changes: dict[str, Any], steps: int
) -> None:
    write(tmp_path)
    trained = Training(tmp_path, training.settings | {"run.dir": str(tmp_path / "runs"), "eval.data": {}} | changes)
    trained.settings |= {"eval.interval": None, "run.save_interval": 1, "rollout.n_samples_per_prompt": 2}
    del trained.settings["eval.data.small"]
    reports = []
    for report in trained.run(file, **{"run.name": "whole"}).reports():
        reports.append(report)
        if len(reports) == 2:
            shutil.copytree(trained.runs / "whole", trained.runs / "broken", symlinks=True)
    assert len([report for report in reports if "train/loss" in report.metrics]) == steps
    assert trained.run(file, **{"run.name": "broken"}).execute(resume=True)
    assert outcome(trained.runs / "broken") == outcome(trained.runs / "whole")


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_a_dataset_without_a_verifier_is_measured_by_the_loss_of_training(
    training: Training, tmp_path: Path, algorithm: str
) -> None:
    preferences(tmp_path)
    shutil.copy(training.folder / "words.jsonl", tmp_path)
    file = "words.jsonl" if algorithm == "sft" else "preferences.jsonl"
    trained = Training(tmp_path, training.settings | {"run.dir": str(tmp_path / "runs"), "algorithm.name": algorithm})
    trained.settings |= {"eval.data.small": f"{tmp_path / file}@[0:4]", "eval.rm_type": None, "rollout.shuffle": False}
    assert trained.run(file, **{"run.num_epoch": None, "run.num_rollout": 1}).execute()
    before, step, after = (line["metrics"] for line in lines(trained.runs / "sft" / "metrics.jsonl"))
    assert before["eval/small/loss"] == pytest.approx(step["train/loss"])  # of the same rows, before the first update
    assert after["eval/small/loss"] < before["eval/small/loss"]
    assert not (trained.runs / "sft" / "eval").exists()  # nothing was sampled


def test_a_file_that_has_changed_is_not_gone_on_with(training: Training) -> None:
    text = (training.folder / "words.jsonl").read_text()
    (training.folder / "fewer.jsonl").write_text(text[: text.index("\n") + 1])
    with pytest.raises(SettingsError, match=r"fewer.jsonl: replaces .*words.jsonl"):
        training.run("fewer.jsonl").execute(resume=True)


def test_another_command_does_not_go_on_with_it(training: Training) -> None:
    changes = {
        "algorithm.name": "grpo",
        "train.lr_decay_style": "constant",
        "rollout.data": [training.file("words.jsonl")],
    }
    settings = load_settings(values=training.settings | changes)
    with pytest.raises(
        SettingsError, match=r"was started by `slimectl train`\. Continue with: slimectl train --resume"
    ):
        TrainingRun(settings).execute(resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run.async_level": 1}, "run.async_level: has no effect on training from a file"),
        ({"sft_warmup.data": ["words.jsonl"]}, "sft_warmup.data: has no effect on training from a file"),
        ({"algorithm.name": "reward_model"}, "eval.data.small: reward_model trains a model of values"),
    ],
)
def test_what_a_training_from_a_file_cannot_do_is_refused(
    training: Training, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        training.run(**changes)


@pytest.mark.parametrize("reads_file", [True, False])
def test_a_tracker_that_cannot_start_is_found_before_any_work(
    training: Training, monkeypatch: pytest.MonkeyPatch, reads_file: bool
) -> None:
    """No model is converted, created or loaded before it, no server started, and no folder stays."""
    monkeypatch.setattr("slimectl.runtime.run_parts.prepare_model", lambda *_: pytest.fail("a model was made"))
    (training.folder / "blocked").touch()  # a file, in which no folder can be made
    path = str(training.folder / "blocked" / "tracked.jsonl")
    changes: dict[str, Any] = {"run.name": "untracked", "track.kwargs": {"jsonl": {"path": path}}}
    job = training.run(**changes)
    if not reads_file:
        prompts = {
            "algorithm.name": "grpo",
            "rollout.n_samples_per_prompt": 2,
            "rollout.data": [training.file("words.jsonl")],
        }
        job = TrainingRun(load_settings(values=training.settings | changes | prompts | {"train.lr_decay_iters": 4}))
    with pytest.raises(StorageError, match=r"blocked/tracked.jsonl: (File exists|Not a directory)"):
        job.execute()
    assert not job.folder.path.exists()


def test_later_passes_over_samples_have_numbers_of_their_own() -> None:
    samples = [Sample(group_index=4, index=i, rollout_id=rollout) for i, rollout in ((8, None), (9, 12))]
    passes = list(repeated(lambda: map(replace, samples), epochs=3))
    assert [(number, s.group_index, s.index, s.rollout_id) for number, s in passes] == [
        (0, 4, 8, None), (1, 4, 9, 12), (2, 17, 21, None), (3, 17, 22, 25), (4, 30, 34, None), (5, 30, 35, 38),
    ]  # fmt: skip
    assert list(repeated(lambda: map(replace, samples), epochs=3, start=3)) == passes[3:]
