"""Rows that begin with the same tokens compute them once, and learn what each would have learnt alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, WeightedNegativeLogProb
from policies.trie_cases import (
    assert_close,
    assert_same_step,
    calm_model,
    counted_tokens,
    forked_rows,
    padded,
    unique_tokens,
)
from stages.passes import set_loss_weights, training_batch
from torch import Tensor

from slimectl.algorithms import packing
from slimectl.algorithms.packing import build_tries
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies import causal_attention
from slimectl.policies.fsdp import packed_batch
from slimectl.policies.fsdp.packed_batch import build_packed_batch
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.pack_plan import plan_pack
from slimectl.policies.recompute import Recompute
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.types import Sample, Status, TrainingSample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_model(tmp_path_factory.mktemp("calm"))


def trainer(folder: Path, kind: Any = FsdpPolicy, **options: Any) -> Any:
    return kind(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3), **options))


@pytest.fixture(scope="module")
def alone(folder: Path) -> FsdpPolicy:
    return trainer(folder, share_prefixes=False)


@pytest.fixture(scope="module")
def shared(folder: Path) -> FsdpPolicy:
    return trainer(folder)


def gradients(policy: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in policy.masters.parameters.items() if p.grad is not None}
    policy.masters.drop_gradients()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_any_forks_give_the_loss_and_the_gradient_of_rows_alone(shared: FsdpPolicy, alone: FsdpPolicy, seed: int):
    assert_same_step(shared, alone, forked_rows(seed), Clipped(), gradients)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_branch_longer_than_a_chunk_of_queries(
    shared: FsdpPolicy, alone: FsdpPolicy, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    causal_attention._mask_matrix.cache_clear()
    for module in (causal_attention, packed_batch):
        monkeypatch.setattr(module, "CHUNK", chunk)
    assert_same_step(shared, alone, forked_rows(8), WeightedNegativeLogProb(needs_entropy=True), gradients)
    causal_attention._mask_matrix.cache_clear()


@pytest.mark.parametrize(
    "options",
    [{"recompute": Recompute("full")}, {"recompute": Recompute("selective")}, {"max_tokens_per_pack": 48}],
    ids=str,
)
def test_recomputation_and_small_packs_change_nothing(folder: Path, alone: FsdpPolicy, options: dict[str, Any]):
    assert_same_step(trainer(folder, **options), alone, forked_rows(9), Clipped(), gradients)


@pytest.mark.parametrize("kind", [FsdpCritic, FsdpActorCritic])
def test_values_before_shared_tokens_are_those_of_rows_alone(folder: Path, kind: Any):
    sharing, plain = (trainer(folder, kind, share_prefixes=share) for share in (True, False))
    for each in (sharing, plain):
        each.model.hf.score.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    assert_same_step(sharing, plain, forked_rows(10), WeightedNegativeLogProb(), gradients)


def test_a_forward_pass_computes_every_prefix_once(
    shared: FsdpPolicy, alone: FsdpPolicy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packing, "LEAST_SAVING", 0)
    rows = forked_rows(11)
    with counted_tokens(shared.model.hf.get_input_embeddings()) as counts:
        shared.log_probs(rows)
        shared.forward_backward(rows, Clipped())
        shared.masters.drop_gradients()
    with counted_tokens(alone.model.hf.get_input_embeddings()) as plain_counts:
        alone.log_probs(rows)
    assert counts == [padded(unique_tokens(rows), shared.row_multiple)] * 2
    plain_tokens = sum(row.input_length for row in rows)
    assert plain_counts == [padded(plain_tokens, alone.row_multiple)]
    assert plain_tokens > 1.5 * unique_tokens(rows)


def test_the_head_computes_a_state_that_predicts_several_tokens_once():
    # Two answers leave the prompt 1 2 3 with different tokens; a third repeats the first and goes on.
    rows = [TrainingSample([1, 2, 3, *answer], len(answer), []) for answer in ([4, 5], [6, 5], [4, 5, 7])]
    [trie] = build_tries(rows, max_tokens=100)
    layout = plan_pack(rows, [trie])
    predictions = layout.predictions
    assert layout.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 4, 3]
    assert predictions.sources_U.tolist() == [2, 3, 4, 5]
    assert list(zip(predictions.state_Q.tolist(), predictions.targets_Q.tolist(), strict=True)) == [
        (0, 4), (0, 6), (1, 5), (2, 7), (3, 5),
    ]  # fmt: skip
    assert predictions.targets_Q[predictions.pair_R].tolist() == [4, 5, 4, 5, 7, 6, 5]
    assert layout.members == [0, 2, 1]


def test_a_fork_in_the_middle_of_an_answer_sees_what_came_before_it_and_nothing_after():
    first, fork = TrainingSample([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, []), TrainingSample([1, 2, 3, 4, 5, 0, 0, 0], 5, [])
    [trie] = build_tries([first, fork], max_tokens=100)
    layout = plan_pack([first, fork], [trie])
    assert [(span.start, span.length, span.context.tolist()) for span in layout.spans] == [
        (0, 7, []), (7, 3, [0, 1, 2, 3, 4]),
    ]  # fmt: skip
    batch = build_packed_batch(layout, dtype=torch.float32, device=torch.device("cpu"))
    assert [(bucket.length, bucket.context_BP.tolist()) for bucket in batch.branches] == [(3, [[0, 1, 2, 3, 4]])]


def test_a_turn_that_goes_on_from_another_needs_no_branch():
    rows = [TrainingSample([*range(length)], 3, []) for length in (10, 15, 20)]
    [trie] = build_tries(rows, max_tokens=100)
    assert [(span.start, span.length) for span in plan_pack(rows, [trie]).spans] == [(0, 19)]


def test_turns_that_branches_and_attempts_share_keep_their_own_advantages(shared: FsdpPolicy, alone: FsdpPolicy):
    first, tool, prompt = [11, 12, 13], [7, 7], [1, 2, 3, 4]

    def branch(index: int, attempt: int, second: list[int], rewards: list[float], turn: int, taught: int) -> Sample:
        ends = 3, 5 + len(second)
        entries = [{"start": 0, "end": 3, "reward": rewards[0], "turn": 0},
                   {"start": 5, "end": ends[1], "reward": rewards[1], "turn": turn}]  # fmt: skip
        mask = [taught] * 3 + [0, 0] + [1] * len(second)
        return Sample(index=index, rollout_id=attempt, tokens=[*prompt, *first, *tool, *second], loss_mask=mask,
                      response_length=ends[1], reward=0.0, turn_rewards=entries, status=Status.COMPLETED)  # fmt: skip

    # Two branches of attempt 0 after one turn; attempt 2 took the same first turn, and got less for what followed.
    samples = [branch(0, 0, [21, 22], [1.0, 2.0], 1, 1), branch(1, 0, [23], [1.0, 4.0], 2, 0),
               branch(2, 2, [24, 25, 26], [0.5, 0.0], 1, 1)]  # fmt: skip
    algorithm = ALGORITHMS["turn_grpo"].model_validate({"grpo_std_normalization": False, "turn_gamma": 0.5})
    batch, _ = training_batch(samples, algorithm)
    # Returns 1 + 0.5 (2 + 0.5 * 4) = 3, 4, 4 of attempt 0 and 0.5, 0 of attempt 2. No other attempt has a turn 2.
    assert [row.advantages for row in batch.rows] == [
        [1.25, 1.25, 1.25, 0, 0, 2, 2], [0, 0, 0, 0, 0, 0], [-1.25, -1.25, -1.25, 0, 0, -2, -2, -2]]  # fmt: skip
    set_loss_weights(batch.rows, batch.executions, algorithm)
    assert sum(map(bool, batch.rows[1].loss_weights)) == 1  # the shared turn is trained on once
    [trie] = build_tries(batch.rows, max_tokens=100)
    assert trie.tokens == 9 + 1 + 2  # what is read before the last token of each row, the common beginning once
    for row, log_probs in zip(batch.rows, alone.log_probs(batch.rows), strict=True):
        row.old_log_probs = log_probs
    assert_same_step(shared, alone, batch.rows, Clipped(), gradients)
    # At a ratio of 1 the gradient is that of -sum(weight advantage log p), token by token.
    by_hand = [replace(row, loss_weights=[w * a for w, a in zip(row.loss_weights, row.advantages, strict=True)])
               for row in batch.rows]  # fmt: skip
    shared.forward_backward(batch.rows, Clipped())
    alone.forward_backward(by_hand, WeightedNegativeLogProb())
    assert_close(gradients(shared), gradients(alone))
