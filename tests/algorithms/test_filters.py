import pytest

from slimectl.algorithms.advantages import has_signal


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], (True, "")),
        ([0.25, 0.25 + 1e-5], (True, "")),
        ([1.0, 1.0, 1.0], (False, "zero_std_1.0")),
        ([0, 0], (False, "zero_std_0.0")),
        ([-0.0, 0.0], (False, "zero_std_0.0")),
        ([0.1 + 0.2, 0.3], (False, "zero_std_0.3")),
        ([0.123456] * 2, (False, "zero_std_0.1235")),
        ([0.7], (False, "zero_std_0.7")),
        ([], (False, "empty")),
    ],
)
def test_a_group_has_signal_if_its_rewards_differ(rewards, expected):
    assert has_signal(rewards) == expected
