"""A job of `slimectl launch` on a real Slurm: requeued by the signal before its limit and by a lost node."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workshop import Workshop, set_up

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)) or os.getuid() != 0, reason="needs root, munge and slurm-wlm"
    ),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
ReturnToService=2
MpiDefault=none
KillWait=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
WAITS = '''
import os, time

def reward(sample):
    """Wait in every round from the third on while the file `wait` is there."""
    while sample.index >= 32 and os.path.exists("wait"):
        open("waiting", "w").close()
        time.sleep(0.01)
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)
'''


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    """Two nodes of a cluster on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        config = CONFIG.format(
            host=socket.gethostname(), folder=folder, ports=free_ports(3), cores=len(os.sched_getaffinity(0))
        )
        (folder / "slurm.conf").write_text(config)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        files = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
        self.daemons = [
            self.start(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files
            )
        ]
        self.until(lambda: (folder / "munge.socket").exists())
        self.daemons.append(self.start("slurmctld", "-D"))
        self.nodes = {name: self.start("slurmd", "-D", "-N", name) for name in ("node1", "node2")}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{command[0]}.out").open("ab")
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def __call__(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. A job that failed, or the test's own time limit, ends the test."""
        while not condition():
            time.sleep(0.25)  # each question starts a process
            assert "FAILED" not in self("squeue", "--all", "--states=all", "--noheader", "--format=%T")

    def job(self, number: str, field: str) -> str:
        words = self("scontrol", "show", "job", number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def lose(self, node: str) -> None:
        """Kill the daemon of a node and the processes of its jobs, as when a machine loses its power."""
        self.nodes[node].kill()
        self.nodes[node].wait()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"SLURMD_NODENAME={node}".encode() in (process / "environ").read_bytes()
                stepd = (
                    b"slurmstepd" in (process / "cmdline").read_bytes()
                    and str(self.folder).encode() in (process / "environ").read_bytes()
                )
            except OSError:
                continue
            if mine or stepd:
                os.kill(int(process.name), 9)
        self("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def stop(self) -> None:
        self("scancel", "--signal=KILL", "--full", "--user=root")
        for process in [*self.nodes.values(), *reversed(self.daemons)]:
            process.kill()
            process.wait()


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


def test_a_job_survives_its_time_limit_and_a_lost_node(slurm: Slurm, tmp_path: Path, model_dir: Callable[..., Path]):
    workshop: Workshop = set_up(tmp_path, model_dir("llama"))
    (tmp_path / "reward.py").write_text(WAITS)
    with (tmp_path / "slimectl.toml").open("a") as file:
        file.write('[launch]\nterm_s = 30\n[cluster]\nexecutor = "local"\n')
    workshop.slimectl("run", "--name", "whole")
    (tmp_path / "wait").touch()
    workshop.slimectl("launch", "-c", "slimectl.toml", "--name", "job", "-s", "train.device=cpu", "--out", "job.sh")
    slurm.environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "slimectl"
    program.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m slimectl "$@"\n')
    program.chmod(0o755)

    slurm.until(lambda: slurm("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"])
    number = slurm("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "job.sh")).strip()
    slurm.until((tmp_path / "waiting").exists)
    assert slurm.job(number, "JobState") == "RUNNING"
    slurm("scancel", "--signal=USR1", "--batch", number)  # what Slurm sends before the time limit
    log = tmp_path / f"job-{number}.log"
    slurm.until(lambda: "SIGTERM: finishing this round" in log.read_text())
    (tmp_path / "waiting").unlink()
    (tmp_path / "wait").unlink()
    slurm.until(lambda: slurm.job(number, "Restarts") == "1")
    (tmp_path / "wait").touch()

    slurm.until((tmp_path / "waiting").exists)
    slurm.lose(slurm.job(number, "NodeList"))
    (tmp_path / "wait").unlink()
    slurm.until(lambda: slurm.job(number, "Restarts") == "2")
    slurm.until(lambda: slurm.job(number, "JobState") == "COMPLETED")

    assert f"time limit: requeueing job {number}, which resumes the run" in log.read_text()
    runs = tmp_path / "runs"
    assert (runs / "job" / "metrics.jsonl").read_bytes() == (runs / "whole" / "metrics.jsonl").read_bytes()
