import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimectl.algorithms.reductions import token_weights

step = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=5).map(lambda mask: [1, *mask]), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


def total(weights):
    return sum(map(sum, weights))


def test_rollout_mean_gives_every_execution_the_same_say():
    weights = token_weights([[1, 1, 1, 1], [1, 0]], [0, 1], kind="rollout_mean")
    assert weights == [[0.125, 0.125, 0.125, 0.125], [0.5, 0.0]]  # 1/2 each, over 4 tokens and over 1


def test_samples_of_one_execution_share_its_say_by_tokens():
    weights = token_weights([[1, 1, 1], [1], [1, 1]], [7, 7, 8], kind="rollout_mean")
    assert weights == [[0.125] * 3, [0.125], [0.25, 0.25]]  # execution 7: 1/2 over 3 + 1 tokens


def test_per_token_gives_every_token_the_same_say():
    assert token_weights([[1, 1, 0], [1], [1]], [0, 1, 1], kind="per_token") == [[0.25, 0.25, 0.0], [0.25], [0.25]]


def test_fixed_length_divides_by_the_constant_and_the_executions():
    weights = token_weights([[1, 1, 0], [1]], [0, 1], kind="fixed_length", fixed_length=10)
    assert weights == [[0.05, 0.05, 0.0], [0.05]]  # 1 / (2 executions * 10 tokens)


def test_a_wholly_masked_execution_weighs_nothing_and_still_counts():
    weights = token_weights([[1, 1], [0, 0]], [0, 1], kind="rollout_mean")
    assert weights == [[0.25, 0.25], [0.0, 0.0]]
    assert token_weights([[1, 1], [0, 0]], [0, 1], kind="per_token") == [[0.5, 0.5], [0.0, 0.0]]


def test_a_step_without_any_trained_token_has_zero_weights():
    for kind in ("rollout_mean", "per_token"):
        assert token_weights([[0], []], [0, 1], kind=kind) == [[0.0], []]


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(ValueError, match="unknown reduction 'sum'"):
        token_weights([[1]], [0], kind="sum")
    with pytest.raises(ValueError, match="fixed_length is None"):
        token_weights([[1]], [0], kind="fixed_length")
    with pytest.raises(ValueError, match="2 masks for 1 executions"):
        token_weights([[1], [1]], [0], kind="per_token")


@given(step, st.sampled_from(["rollout_mean", "per_token"]))
def test_weights_of_a_step_sum_to_one(samples, kind):
    masks, executions = zip(*samples, strict=True)
    assert total(token_weights(masks, executions, kind=kind)) == pytest.approx(1.0)


@given(step, st.randoms(use_true_random=False), st.sampled_from(["rollout_mean", "per_token"]))
def test_permuting_samples_permutes_weights(samples, random, kind):
    order = random.sample(range(len(samples)), len(samples))
    straight = token_weights(*zip(*samples, strict=True), kind=kind)
    shuffled = token_weights(*zip(*[samples[i] for i in order], strict=True), kind=kind)
    assert shuffled == [straight[i] for i in order]
