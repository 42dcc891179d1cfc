"""A Ctrl-C at the worst moment of closing servers does not leave a command that never ends."""

from __future__ import annotations

from pathlib import Path

import forkserver

INTERRUPTED_WITH_A_LOCK = """
import sys, threading, time, traceback
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions

class Server:
    def start(self): return "http://127.0.0.1:1"
    def stop(self): time.sleep(0.05)

def trace(frame, event, argument):
    files = [each.f_code.co_filename for each, _ in traceback.walk_stack(frame)]
    starts_a_pool = any("concurrent" in file for file in files) and frame.f_back.f_code.co_name != "result"
    if frame.f_code is not threading.Condition.__enter__.__code__ or starts_a_pool:
        return None
    def after(frame, event, argument):
        if event == "return" and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt  # as the handler of a signal that comes now: the lock is taken, and stays so
        return after
    return after

interrupted = []
pool = ServerPool(lambda number: Server(), 2, watch=WatchOptions(watches=False))
pool.start()
pool._closing.set()
sys.settrace(trace)
try:
    pool._stop_all()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_leaves_a_lock_taken_ends_the_command_all_the_same(tmp_path: Path):
    process = forkserver.run_python(INTERRUPTED_WITH_A_LOCK, cwd=tmp_path, timeout_s=120)
    assert (process.returncode, process.stdout, process.stderr) == (0, "interrupted\n", "")
