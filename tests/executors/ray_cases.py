"""What actors of the cluster tests do; importable by name, and without torch where it is not needed."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

from slimectl.executors.ray.surroundings import Whereabouts


def tell_where(build: Any, pipe: Any) -> None:
    """Each rank sends where it is to rank 0, which answers with all; or waits for ever with the others."""
    import torch.distributed as dist

    build()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (Whereabouts.here().node, Whereabouts.here().gpus, os.environ["LOCAL_RANK"]))
    pipe.done(found)
    while True:
        (request,) = pickle.loads(pipe.recv_bytes())
        if request == "wait" and dist.get_rank() == 0:
            time.sleep(1000)
        dist.barrier()
        pipe.done(None)


def nothing() -> None:
    return None


class Engine:
    """Knows where it is."""

    def where(self) -> tuple[str, tuple[str, ...], str]:
        here = Whereabouts.here()
        return here.node, here.gpus, os.environ.get("CUDA_VISIBLE_DEVICES", "")
