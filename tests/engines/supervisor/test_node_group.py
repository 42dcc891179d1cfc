"""A server of two processes, as over two machines; each is a small real HTTP server."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from small_server import server

from slimectl.engines.supervisor.node_group import NodeGroup, interface_variables
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError
from slimectl.system.http import get

NODE = """
    node, meeting, failing = "{node}", sys.argv[3], sys.argv[4:]
    print(node, meeting, flush=True)
    if node in failing:
        sys.exit("ValueError: machine {node} has no such model")
"""


def processes(logs: Path) -> list[ServerProcess]:
    return [server(logs, NODE.format(node=node), name=f"node {node}", log=logs / f"{node}.log") for node in (0, 1)]


def test_processes_meet_at_the_first_ones_machine_and_it_answers(tmp_path: Path):
    nodes = processes(tmp_path)
    group = NodeGroup(nodes, lambda address: [address])
    assert not group.alive()
    url = group.start()
    assert asyncio.run(get(f"{url}/health", timeout_s=5)).status == 200
    lines = [node.log_tail().split() for node in nodes]
    assert [line[0] for line in lines] == ["0", "1"]
    assert lines[0][1] == lines[1][1]
    assert lines[0][1].startswith("127.0.0.1:")
    assert group.alive()
    group.stop()
    assert not any(node.alive() for node in nodes)


def test_one_that_fails_ends_the_other_at_once(tmp_path: Path):
    nodes = processes(tmp_path)
    with pytest.raises(BackendError, match=r"node 1 died while starting .*machine 1 has no such model"):
        NodeGroup(nodes, lambda address: [address, "1"]).start()
    assert not any(node.alive() for node in nodes)


def test_the_loss_of_either_restarts_both(tmp_path: Path):
    nodes = processes(tmp_path)
    restored: list[str] = []
    pool = ServerPool(lambda _: NodeGroup(nodes, lambda address: [address]), 1, watch=WatchOptions(interval_s=600))
    pool.restore = restored.append
    pool.start()
    try:
        pids = [node.pid() for node in nodes]
        assert pids[1] is not None
        os.kill(pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
        pool.settle()
        assert pool.restarts == 1
        assert restored == pool.urls
        assert not {node.pid() for node in nodes} & set(pids)
    finally:
        pool.close()


def test_groups_of_gloo_take_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("192.0.2.7") == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert interface_variables("127.0.0.1") == {}
