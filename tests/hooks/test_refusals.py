"""What is no hook is refused before any model is loaded; what a hook returns is looked at before it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workshop import set_up

from slimectl.errors import HookError
from slimectl.hooks import HOOKS, check_hooks
from slimectl.runtime.run import TrainingRun
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve

ModelDir = Callable[..., Path]


def named(setting: str, path: str) -> Settings:
    """Settings with a hook, and with a model that does not exist: whoever looked for it would say so."""
    section, _, key = setting.partition(".")
    value = [path] if key == "sample_hook_path" else path
    given: dict[str, dict[str, Any]] = {"model": {"path": "no/such/model"}, "rollout": {"data": ["prompts.jsonl"]}}
    given.setdefault(section, {})[key] = value
    return Settings.model_validate(given)


@pytest.mark.parametrize("setting", HOOKS)
def test_a_wrong_signature_is_refused_before_a_model_is_looked_for(setting: str, tmp_path: Path):
    (tmp_path / "own.py").write_text("def own(args, engine_url): pass\n")
    offered = re.escape(", ".join(HOOKS[setting].offers))
    with pytest.raises(
        HookError,
        match=rf"{setting}: .*own.py:own asks for engine_url. Functions of this setting can ask for {offered}",
    ):
        TrainingRun(named(setting, f"{tmp_path}/own.py:own"))


@pytest.mark.parametrize("setting", HOOKS)
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.py:own", "nowhere.py: no such file"),
        ("json:nothing", "json has no such name: nothing"),
        ("json:__name__", "__name__ is str 'json'. Give a function."),
        ("no_such_module", "Write it as package.module:name or path/to/file.py:name"),
    ],
)
def test_what_is_not_there_is_refused(setting: str, path: str, said: str):
    with pytest.raises(HookError, match=rf"^{setting}: .*{said}"):
        TrainingRun(named(setting, path))


@pytest.mark.parametrize("setting", HOOKS)
def test_both_shapes_of_older_scripts_fit(setting: str, tmp_path: Path):
    """`f(args, ...)` with all names, in any order, or `f(**everything)`; `settings` is `args` by another name."""
    names = [name for name in HOOKS[setting].offers if name != "args"]
    methods = ("get_samples", "add_samples", "save", "load", "__len__")
    body = "".join(f"    def {name}(self, *a): pass\n" for name in methods)
    for signature in (f"args, {', '.join(reversed(names))}", "**everything"):
        text = f"def own({signature}): pass\n"
        if setting == "rollout.data_source_path":
            text = f"class own:\n    def __init__(self, {signature}): pass\n{body}"
        file = tmp_path / f"own_{len(signature)}.py"
        file.write_text(text)
        made = HOOKS[setting].load(f"{file}:own").bare(dict.fromkeys(HOOKS[setting].offers))
        assert (made is None) == (setting != "rollout.data_source_path")


SMALL_SOURCE = "class Own:\n    def __init__(self, dataset): pass\n    def get_samples(self, n): return []\n"


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        ("class Own:\n    def __len__(self): return 1\n", [], "Own has no get_samples. Give a class with this method"),
        (SMALL_SOURCE, [], "Own has no __len__, so its epochs cannot be counted. Set run.num_rollout"),
        (SMALL_SOURCE, ["run.num_rollout=1"], "Own asks for dataset, and rollout.data is empty. Set it"),
    ],
)
def test_a_data_source_that_cannot_be_served_is_refused(
    text: str, assignments: list[str], message: str, tmp_path: Path
):
    (tmp_path / "own.py").write_text(text)
    settings = resolve([from_assignments([f"rollout.data_source_path={tmp_path}/own.py:Own", *assignments])]).settings
    with pytest.raises(HookError, match=message):
        check_hooks(settings, "rollout.")


SOURCE = """
from slimectl.types import Sample
class own:
    def get_samples(self, n): {get}
    def add_samples(self, groups): pass
    def save(self, rollout_id): {save}
    def load(self, rollout_id): pass
    def __len__(self): return 8
"""
GROUPS = "return [[Sample(prompt='a'), Sample(prompt='a')]]"

WRONG = [
    ("rollout.function_path", "return data_source", "data_source", "return groups .lists of Samples., or"),
    ("rollout.function_path", "return [[1]]", "", "returned list of 1. Return groups whose members are Samples"),
    ("rollout.function_path", "return [[s] for s in data_source.get_samples(1)[0]]", "data_source",
     "two groups of a round have the same group_index"),
    ("rollout.function_path", "return data_source.get_samples(2)", "data_source",
     r"returned samples without responses. Return what attempt\(group\) returns for each group"),
    ("rollout.function_path",
     "groups = data_source.get_samples(2); groups[0][0].reward = 1.0; return groups, {'x': 'y'}", "data_source",
     "return finite numbers by name as metrics"),
    ("rollout.data_source_path", SOURCE.format(get="return [Sample(), Sample()]", save="pass"), "",
     "Return a list of one group"),
    ("rollout.data_source_path", SOURCE.format(get="return [[Sample(prompt='a')]]", save="pass"), "",
     "a group of 1, but rollout.n_samples_per_prompt is 2"),
    ("rollout.data_source_path", SOURCE.format(get=GROUPS, save="return {1, 2}"), "", "did not return JSON"),
    ("rollout.data_source_path", SOURCE.format(get="return 1 / 0", save="pass"), "",
     "get_samples raised ZeroDivisionError"),
    ("rollout.custom_generate_function_path", "return 'an answer'", "sample", "returned str. Return the Sample"),
    ("rollout.sample_hook_path", "return 'a sample'", "", "returned str 'a sample'. Return a Sample or None"),
    ("rollout.sample_hook_path", "sample.loss_mask = [1]", "sample", "loss_mask has 1 values for 4 response tokens"),
    ("rollout.dynamic_sampling_filter_path", "return 'yes'", "", "returned str 'yes'. Return True, False"),
    ("rollout.buffer_filter_path", "return None", "", "returned None. Return a list of groups"),
    ("rollout.all_samples_process_path", "return 1", "", "returned int 1. Return nothing"),
    ("rollout.sample_filter_path", "return data", "data", "set sample.remove_sample of samples to skip"),
    ("rollout.sample_filter_path", "data[0][0].remove_sample = 'yes'", "data", "remove_sample of sample 0 to 'yes'"),
    ("rollout.data_postprocess_path", "rollout_data['advantages'].pop()", "rollout_data", "left no advantages"),
    ("rollout.data_postprocess_path", "rollout_data['advantages'][0][0] = float('nan')", "rollout_data",
     "advantages of sample 0: must be 4 finite numbers"),
    ("score.custom_rm_path", "return float('nan')", "", "reward of sample 0 is nan, not a finite number"),
    ("score.custom_rm_path", "return [1.0]", "samples", "returned 1 rewards for"),
    ("score.custom_reward_post_process_path", "return 3", "", "return .raw_rewards, rewards., one number per sample"),
    ("score.custom_reward_post_process_path", "return [1.0], [1.0]", "", "returned 1 raw_rewards for 4 samples"),
    ("score.custom_reward_post_process_path", "return [0.0] * 4, [float('inf')] * 4", "",
     "rewards of sample 0 is inf, not a finite number"),
    ("score.custom_reward_post_process_path", "return [0.0] * 4, [10**400] * 4", "",
     "rewards of sample 0 is a number too large for a float, not a finite"),
    ("train.custom_convert_samples_to_train_data_path", "return {'tokens': []}", "", "return a dict with"),
    ("train.custom_convert_samples_to_train_data_path",
     "return {'tokens': [[1, 2]] * 3, 'response_lengths': [1] * 3, 'rewards': [0.0] * 3}", "",
     "made 3 rows of 4 samples. Give group_indices and rollout_ids"),
    ("train.custom_convert_samples_to_train_data_path",
     "return {'tokens': [[1, 2]] * 4, 'response_lengths': [3] * 4, 'rewards': [0.0, 1.0] * 2}", "",
     "row 0: 3 response tokens of 2 tokens"),
    ("train.custom_advantage_function_path", "rollout_data['advantages'] = [[1.0]]", "rollout_data",
     "wrote 1 advantages for 4 samples"),
    ("train.custom_loss_function_path", "return log_probs, {}", "log_probs",
     r"returned a loss of shape \[\d+\]. Return a scalar tensor, for example sum_of_sample_mean.loss_T"),
    ("train.custom_loss_function_path", "return ..., {}", "", "returned a loss of type ellipsis. Return a scalar"),
    ("train.custom_loss_function_path", "return log_probs.detach().sum(), {}", "log_probs",
     "returned a loss without a gradient. Compute it from log_probs"),
    ("train.custom_loss_function_path", "return log_probs.sum(), {'x': log_probs}", "log_probs",
     r"returned a metric 'x' that is of shape \[\d+\]. Return a sum over the pack"),
    ("train.custom_loss_function_path", "return log_probs.sum(), {'x': 'high'}", "log_probs",
     "returned a metric 'x' that is no number. Return a sum"),
    ("train.custom_tis_function_path", "return pg_loss", "pg_loss", "returned Tensor. Return .pg_loss, loss_masks"),
    ("train.custom_tis_function_path", "return pg_loss[:1], loss_masks, {}", "pg_loss, loss_masks",
     "return pg_loss of the 16 tokens that it got"),
    ("train.custom_tis_function_path", "return pg_loss * float('nan'), loss_masks, {}", "pg_loss, loss_masks",
     "a pg_loss that is not finite"),
    ("train.custom_pg_loss_reducer_function_path", "return 1.0", "", "returned float 1.0. Return a function"),
    ("train.custom_pg_loss_reducer_function_path", "return lambda loss: loss", "", "no scalar for 16 token losses"),
    ("megatron.custom_model_provider_path", "return None", "", "return the result of build.., or a GPTModel"),
    ("track.custom_rollout_log_function_path", "return 'no'", "", "return True to skip the default log"),
    ("track.custom_eval_rollout_log_function_path", "extra_metrics['x'] = 'y'", "extra_metrics",
     "numbers only: the metric 'x' is not a number"),
]  # fmt: skip
"""(setting, body, parameters, what is said)"""

SMALL = (
    "run.num_rollout=1", "run.rollout_batch_size=2", "rollout.n_samples_per_prompt=2", "rollout.max_response_len=4",
    "rollout.over_sampling_batch_size=3", "eval.data={small='prompts.jsonl@[0:1]'}", "eval.interval=none",
    "eval.before_train=false", "rollout.ignore_eos=true",
)  # fmt: skip
UNLIMITED = {"rollout.function_path": ["rollout.over_sampling_batch_size=none"]}


@pytest.mark.parametrize(("setting", "body", "parameters", "said"), WRONG)
def test_what_cannot_be_used_is_said(
    setting: str, body: str, parameters: str, said: str, tmp_path: Path, model_dir: ModelDir, monkeypatch: Any
):
    set_up(tmp_path, model_dir("llama"))
    monkeypatch.chdir(tmp_path)
    text = body if "class own" in body else f"def own({parameters}):\n    {body}\n"
    (tmp_path / "own.py").write_text(text)
    path = "['own.py:own']" if setting == "rollout.sample_hook_path" else "own.py:own"
    more = ["train.backend=megatron"] if setting.startswith("megatron.") else []
    assignments = [*SMALL, *UNLIMITED.get(setting, []), *more, f"{setting}={path}"]
    settings = resolve([from_file(Path("slimectl.toml")), from_assignments(assignments)]).settings
    with pytest.raises(HookError, match=f"(?i){said}") as raised:
        TrainingRun(settings).execute()
    assert "\n" not in str(raised.value)


RETURN_NOTHING = {
    "megatron.custom_init_path", "megatron.custom_before_log_prob_hook_path",
    "megatron.custom_before_train_step_hook_path", "sync.custom_post_write_path",
}  # fmt: skip
"""Nothing that they return is used."""


def test_every_result_that_is_used_is_looked_at():
    assert {setting for setting, *_ in WRONG} | RETURN_NOTHING == set(HOOKS)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_hook_that_raises_is_named_with_its_line(kind: str, tmp_path: Path, model_dir: ModelDir, monkeypatch: Any):
    set_up(tmp_path, model_dir("llama"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        f"def gold(table):\n    return table['gold']\n\n{kind} own(sample):\n    gold({{}})\n"
    )
    assignments = [*SMALL, "rollout.sample_hook_path=['own.py:own']"]
    settings = resolve([from_file(Path("slimectl.toml")), from_assignments(assignments)]).settings
    said = r"^rollout.sample_hook_path: own.py:own raised KeyError: 'gold' \(own.py:2\)\. Fix it there\.$"
    with pytest.raises(HookError, match=said):
        TrainingRun(settings).execute()
