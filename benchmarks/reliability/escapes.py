"""Ways out of the sandbox: programs that print REACHED where they get somewhere, by what they attack.

{FILE} and {FOLDER} lie outside and belong to the user who grades, {PORT} and {SOCKET} are listened at, {MARK} is in the
command line of what is to be left running, {PID} is the process that grades, {DETCEPXE} is what a test expects,
backwards.
"""

# ruff: noqa: E501 (a program a line)
from __future__ import annotations

CALL = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(number, *a):\n"
    "    ctypes.set_errno(0)\n"
    "    result = libc.syscall(number, *a)\n"
    "    if result >= 0 or ctypes.get_errno() not in (1, 13, 38, 93, 94, 97): print('REACHED', number, result, ctypes.get_errno())\n"
    "    return result\n"
    "buffer = ctypes.create_string_buffer(4096)\n"
)  # fmt: skip

FILES = {
    "write a file outside": "open('{FILE}', 'a').write('x'); print('REACHED')",
    "read a file outside": "print('REACHED', open('{FILE}').read())",
    "list a folder outside": "import os; print('REACHED', os.listdir('{FOLDER}'))",
    "hard link to a file": "import os; os.link('{FILE}', 'link'); open('link', 'a').write('x')",
    "symlink and write": "import os; os.symlink('{FILE}', 'link'); open('link', 'a').write('x')",
    "rename over a file": "import os; open('x', 'w').close(); os.rename('x', '{FILE}')",
    "truncate": "import os; os.truncate('{FILE}', 0)",
    "walk up from the work folder": "open('../' * 30 + '{FILE}', 'a').write('x')",
    "device node": "import os; os.mknod('disk', 0o60666, os.makedev(254, 0)); print('REACHED', len(open('disk', 'rb').read(9)))",
    "kernel memory": "print('REACHED', open('/dev/mem', 'rb').read(1), open('/dev/kmsg').read(1))",
    "write into the interpreter": "import os, sys; open(os.__file__, 'a').write('x'); print('REACHED')",
    "chroot out": "import os; os.mkdir('r'); os.chroot('r'); os.chdir('../' * 20); print('REACHED')",
    "own memory by /proc": "open('/proc/self/mem', 'r+b').seek(1); print('REACHED')",
    "parent's root by /proc": "import os; print('REACHED', os.listdir(f'/proc/{os.getppid()}/root'))",
    "sysctl": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); print('REACHED')",
    "make the root writable": CALL + "call(165, None, b'/', None, 4096 | 32, None)\n"
     "open('/usr/made', 'w'); print('REACHED')",
}  # fmt: skip
NETWORK = {
    "tcp to this machine": "import socket; socket.create_connection(('127.0.0.1', {PORT}), 1); print('REACHED')",
    "tcp over IPv6": "import socket; socket.create_connection(('::1', {PORT}), 1); print('REACHED')",
    "udp": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {PORT})); print('REACHED')",
    "unix socket": "import socket; s = socket.socket(1); s.connect('{SOCKET}'); print('REACHED')",
    "abstract unix socket": "import socket; s = socket.socket(1); s.connect('\\0{MARK}'); print('REACHED')",
    "datagram from a pair": "import socket; a, b = socket.socketpair(1, 2); a.sendto(b'x', '{SOCKET}.d'); print('REACHED')",
    "second connect of a pair": "import socket; a, b = socket.socketpair(); a.connect('{SOCKET}'); print('REACHED')",
    "vsock, netlink, packet, AF_ALG": "import socket\nfor f in (40, 16, 17, 38, 29, 31):\n"
     "    for k in (1, 2, 3, 5):\n"
    "        try: socket.socket(f, k); print('REACHED', f)\n        except OSError: pass",
    "socket by number": CALL + "call(41, 1, 1, 0); call(41, 2, 1, 0); call(41, 40, 1, 0)",
    "io_uring": CALL + "call(425, 8, buffer)",
    "name service": "import socket; print('REACHED', socket.getaddrinfo('example.com', 80))",
    "a server of its own": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('REACHED')",
}  # fmt: skip
KERNEL = {
    "user namespace": "call(272, 0x10000000)", "mount namespace": "call(272, 0x20000)", "network namespace": "call(272, 0x40000000)",
    "clone with a namespace": "call(56, 0x10000011, 0, 0, 0, 0) == 0 and os._exit(0)",
    "clone3": "call(435, buffer, 88)", "join a namespace": "call(308, 0, 0)", "mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "new mount API": "call(430, b'tmpfs', 0); call(428, -100, b'/', 1); call(442, -100, b'/', 0, buffer, 32)",
    "pivot_root": "call(155, b'.', b'.')", "bpf": "call(321, 5, buffer, 72)", "perf events": "call(298, buffer, 0, -1, -1, 0)",
    "userfaultfd": "call(323, 0); call(323, 1)", "keyrings": "call(250, 0, -3, 1); call(248, b'user', b'k', b'v', 1, -3)",
    "memory of another": "call(310, os.getppid(), buffer, 1, buffer, 1, 0); call(311, os.getppid(), buffer, 1, buffer, 1, 0)",
    "ptrace": "call(101, 16, os.getppid(), 0, 0); call(101, 0x4206, os.getppid(), 0, 0); call(101, 0, 0, 0, 0)",
    "descriptors of another": "call(438, 3, 1, 0)", "personality": "call(135, 0x0040000)", "LDT": "call(154, 1, buffer, 16)",
    "fanotify": "call(300, 0, 0)", "handles of files": "call(303, -100, b'/', buffer, buffer, 0); call(304, -100, buffer, 0)",
    "real-time priority": "call(144, 0, 1, buffer)", "priority of all": "call(141, 2, 0, 19)", "limits of another": "call(302, os.getppid(), 7, buffer, 0)",
    "core dumps back on": "call(160, 4, buffer); call(302, 0, 4, buffer, 0)", "kernel modules": "call(175, buffer, 9, b''); call(313, 0, b'', 0)",
    "reboot": "call(169, 0xfee1dead, 672274793, 0, 0)", "host name": "call(170, b'x', 1)", "clock": "call(164, buffer, 0); call(227, 0, buffer)",
    "quota and swap": "call(179, 0, b'', 0, buffer); call(167, b'x', 0)", "terminal input": "call(16, 0, 0x5412, buffer)",
    "x32 numbers": "call(0x40000000 | 41, 2, 1, 0); call(0x40000000 | 101, 16, 1, 0)", "a call of the future": "call(480); call(1000)",
    "secret memory": "call(447, 0)", "kcmp and pidfd": "call(312, os.getppid(), os.getpid(), 0, 0, 0)", "inotify": "call(294, 0)",
    "syslog": "call(103, 3, buffer, 4096)", "32-bit calls": "",
}  # fmt: skip
CODE_32 = (  # mov eax, 20 (getpid of i386); int 0x80; ret
    "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
    "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
    "if f() > 0: print('REACHED')"
)
PROCESSES = {
    "kill the grader": "import os, signal\nfor n in (9, 15, 19): os.kill({PID}, n); print('REACHED')",
    "kill everybody": "import os\nos.kill(-1, 9)",
    "stop the parent": "import os\nos.kill(os.getppid(), 19)",
    "a daemon": "import subprocess; subprocess.Popen(['/bin/sh', '-c', 'sleep 97; : {MARK}'], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)",
    "a daemon that ignores signals": "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
     "    if os.fork() == 0:\n"
    "        for n in range(1, 65):\n            try: signal.signal(n, signal.SIG_IGN)\n"
     "            except (OSError, ValueError): pass\n"
    "        os.closerange(0, 64); os.execv('/bin/sleep', ['{MARK}', '97'])\n    os._exit(0)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a fork bomb of sleepers": "import os, time\nwhile True:\n    try:\n"
     "        if os.fork() == 0: time.sleep(97)\n    except OSError: pass",
    "zombies": "import os\nwhile True:\n    try:\n        if os.fork() == 0: os._exit(0)\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n"
     "    try: threading.Thread(target=time.sleep, args=(97,), daemon=True).start()\n    except RuntimeError: pass",
    "vfork chains": "import subprocess\nwhile True:\n"
     "    try: subprocess.Popen(['/bin/sh', '-c', 'sleep 97; : {MARK}'])\n    except OSError: pass",
    "close pipes and live on": "import os, time\nos.closerange(0, 64)\ntime.sleep(97)",
    "stop oneself": "import os\nos.kill(os.getpid(), 19)",
    "stopped children": "import os\nfor _ in range(5):\n    if os.fork() == 0: os.kill(os.getpid(), 19)",
    "sleep past the limit": "import time\ntime.sleep(97)",
    "spin on all cores": "import os\nfor _ in range(6):\n    if os.fork() == 0: break\nwhile True: pass",
    "ignore the CPU limit": "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass",
    "crash with a core": "import ctypes, resource\ntry: resource.setrlimit(4, (0, 0))\n"
     "except (OSError, ValueError): pass\nctypes.string_at(1)",
}  # fmt: skip
MEMORY = {
    "one process": "x = []\nwhile True: x.append(bytearray(8 << 20))",
    "many processes": "import os, time\nfor _ in range(6):\n    if os.fork() == 0: break\n"
     "x = bytearray(100 << 20)\ntime.sleep(2); print('REACHED')",
    "copies on write": "import os, time\nx = bytearray(b'a' * (60 << 20))\nfor _ in range(6):\n"
     "    if os.fork() == 0: break\n"
    "for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(2); print('REACHED')",
    "shared mappings": "import mmap, os, time\nfor _ in range(6):\n    if os.fork() == 0: break\n"
     "m = mmap.mmap(-1, 100 << 20)\n"
    "for i in range(0, len(m), 4096): m[i] = 1\ntime.sleep(2); print('REACHED')",
    "memfd": "import os\nf = os.memfd_create('x'); os.write(f, b'x'); print('REACHED')",
    "System V": CALL + "call(29, 0, 64 << 20, 0o1600); call(68, 0, 0o1600); call(64, 0, 9, 0o1600)",
    "message queues": CALL + "call(240, b'q', 0o102, 0o600, 0)",
    "huge pages": CALL + "call(9, 0, 2 << 20, 3, 0x40022, -1, 0)",
    "pinned by pipes": CALL + "r, w = os.pipe(); call(278, w, buffer, 1, 0); call(275, r, 0, w, 0, 9, 0); call(276, r, w, 9, 0); call(72, w, 1031, 1 << 20)",
    "pipes": "import os\nn = 0\nwhile True:\n"
     "    r, w = os.pipe(); os.set_blocking(w, False); n += os.write(w, bytes(1 << 20))\n"
     "    if n > 64 << 20: print('REACHED')",
    "socket buffers": "import socket\na, b = socket.socketpair()\na.setsockopt(1, 7, 1 << 30); print('REACHED')",
    "the file on stdin": "import os\nos.ftruncate(0, 1 << 30); print('REACHED')",
    "files in memory": "for i in range(64): open(f'/tmp/f{{i}}', 'wb').write(bytes(4 << 20))\nprint('REACHED')",
    "files in shared memory": "for i in range(64): open(f'/dev/shm/{{i}}', 'wb').write(bytes(4 << 20))\n"
     "print('REACHED')",
    "inodes": "import os\nfor i in range(20_000): os.mkdir(str(i))\nprint('REACHED')",
    "a sparse file mapped": "import mmap\n"
     "f = open('x', 'w+b'); f.truncate(60 << 20); n = [mmap.mmap(f.fileno(), 60 << 20) for _ in range(9)]; print('REACHED')",
    "locked memory": CALL + "call(151, 3)",
}  # fmt: skip
FLOODS = {
    "stdout": "while True: print('x' * 4096)",
    "stderr": "import sys\nwhile True: sys.stderr.write('x' * 4096)",
    "the report": "import os\nwhile True: os.write(3, b'[' * 65536)",
    "a deep report": "import os\nos.write(3, b'[' * 400_000 + b']' * 400_000)",
    "a number too long": "import os\nos.write(3, b'{{\"value\": ' + b'9' * 500_000 + b'}}')",
    "a forged line": "print('{{\"status\": \"ended\", \"stdout\": \"49\"}}')",
    "a deep folder": "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')",
    "a folder that nobody enters": "import os\n"
     "os.makedirs('a/b/c'); os.symlink('{FILE}', 'a/l'); os.symlink('{FOLDER}', 'a/b/l'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)",
    "links in place of its folder": "import os\n"
     "h = os.getcwd(); os.chdir('/'); os.rmdir(h); os.symlink('{FOLDER}', h)",
    "names no one can print": "import os\nfor i in range(1, 255):\n"
     "    if i != 47: open(bytes([i]) * 9, 'w').close()",
}  # fmt: skip
SECRETS = {
    "environment": "import os; print('REACHED' if '{SECRET}' in str(os.environ) else '')",
    "environment in memory": "import ctypes\n"
     "e = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\ni = 0\n"
    "while e[i]:\n    if b'{SECRET}' in e[i]: print('REACHED')\n    i += 1",
    "environment of the parent": "import os\nprint('REACHED', open(f'/proc/{os.getppid()}/environ').read())",
    "command lines": "import os\nfor p in os.listdir('/proc'):\n"
     "    if p.isdigit() and p != str(os.getpid()): print('REACHED', open(f'/proc/{p}/cmdline').read())",
    "open descriptors": "import os\nfor fd in range(4, 4096):\n    try: os.fstat(fd); print('REACHED', fd)\n"
     "    except OSError: pass",
    "folder of the repository": "import os\nprint('REACHED', os.listdir('{REPOSITORY}/slimectl'))",
    "home folder": "import os, sys\nn = set(os.listdir('{HOME}')) - set(sys.base_prefix.split('/'))\n"
     "if n: print('REACHED', n)",
    "its own modules": "import sys\nprint('REACHED' if [m for m in sys.modules if 'slimectl' in m] else '')",
    "objects of the job": "import gc\n"
     "print('REACHED' if any(isinstance(o, dict) and o.get('memory_mib') and '{DETCEPXE}'[::-1] in repr(o) for o in gc.get_objects()) else '')",
}  # fmt: skip
SECRETS = {
    name: program.replace("{os.getppid()}", "{{os.getppid()}}").replace("{p}", "{{p}}")
    for name, program in SECRETS.items()
}
FILES = {name: program.replace("{os.getppid()}", "{{os.getppid()}}") for name, program in FILES.items()}

WRONG = "def f(x): return 0\n"
VERDICTS = {
    "exit in the body": "import os; os._exit(0)", "sys.exit": "import sys; sys.exit()", "exit in the call": "def f(x):\n    import os; os._exit(0)",
    "SystemExit in the call": "def f(x): raise SystemExit(0)",
    "passed on descriptor 3": WRONG + "import os\nos.write(3, b'{\"passed\": true}')",
    "passed on every descriptor": WRONG + "import os\nfor n in range(99):\n"
     "    try: os.write(n, b'{\"passed\": true, \"case\": 0}\\n')\n    except OSError: pass",
    "a reply before the question": WRONG + "import os, struct, json\n"
     "m = json.dumps({'ready': True}).encode(); a = json.dumps({'result': 4, 'printed': ''}).encode()\n"
    "os.write(3, b''.join(struct.pack('=I', len(t)) + t for t in (m, a, a, a)))",
    "equal to everything": "class A:\n    __eq__ = __lt__ = __le__ = __gt__ = __contains__ = lambda s, o: True\n"
     "    __hash__ = lambda s: 0\ndef f(x): return A()",
    "a number equal to everything": "class A(int):\n    __eq__ = lambda s, o: True\n"
     "    __hash__ = int.__hash__\ndef f(x): return A(0)",
    "a list equal to everything": "class A(list):\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
    "zero after any difference": "class A:\n    __sub__ = __rsub__ = __add__ = lambda s, o: 0\n"
     "    __abs__ = lambda s: 0\ndef f(x): return A()",
    "a class in place of the function": "class f:\n    def __init__(s, x): pass\n"
     "    __eq__ = lambda s, o: True\n    __sub__ = lambda s, o: 0",
    "builtins overwritten": WRONG + "import builtins\nbuiltins.AssertionError = Warning\n"
     "builtins.abs = lambda x: 0\nbuiltins.isinstance = lambda *a: True",
    "helpers overwritten": WRONG + "def check(*a): pass\nabs = round = len = sorted = lambda *a: 0",
    "trace function": WRONG + "import sys, threading\n"
     "sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
    "modules replaced": WRONG + "import sys, types\n"
     "for m in ('math', 'json', 'unittest', 'os'): sys.modules[m] = types.ModuleType(m)",
    "exit handler": WRONG + "import atexit, os\natexit.register(os._exit, 0)",
    "expected value in memory": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
     "        if type(o) in (dict, list, tuple) and '{DETCEPXE}'[::-1] in repr(o)[:200_000]: return '{DETCEPXE}'[::-1]\n",
    "expected value in frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
     "        if '{DETCEPXE}'[::-1] in repr(frame.f_locals)[:200_000]: return '{DETCEPXE}'[::-1]\n"
     "        frame = frame.f_back",
    "source of the test": "import linecache, inspect\ndef f(x):\n"
     "    return '{DETCEPXE}'[::-1] if '{DETCEPXE}'[::-1] in ''.join(linecache.getlines('test.py')) + str(inspect.stack()) else 0",
    "a child answers": "import os\ndef f(x):\n    os.fork()\n    return 0",
    "a deep answer": "def f(x):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a",
    "an endless answer": "def f(x):\n    while True: yield 0",
    "an answer of 100 MB": "def f(x): return 'x' * 100_000_000",
    "hash collisions": "def f(x): return {i * (2**61 - 1): 0 for i in range(20_000)}",
    "an exception of the judge": "class BrokenChannelError(BaseException): pass\n"
     "def f(x): raise BrokenChannelError('passed')",
    "AssertionError that is none": "class AssertionError(Exception): pass\ndef f(x): raise AssertionError()",
    "an end of the test's loop": "def f(x): raise StopIteration",
    "a module as answer": "import unittest.mock\ndef f(x): return unittest.mock.ANY",
    "frames of a callback": "def f(x): return x.__globals__ if hasattr(x, '__globals__') else 0",
    "signals to all": WRONG + "import os, signal\nfor n in (1, 2, 10, 12, 13, 14, 15, 18):\n"
     "    try: os.kill(-1, n)\n    except OSError: pass",
}  # fmt: skip
