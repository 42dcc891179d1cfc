"""Who goes where is known before anything starts; what cannot be says the nearest sizes that can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slimectl.planner.placement import PartTable, Placement, divisibility_warnings, nearest_valid

TWO_NODES = Placement(actor_nodes=1, actor_gpus_per_node=8, engine_gpus=(1,) * 8)


def test_apart_ranks_fill_the_first_machine_and_engines_the_second():
    bundles = TWO_NODES.bundles
    assert [(b.node, b.gpu) for b in bundles] == [(n, g) for n in range(2) for g in range(8)]
    assert [b.rank for b in bundles] == [*range(8), *[None] * 8]
    assert [b.engine for b in bundles] == [*[None] * 8, *range(8)]
    assert {b.share for b in bundles} == {1.0}
    assert TWO_NODES.nodes == 2


def test_colocated_engines_share_the_gpus_of_the_ranks_from_the_first_on():
    placed = Placement(actor_nodes=2, actor_gpus_per_node=8, engine_gpus=(4,) * 3, colocate=True)
    assert len(placed.bundles) == 16
    assert [b.rank for b in placed.bundles] == list(range(16))
    assert [b.engine for b in placed.bundles] == [0] * 4 + [1] * 4 + [2] * 4 + [None] * 4
    assert [b.share for b in placed.bundles] == [0.5] * 12 + [1.0] * 4
    assert placed.of_part(2) == [8, 9, 10, 11]


def test_more_engines_than_shared_gpus_take_further_ones():
    placed = Placement(actor_gpus_per_node=2, engine_gpus=(2, 2), colocate=True)
    assert [(b.rank, b.engine) for b in placed.bundles] == [(0, 0), (1, 0), (None, 1), (None, 1)]


def test_an_engine_over_two_machines_has_a_part_on_each():
    placed = Placement(actor_gpus_per_node=8, engine_gpus=(16, 16))
    assert list(placed.problems()) == []
    assert placed.nodes == 5
    assert placed.parts == [(0, 8, 8), (0, 16, 8), (1, 24, 8), (1, 32, 8)]
    assert [placed.of_part(part) for part in (0, 3)] == [list(range(8, 16)), list(range(32, 40))]


def test_engines_of_several_sizes_stand_one_after_the_other():
    placed = Placement(actor_gpus_per_node=8, engine_gpus=(16, 4, 1, 1))
    assert list(placed.problems()) == []
    assert placed.parts == [(0, 8, 8), (0, 16, 8), (1, 24, 4), (2, 28, 1), (3, 29, 1)]
    assert [bundle.engine for bundle in placed.bundles[8:]] == [0] * 16 + [1] * 4 + [2, 3]
    cut = replace(placed, engine_gpus=(1, 8))
    assert next(cut.problems()) == (
        "cluster.rollout_num_gpus_per_engine: 8 splits engine 1 over two machines of 8 GPUs. Use 7, or train on 7"
    )


def test_a_host_keeps_its_part_and_the_next_one_gets_the_next():
    table = PartTable(Placement(actor_gpus_per_node=4, engine_gpus=(1, 2, 2), gpus_per_node=8, colocate=True))
    names = [("engine-0", 2), ("judge-0", 1), ("engine-1", 2), ("engine-0", 2)]
    assert [table.assign(name, gpus) for name, gpus in names] == [1, 0, 2, 1]
    assert [table.rank_beside(name) for name in ("judge-0", "engine-0", "engine-1", "other")] == [0, 1, 3, None]
    assert table.assign("engine-2", 2) is None
    table.release("engine-0")
    table.release("engine-0")
    assert table.assign("engine-2", 2) == 1


def test_on_a_cpu_only_ranks_have_places():
    placed = Placement(actor_nodes=2, actor_gpus_per_node=3, engine_gpus=(5,) * 4, on_gpu=False)
    assert [(b.node, b.gpu, b.rank, b.engine) for b in placed.bundles] == [
        (0, 0, 0, None), (0, 1, 1, None), (0, 2, 2, None), (1, 0, 3, None), (1, 1, 4, None), (1, 2, 5, None)
    ]  # fmt: skip
    assert list(placed.problems()) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"actor_gpus_per_node": 12}, "cluster.actor_num_gpus_per_node: 12 x cluster.actor_num_nodes: 1 do not fill "
         "machines of 8 GPUs (cluster.num_gpus_per_node) one after the other. Use 8 on 1 or 8 on 2"),
        ({"actor_nodes": 3, "actor_gpus_per_node": 4}, "cluster.actor_num_gpus_per_node: 4 x cluster.actor_num_nodes: "
         "3 do not fill machines of 8 GPUs (cluster.num_gpus_per_node) one after the other. Use 8 on 1 or 8 on 2"),
        ({"engine_gpus": (12,) * 8}, "cluster.rollout_num_gpus_per_engine: 12, but a machine has 8 GPUs "
         "(cluster.num_gpus_per_node), and a larger engine needs whole machines. Use 8 or 16."),
        ({"actor_gpus_per_node": 4, "engine_gpus": (16,)},
         "cluster.rollout_num_gpus_per_engine: 16 splits engine 0 over 3 machines of 8 GPUs. Use 4, or train on 8"),
        ({"engine_gpus": (3, 3, 3)}, "cluster.rollout_num_gpus_per_engine: 3 splits engine 2 over two machines "
         "of 8 GPUs. Use 2 or 4, or train on 5"),
        ({"actor_gpus_per_node": 6, "engine_gpus": (4, 4)}, "cluster.rollout_num_gpus_per_engine: 4 splits "
         "engine 0 over two machines of 8 GPUs. Use 2, or train on 4 or 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_names_the_nearest_sizes_that_can(changed: dict[str, Any], problem: str):
    assert next(replace(TWO_NODES, **changed).problems()) == problem


def test_batches_that_do_not_divide_name_the_nearest_that_do():
    assert list(divisibility_warnings(64, 16, 4)) == []
    assert list(divisibility_warnings(64, 24, 8)) == [
        "train.global_batch_size: 24 does not divide the 64 rollouts of a round, so 16 wait for the next. Use 16 or 32."
    ]
    assert list(divisibility_warnings(30, 30, 4)) == [
        "train.global_batch_size: 30 rollouts per step are not a multiple of 4 data-parallel ranks, so some ranks "
        "wait. Use 28 or 32."
    ]


def test_nearest_finds_nothing_where_nothing_is_legal():
    assert nearest_valid(5, range(1, 10), lambda n: n % 4 == 0) == [4, 8]
    assert nearest_valid(5, range(1, 10), lambda n: False) == []
