"""What actors of the cluster tests do; importable by name, and without torch where it is not needed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram
from slimectl.executors.ray.cluster import ActorLocation


def tell_where(build: Any, pipe: Any) -> None:
    """Each rank sends where it is to rank 0, which answers with all; or waits for ever with the others."""
    import torch.distributed as dist

    build()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (ActorLocation.here().node, ActorLocation.here().gpus, os.environ["LOCAL_RANK"]))
    pipe.done(found)
    while True:
        (request,) = pickle.loads(pipe.recv_bytes())
        if request == "wait" and dist.get_rank() == 0:
            time.sleep(1000)
        dist.barrier()
        pipe.done(None)


def nothing() -> None:
    return None


def policy_over_ranks(folder: Path) -> Any:
    from slimectl.checkpoints.hf import HFCheckpoint
    from slimectl.policies.fsdp.policy import FsdpPolicy
    from slimectl.policies.optimizer import OptimizerOptions
    from slimectl.policies.options import TrainerOptions

    return FsdpPolicy(
        folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3), max_tokens_per_pack=12)
    )


def sums(weights: Any) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in weights}


class Engine:
    """Knows where it is."""

    def where(self) -> tuple[str, tuple[str, ...], str]:
        here = ActorLocation.here()
        return here.node, here.gpus, os.environ.get("CUDA_VISIBLE_DEVICES", "")


HTTP_SERVER = """
import http.server, sys
print(*sys.argv[3:], flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Answer).serve_forever()
"""


def _http_command(host: str, port: int) -> list[str]:
    return [sys.executable, "-c", HTTP_SERVER, host, str(port)]


def http_server(log: Path) -> ServerProcess:
    """The process of a small server, which writes its further arguments to the log."""
    return ServerProcess(log.stem, ServerProgram(_http_command), ServerOptions(log))


class Diary:
    """Dies on demand, and has a generator that takes its time."""

    def __init__(self, closed: Path | None = None) -> None:
        self.closed = closed

    def pages(self) -> list[str]:
        return []

    def die(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def process(self) -> int:
        return os.getpid()

    def slowly(self, begun: Path) -> Iterator[int]:
        begun.touch()
        time.sleep(1000)
        yield 1

    def close(self) -> None:
        if self.closed is not None:
            self.closed.touch()
