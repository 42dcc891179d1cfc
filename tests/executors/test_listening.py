"""What ranks and weight pushes open to the network: the loopback where all of them are on one machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from executors.listeners import listen_addresses

from slimectl.engines.weight_sync import process_groups
from slimectl.executors.local import LocalExecutor
from slimectl.executors.rank_process import host_store
from slimectl.protocols import RankPipe


def _serve(build: Callable[[], Any], pipe: RankPipe) -> None:
    """Have a gloo group connect every rank with every other, then say where this rank listens."""
    import torch
    import torch.distributed as dist

    pipe.done(None)
    pipe.recv_bytes()
    sums = torch.ones(4)
    dist.all_reduce(sums)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (os.getpid(), sums[0].item(), listen_addresses()))
    pipe.done(found)
    pipe.recv_bytes()


def _nothing() -> None:
    return None


def test_a_group_of_two_ranks_on_one_machine_listens_on_loopback_only():
    before = listen_addresses()
    executor = LocalExecutor()
    group = executor.group(_serve, _nothing, ranks=2)
    list(group.answers())
    group.send("go")
    (ranks,) = group.answers()
    after = listen_addresses()
    executor.close()
    for address in before:
        after.remove(address)
    assert after == ["127.0.0.1"]  # the store
    assert [total for _, total, _ in ranks] == [2.0, 2.0]
    assert all(addresses and set(addresses) == {"127.0.0.1"} for _, _, addresses in ranks)


def test_the_store_of_a_group_listens_where_it_is_told():
    before = listen_addresses()
    store = host_store("127.0.0.2")
    after = listen_addresses()
    for address in before:
        after.remove(address)
    assert after == ["127.0.0.2"]
    assert store.port > 0


def test_the_store_of_a_weight_push_listens_where_it_is_told():
    before = listen_addresses()
    store = process_groups.host_store("127.0.0.1", timedelta(seconds=5))
    after = listen_addresses()
    for address in before:
        after.remove(address)
    assert after == ["127.0.0.1"]
    store.set("key", "value")
    assert store.get("key") == b"value"
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass


def test_a_store_that_ends_gives_its_port_back():
    store = host_store("127.0.0.1")
    port = store.port
    del store
    with socket.create_server(("127.0.0.1", port)):
        pass
