"""Hooks that would do nothing, or not what they say, beside other settings."""

from __future__ import annotations

import pytest

from slimectl.errors import SettingsError
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve

WRONG = [
    (["rollout.function_path=a:b", "rollout.partial_rollout=true"],
     "rollout.function_path and rollout.partial_rollout cannot be combined"),
    (["rollout.function_path=a:b", "rollout.dynamic_sampling_filter_path=a:b"],
     "the function already fills rounds. Drop one"),
    (["rollout.data_source_path=a:b", "run.async_level=2"],
     "rollout.data_source_path and run.async_level: 2 cannot be combined"),
    (["train.custom_loss_function_path=a:b", "train.custom_tis_function_path=a:b"],
     "your own loss replaces it. Drop one"),
    (["sync.custom_post_write_path=a:b"], 'no effect with sync.transport = "auto", which writes no files'),
    (["megatron.custom_init_path=a:b"], 'megatron.custom_init_path has no effect with train.backend = "fsdp"'),
    (["algorithm.name=sft", "rollout.data_postprocess_path=a:b"], "has no effect with algorithm.name sft"),
    (["algorithm.name=dpo", "score.custom_reward_post_process_path=a:b"], "has no effect with algorithm.name dpo"),
]  # fmt: skip


@pytest.mark.parametrize(("assignments", "said"), WRONG)
def test_hooks_without_effect_are_refused(assignments: list[str], said: str):
    with pytest.raises(SettingsError, match=said):
        resolve([from_assignments(assignments)])


def test_a_data_source_may_be_one_round_ahead_and_be_filtered():
    fine = ["rollout.data_source_path=a:b", "run.async_level=1", "rollout.dynamic_sampling_filter_path=a:b"]
    assert resolve([from_assignments(fine)]).settings.rollout.data_source_path == "a:b"
