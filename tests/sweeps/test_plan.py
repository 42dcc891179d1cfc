"""The file of a sweep: its trials, the draws, the rungs, and every mistake before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimectl.errors import SettingsError
from slimectl.settings.reference import descriptions
from slimectl.settings.sweep import Range, SweepSettings
from slimectl.sweeps.plan import Plan, default_mode, read_plan, run_options

BASE = """
[model]
card = "tiny"
[rollout]
data = ["prompts.jsonl"]
[score]
rm_type = "exact"
[train]
lr_decay_style = "linear"
[run]
num_rollout = 90
[eval]
data = { held_out = "prompts.jsonl" }
[sweep]
"""


def plan(folder: Path, sweep: str, *assignments: str) -> Plan:
    file = folder / "s.toml"
    file.write_text(BASE + sweep)
    return read_plan(file, assignments)


def errors(folder: Path, sweep: str, *assignments: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        plan(folder, sweep, *assignments)
    return str(caught.value).replace(str(folder / "s.toml"), "s.toml").splitlines()


GRID = """
metric = "rollout/raw_reward"
[sweep.settings]
train.lr = [1e-4, 1e-3]
"algorithm.eps_clip" = [0.1, 0.2, 0.3]
"""


def test_a_grid_has_every_combination_with_the_last_setting_fastest(tmp_path: Path):
    trials = plan(tmp_path, GRID).trials
    assert [trial.name for trial in trials] == [f"trial_{number:03d}" for number in range(1, 7)]
    values = [(trial.settings.train.lr, trial.settings.algorithm.eps_clip) for trial in trials]
    assert values == [(1e-4, 0.1), (1e-4, 0.2), (1e-4, 0.3), (1e-3, 0.1), (1e-3, 0.2), (1e-3, 0.3)]
    assert str(trials[5]) == "trial_006 (train.lr = 0.001, algorithm.eps_clip = 0.3)"


def test_the_base_is_another_file_or_a_recipe_or_sections_and_the_command_line_overrides_them(tmp_path: Path):
    (tmp_path / "base.toml").write_text(BASE.replace("[sweep]", ""))
    (tmp_path / "s.yaml").write_text("config: base.toml\nrun: {num_rollout: 7}\nsweep: {metric: rollout/raw_reward}\n")
    (only,) = read_plan(tmp_path / "s.yaml", ["train.lr=0.5", "sweep.seeds=[4, 5]"]).trials
    assert (only.settings.run.num_rollout, only.settings.train.lr, only.settings.model.card) == (7, 0.5, "tiny")
    assert read_plan(tmp_path / "s.yaml", ["sweep.seeds=[4, 5]"]).sweep.seeds == [4, 5]
    (tmp_path / "q.toml").write_text('recipe = "quickstart"\n[sweep]\nmetric = "eval/held_out_accuracy"\n')
    assert read_plan(tmp_path / "q.toml").trials[0].settings.rollout.n_samples_per_prompt == 8


def test_random_trials_are_distinct_and_a_longer_sweep_or_another_setting_keeps_them(tmp_path: Path):
    sweep = """
method = "random"
trials = {trials}
metric = "rollout/raw_reward"
[sweep.settings]
train.lr = {{ low = 1e-5, high = 1e-3, log = true }}
{more}
"""
    few = plan(tmp_path, sweep.format(trials=3, more="")).trials
    many = plan(tmp_path, sweep.format(trials=6, more="algorithm.eps_clip = [0.1, 0.2]")).trials
    rates = [trial.settings.train.lr for trial in many]
    assert [trial.settings.train.lr for trial in few] == rates[:3]
    assert len(set(rates)) == 6
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    listed = 'method = "random"\ntrials = 4\nmetric = "rollout/raw_reward"\n[sweep.settings]\ntrain.lr = [1, 2, 3, 4]\n'
    assert sorted(trial.settings.train.lr for trial in plan(tmp_path, listed).trials) == [1, 2, 3, 4]


def test_a_range_is_uniform_over_its_numbers_or_their_logarithms():
    chances = [(i + 0.5) / 1000 for i in range(1000)]
    counts = [0, 0, 0, 0]
    for chance in chances:
        counts[int(Range(low=1, high=4).draw(chance)) - 1] += 1
    assert counts == [250, 250, 250, 250]
    decades = [Range(low=1e-6, high=1e-3, log=True).draw(chance) for chance in chances]
    # A third of the numbers in each of the three decades.
    assert [sum(low <= value < 10 * low for value in decades) for low in (1e-6, 1e-5, 1e-4)] == [333, 334, 333]
    assert (Range(low=0.0, high=2.0).draw(0.25), Range(low=0.0, high=2.0).draw(0.0)) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("trials", "reduction", "min_rounds", "rungs"),
    [
        (9, 3, None, [(9, 10), (3, 30), (1, 90)]),  # by hand: 90 / 9, 90 / 3, 90
        (9, 3, 20, [(9, 30), (3, 90)]),  # 90 / 9 would be below 20
        (8, 3, None, [(8, 30), (2, 90)]),  # 8 / 9 trials would be none
        (8, 2, None, [(8, 12), (4, 23), (2, 45), (1, 90)]),  # rounded up: 11.25, 22.5
    ],
)
def test_the_rungs_of_halving(
    tmp_path: Path, trials: int, reduction: int, min_rounds: int | None, rungs: list[tuple[int, int]]
):
    least = f"min_rounds = {min_rounds}\n" if min_rounds else ""
    text = f'method = "halving"\nmetric = "rollout/raw_reward"\nreduction = {reduction}\n{least}'
    text += f"[sweep.settings]\ntrain.lr = {[float(i + 1) for i in range(trials)]}\n"
    assert [(rung.trials, rung.rounds) for rung in plan(tmp_path, text).rungs] == rungs


def test_a_rung_keeps_the_schedule_of_the_whole_run(tmp_path: Path):
    halving = plan(tmp_path, 'method = "halving"\n' + GRID)
    # 90 rounds of one step each: the linear decay ends at step 90, wherever the rung ends.
    assert run_options(halving, halving.trials[0], 30) == [
        "-s", "run.num_rollout=30", "-s", "train.lr_decay_iters=90",
    ]  # fmt: skip
    constant = plan(tmp_path, 'method = "halving"\n' + GRID, "train.lr_decay_style=constant")
    assert run_options(constant, constant.trials[0], 30) == ["-s", "run.num_rollout=30"]
    assert run_options(plan(tmp_path, GRID), plan(tmp_path, GRID).trials[0], 90) == []


REWARD = 'metric = "rollout/raw_reward"\n'


@pytest.mark.parametrize(
    ("sweep", "lines"),
    [
        ("[sweep.settings]\ntrain.lr = [1]", [
            's.toml: is missing']),
        (REWARD + "methd = 'grid'", ["sweep.methd: unknown setting (s.toml). Did you mean sweep.method?"]),
        (REWARD + "method = 'gird'", ["sweep.method: input should be 'grid', 'random' or 'halving', not 'gird'"]),
        (REWARD + "seeds = [1, 1]", ["sweep.seeds: must be different, not [1, 1]"]),
        (REWARD + "[sweep.settings]\ntrain.lr = 1e-4", ["train.lr: must be a list of values, or a range"]),
        (REWARD + "[sweep.settings]\ntrain.lr = { low = 2, high = 1 }", ["train.lr: low must be below high"]),
        (REWARD + "[sweep.settings]\ntrain.lr = { low = 1, high = 2 }", ["train.lr: a grid needs a list of values"]),
        (REWARD + "[sweep.settings]\ntrain.learning_rate = [1]", [
            "train.learning_rate: unknown setting (s.toml: [sweep.settings]). Did you mean train.lr?"]),
        (REWARD + "[sweep.settings]\ntrain.lr = [1, -1, -1.5]", [
            "trial_002 (train.lr = -1): train.lr: input should be greater than or equal to 0, not -1",
            "trial_003 (train.lr = -1.5): train.lr: input should be greater than or equal to 0, not -1.5"]),
        (REWARD + "[sweep.settings]\nrun.num_epoch = [1, 2]\ntrain.lr_decay_style = ['constant', 'linear']", []),
        (REWARD + "[sweep.settings]\ntrain.lr = [1, 1.0]", ["train.lr = 1) and trial_002"]),
        (REWARD + "[sweep.settings]\nrun.seed = [1]", ["run.seed: cannot be swept. List seeds in sweep.seeds."]),
        (REWARD + "method = 'random'\n[sweep.settings]\ntrain.lr = [1]", ["sweep.trials: is missing"]),
        (REWARD + "method = 'halving'\n[sweep.settings]\ntrain.lr = [1]", ["halving has nothing to reduce: 1 trials"]),
        ("metric = 'eval/heldout_accuracy'", ["sweep.metric: eval/heldout_accuracy: is not a metric of an evaluation."
                                              " Did you mean eval/held_out_accuracy?"]),
        ("metric = 'rollout/raw_rewrd'", ["Did you mean rollout/raw_reward?"]),
        ("metric = 'perf/rollout_time'", ["is in perf.jsonl and differs from run to run"]),
        (REWARD + "[track]\nprometheus_port = 9000", ["track.prometheus_port: trials would share the port"]),
        (REWARD + "[track]\nwith = 'wandb'\napi_key = 'abc123'", ["a setting is a secret"]),
    ],
)  # fmt: skip
def test_every_mistake_ends_before_a_run_and_names_what_to_change(tmp_path: Path, sweep: str, lines: list[str]):
    if not lines:
        assert len(plan(tmp_path, sweep).trials) == 4
        return
    actual = errors(tmp_path, sweep)
    assert len(actual) == len(lines), actual
    for line, expected in zip(actual, lines, strict=True):
        assert expected.removeprefix("s.toml: ") in line


def test_a_setting_is_not_swept_and_set_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "train.lr: is set in [sweep.settings] and by the command line" in errors(tmp_path, GRID, "train.lr=1")[0]
    monkeypatch.setenv("SLIMECTL_TRAIN_LR", "1")
    assert "and by the environment" in errors(tmp_path, GRID)[0]


def test_a_grid_that_is_too_large_is_refused_before_it_is_built(tmp_path: Path):
    lists = "\n".join(f"custom.a{i} = {[*range(10)]}" for i in range(9))
    assert "1,000,000,000 trials are more than 10,000" in errors(tmp_path, f"{REWARD}[sweep.settings]\n{lists}")[0]


def test_a_loss_is_better_when_it_is_lower():
    assert [default_mode(name) for name in ("train/loss", "eval/a_accuracy", "eval/a-truncated_ratio")] == [
        "min", "max", "min",
    ]  # fmt: skip
    assert SweepSettings(metric="train/loss").score == "last"


def test_the_guide_has_every_key_with_its_docstring():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "sweep.md").read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    for name, meaning in descriptions(SweepSettings).items():
        assert rows[name].endswith(f"| {' '.join(meaning.split())} |")
