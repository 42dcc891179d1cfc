"""Memory that a run keeps between its steps: the pages of what one step frees are there for the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import ctypes, resource, sys
from slimectl.runtime.process_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 8 * 2**20

def step():
    blocks = [libc.malloc(size) for _ in range(20)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in reversed(blocks):
        libc.free(block)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_a_step_touches_no_new_pages_where_freed_memory_is_kept():
    def new_pages(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", COUNT, mode], check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert new_pages("given back") > 1000
    assert new_pages("kept") < 100
