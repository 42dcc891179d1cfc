"""Scores, spreads, ranks and successive halving, worked out by hand from written run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimectl.cli.sweep import describe_best, records
from slimectl.cli.sweep_table import cells, fitted, verdict
from slimectl.cli.viewer.library import Library
from slimectl.cli.viewer.run_table import seed_groups
from slimectl.data.locks import Lock
from slimectl.data.ownership import LOCK
from slimectl.errors import SettingsError, SlimectlError
from slimectl.sweeps.folder import Score, SweepFolder
from slimectl.sweeps.plan import read_plan
from slimectl.sweeps.scheduler import Sweeper

FILE = """
[model]
card = "tiny"
[run]
num_rollout = {rounds}
[sweep]
metric = "rollout/raw_reward"
seeds = {seeds}
{more}
[sweep.settings]
train.lr = {rates}
"""


def sweep_folder(
    tmp_path: Path, *, seeds: list[int], rates: list[float], rounds: int = 2, more: str = ""
) -> SweepFolder:
    file = tmp_path / "s.toml"
    file.write_text(FILE.format(seeds=seeds, rates=rates, rounds=rounds, more=more))
    folder = SweepFolder(tmp_path / "s", read_plan(file)).adopt()
    folder.path.mkdir(exist_ok=True)
    folder.write_trials()
    return folder


def write_run(folder: SweepFolder, trial: int, seed: int, rewards: list[float], *, finished: bool = True) -> None:
    """Write the files of a run whose reward of each round is given."""
    path = folder.path / f"trial_{trial:03d}" / f"seed_{seed}"
    path.mkdir(exist_ok=True)
    settings = f"[run]\nnum_rollout = {len(rewards)}\nseed = {seed}\n[train]\nlr = {trial}.0\n"
    (path / "run.toml").write_text(settings)
    (path / "manifest.json").write_text(
        json.dumps({"slimectl": "0.3.0", "stage": "run"} | ({"finished": "now"} if finished else {}))
    )
    lines = [
        {"step": i, "rollout_id": i, "metrics": {"rollout/raw_reward": reward, "rollout/step": i}}
        for i, reward in enumerate(rewards, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def ranked(folder: SweepFolder) -> Sweeper:
    sweeper = Sweeper(folder, None)  # every run has ended
    assert sweeper.execute()
    return sweeper


@pytest.mark.parametrize(
    ("more", "scores"),
    [
        ("", [0.5, 0.25]),  # the last
        ('score = "best"', [1.0, 0.75]),
        ('score = "best"\nmode = "min"', [0.0, 0.25]),
        ('score = "mean"\nwindow = 2', [0.75, 0.5]),  # (1 + .5) / 2, (.75 + .25) / 2
    ],
)
def test_the_score_of_a_run(tmp_path: Path, more: str, scores: list[float]):
    folder = sweep_folder(tmp_path, seeds=[1], rates=[1, 2], rounds=3, more=more)
    write_run(folder, 1, 1, [0.0, 1.0, 0.5])
    write_run(folder, 2, 1, [0.5, 0.75, 0.25])
    assert [row.score and row.score.mean for row in ranked(folder).rows()] == scores


def test_mean_deviation_and_order_of_trials_with_two_seeds(tmp_path: Path):
    folder = sweep_folder(tmp_path, seeds=[1, 2], rates=[1, 2, 3])
    for trial, (first, second) in enumerate([(0.2, 0.4), (0.7, 0.9), (0.6, 0.72)], 1):
        write_run(folder, trial, 1, [0.0, first])
        write_run(folder, trial, 2, [0.0, second])
    sweeper = ranked(folder)
    rows = sweeper.rows()
    # By hand: means .8, .66, .3; deviation of a pair is |a - b| / sqrt(2).
    assert [(row.trial.name, row.score and round(row.score.mean, 6)) for row in rows] == [
        ("trial_002", 0.8), ("trial_003", 0.66), ("trial_001", 0.3),
    ]  # fmt: skip
    assert cells(rows[0], sweeper) == ["trial_002", "2", "2/2", "2", "0.8 ± 0.14", "finished"]
    # Standard errors are |a - b| / 2: .1 and .06. The means differ by .14, which is less than their sum.
    assert "It is not separated from trial_003 (0.66 ± 0.085)" in verdict(rows[0], rows, sweeper)
    assert describe_best(rows[0], folder.plan) == (
        "last rollout/raw_reward: 0.8 ± 0.1414 (standard deviation over 2 seeds) after 2 rounds"
    )
    first = next(records(sweeper, rows[0]))
    assert (first["trial"], first["rank"], first["best"], first["n"]) == ("trial_002", 1, True, 2)
    assert first["seeds"] == {"1": {"score": 0.7}, "2": {"score": 0.9}}


def test_separation_is_more_than_both_standard_errors():
    assert Score((0.7, 0.9)).error == pytest.approx(0.1)
    assert Score((0.7, 0.9)).is_separate(Score((0.5, 0.58)))  # .8 - .54 > .1 + .04
    assert not Score((0.7, 0.9)).is_separate(Score((0.6, 0.8)))
    assert not Score((0.9,)).is_separate(Score((0.1, 0.1)))  # one seed has no spread


def test_a_failed_seed_makes_its_trial_the_last_and_says_why(tmp_path: Path):
    folder = sweep_folder(tmp_path, seeds=[1, 2], rates=[1, 2, 3])
    for trial in (1, 2, 3):
        write_run(folder, trial, 1, [0.0, 0.9 if trial == 1 else 0.1 * trial])
        write_run(folder, trial, 2, [0.0, float("nan") if trial == 3 else 0.5], finished=trial != 1)
    (folder.path / "trial_001" / "seed_2.log").write_text("step 1\nsweep: failed: the loss is nan\n")
    sweeper = ranked(folder)
    assert [(row.trial.name, row.state, row.reason) for row in sweeper.rows()] == [
        ("trial_002", "finished", ""),
        ("trial_001", "failed", "the loss is nan"),
        ("trial_003", "failed", "metrics.jsonl has no finite value of rollout/raw_reward"),
    ]


def test_halving_keeps_the_best_at_the_end_of_each_rung_whatever_they_did_later(tmp_path: Path):
    more = 'method = "halving"\nreduction = 2'
    folder = sweep_folder(tmp_path, seeds=[1], rates=[1, 2, 3, 4], rounds=4, more=more)
    # Rungs: 4 trials to round 1, 2 to round 2, 1 to round 4. After round 1 trials 2 and 4 lead, after round 2 trial 4.
    write_run(folder, 1, 1, [0.3])
    write_run(folder, 2, 1, [0.5, 0.1])
    write_run(folder, 3, 1, [0.2])
    write_run(folder, 4, 1, [0.4, 0.6, 0.7, 0.65])
    rows = ranked(folder).rows()
    assert [(row.trial.name, row.rounds, row.score and row.score.mean, row.state) for row in rows] == [
        ("trial_004", 4, 0.65, "finished"), ("trial_002", 2, 0.1, "dropped"), ("trial_001", 1, 0.3, "dropped"),
        ("trial_003", 1, 0.2, "dropped"),
    ]  # fmt: skip


def test_halving_ends_if_every_trial_of_a_rung_failed(tmp_path: Path):
    folder = sweep_folder(tmp_path, seeds=[1], rates=[1, 2], rounds=4, more='method = "halving"\nreduction = 2')
    for trial in (1, 2):
        (folder.path / f"trial_{trial:03d}" / "seed_1.log").write_text("sweep: failed: no\n")
    with pytest.raises(SlimectlError, match="every trial failed"):
        Sweeper(folder, None).execute()


def test_a_changed_file_extends_the_sweep_or_is_refused(tmp_path: Path):
    sweep_folder(tmp_path, seeds=[1], rates=[1, 2])
    longer = sweep_folder(tmp_path, seeds=[1, 2], rates=[3, 2, 1])
    names = {trial.values["train.lr"]: trial.name for trial in longer.plan.trials}
    assert names == {1: "trial_001", 2: "trial_002", 3: "trial_003"}
    with pytest.raises(
        SettingsError, match=r"no longer has \S+trial_001. The nearest trial has train.lr = 2.0 \(was 1.0\)"
    ):
        sweep_folder(tmp_path, seeds=[1], rates=[2, 3])
    with pytest.raises(SettingsError, match=r"The nearest trial has run.num_rollout = 5 \(was 2\)"):
        sweep_folder(tmp_path, seeds=[1], rates=[1, 2, 3], rounds=5)
    write_run(longer, 1, 2, [0.0, 0.5])
    with pytest.raises(SettingsError, match=r"sweep.seeds no longer has 2 of \S+trial_001"):
        sweep_folder(tmp_path, seeds=[1], rates=[1, 2, 3])


def test_a_folder_of_something_else_and_a_second_sweep_are_refused(tmp_path: Path):
    folder = sweep_folder(tmp_path, seeds=[1], rates=[1])
    with folder.lock(), pytest.raises(SettingsError, match="another sweep is active there"):
        Lock(folder.path / LOCK, f"{folder.path}: another sweep is active there").acquire()
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match="so it is not a sweep"):
        folder.adopt()


def test_view_names_runs_by_trial_and_groups_their_seeds(tmp_path: Path):
    folder = sweep_folder(tmp_path, seeds=[1, 2], rates=[1, 2])
    for trial in (1, 2):
        for seed in (1, 2):
            write_run(folder, trial, seed, [0.0, 0.5])
    runs = Library([folder.path]).runs.values()
    assert [run.name for run in runs] == [f"trial_00{trial}/seed_{seed}" for trial in (1, 2) for seed in (1, 2)]
    assert [group["name"] for group in seed_groups(runs)] == ["trial_001", "trial_002"]


def test_the_state_is_cut_to_the_terminal():
    table = [["trial", "lr", "state"], ["trial_001", "0.1", "failed: " + "x" * 90]]
    # 9 and 3 columns with two blanks behind each leave 24 of 40.
    assert [len(line[-1]) for line in fitted(table, 40)] == [5, 24]
