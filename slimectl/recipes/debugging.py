"""Rollout functions for debugging (rollout.function_path)."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from slimectl.system.stdio import logger

PAUSE_S = 1.0


def sleep_rollout(args: Any) -> NoReturn:
    """Sample nothing: engines, trainer and reward stay up, with the initial weights, until the run is interrupted.

    slime's sleep rollout. Meanwhile you can inspect the running parts: requests to the servers, memory, weights.
    """
    urls = ", ".join(args.engine.url)
    engines = f"engines ({urls})" if urls else "engines"
    logger.warning(f"sampling nothing: {engines} and trainer stay up. Press Ctrl-C twice to end the run.")
    while True:
        time.sleep(PAUSE_S)
