"""Whether the members of a group make the same collectives, by lists of them."""

from __future__ import annotations

from dataclasses import replace

from slimectl.planner.simulation.collectives import Collective, mismatches

GATHER = Collective("_allgather_base_", (0, 1), ("bfloat16 [8]", "bfloat16 [4]"))
REDUCE = Collective("allreduce_", (0, 1, 2, 3), ("float64 []",))


def test_equal_sequences_agree_in_whatever_order_the_groups_take_turns():
    assert list(mismatches({0: [GATHER, REDUCE], 1: [REDUCE, GATHER], 3: [REDUCE]})) == []


def test_another_order_within_a_group_is_found_with_its_place():
    other = replace(GATHER, name="broadcast_", tensors=("bfloat16 [8]",))
    (line,) = mismatches({0: [GATHER, other], 1: [other, GATHER]})
    assert line == (
        "ranks 0 and 1, group 0-1: call 1 is _allgather_base_(bfloat16 [8], bfloat16 [4]) on rank 0,"
        " broadcast_(bfloat16 [8]) on rank 1"
    )


def test_a_call_that_one_rank_makes_alone_another_dtype_and_another_root_are_found():
    smaller = replace(REDUCE, tensors=("float32 []",))
    rooted = replace(REDUCE, name="broadcast_", peer=0)
    for ours, theirs in (([REDUCE, REDUCE], [REDUCE]), ([REDUCE], [smaller]), ([rooted], [replace(rooted, peer=1)])):
        assert len(list(mismatches({0: ours, 3: theirs}))) == 1


def test_a_message_needs_its_receiver_and_its_shape():
    send = Collective("send", (0, 4), ("bfloat16 [64, 1, 32]",), peer=1)
    receive = replace(send, name="recv_", peer=0)
    assert list(mismatches({0: [send], 4: [receive]})) == []
    assert len(list(mismatches({0: [send], 4: [replace(receive, tensors=("bfloat16 [32, 1, 32]",))]}))) == 1
    assert len(list(mismatches({0: [send, send], 4: [receive]}))) == 1
    answer, answered = replace(send, peer=0), replace(receive, peer=1)
    assert list(mismatches({0: [send, answered], 4: [answer, receive]})) == []
    assert len(list(mismatches({0: [send], 4: [answer]}))) == 1


def test_uneven_parts_of_an_all_to_all_must_arrive_as_they_were_sent():
    first = Collective("alltoall_base_", (0, 1), ("bfloat16 [5]", "bfloat16 [4]"), sent=(1, 3), received=(1, 4))
    second = Collective("alltoall_base_", (0, 1), ("bfloat16 [9]", "bfloat16 [10]"), sent=(4, 6), received=(3, 6))
    assert list(mismatches({0: [first], 1: [second]})) == []
    assert len(list(mismatches({0: [first], 1: [replace(second, received=(2, 7))]}))) == 1
