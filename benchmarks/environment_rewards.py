"""Rewards of 200 episodes of each ecosystem, played through slimectl and by the ecosystem's own loop.

    ENVIRONMENTS_PYTHON=.venv-environments/bin/python python benchmarks/environment_rewards.py [EPISODES] [NAME …]

The Python of ENVIRONMENTS_PYTHON has tests/environments/requirements.txt. Seeds or rows are the same, the policy is
scripted. The exit code is 1 if a reward differs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from environments.equality import CASES, HERE, own_rewards, rewards_of

MORE = tuple((f"reasoning_gym:{task}", {}) for task in ("spell_backward", "maze", "simple_equations"))


@contextmanager
def guess_server(python: str) -> Iterator[str]:
    """Run the OpenEnv server of the tests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(HERE / "servers" / "guess_server.py"), str(port)])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def alike(ours: list[float], own: list[float]) -> bool:
    """Whether the rewards of an episode are equal, but for the last bits: some scorers exceed 1 by rounding."""
    return len(ours) == len(own) and all(abs(one - other) < 1e-12 for one, other in zip(ours, own, strict=True))


def main() -> int:
    episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    python = os.path.abspath(os.environ["ENVIRONMENTS_PYTHON"])
    os.chdir(HERE / "servers")
    differ = 0
    print("environment                     episodes  mean reward  values  differ  ours s  own s")
    with guess_server(python) as server:
        for name, arguments in (*CASES, *MORE, (server, {})):
            if sys.argv[2:] and not name.startswith(tuple(sys.argv[2:])):
                continue
            began = time.perf_counter()
            ours = rewards_of(name, arguments, episodes, python)
            middle = time.perf_counter()
            own = own_rewards(name, arguments, episodes, python)
            spent = middle - began, time.perf_counter() - middle
            different = sum(not alike(one, other) for one, other in zip(ours, own, strict=True))
            differ += different
            rewards = [reward for players in ours for reward in players]
            shown = name.partition("//")[0] if name == server else name
            print(
                f"{shown:<32}{episodes:>8}  {fmean(rewards):>11.4f}  {len(set(rewards)):>6}  {different:>6}  "
                f"{spent[0]:>6.1f}  {spent[1]:>5.1f}",
                flush=True,
            )
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
