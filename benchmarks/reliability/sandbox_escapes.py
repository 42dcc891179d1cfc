"""Campaign against the sandbox: every way out of escapes.py, with and without namespaces.

    python benchmarks/reliability/sandbox_escapes.py --seed 1

An attack is survived if nothing outside has changed, nobody connected to what we listen at, nothing is left running, it
ended in time and printed no REACHED (of statements: did not pass), and an honest program is graded rightly afterwards.
How it is carried out is drawn from the seed: in the program itself, in a thread, in a child, or after an exec.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]

import escapes  # noqa: E402
from campaign import Campaign  # noqa: E402
from sandboxes import refusal, run_without_namespaces  # noqa: E402

from slimectl.sandbox.runner import Limits, Outcome, run_program  # noqa: E402

SECONDS = 2.0
MEMORY_MIB = 256
SLACK_S = 120.0
"""What a run may take beyond its limit on a busy machine before it counts as endless."""

SECRET, EXPECTED = "s3cret-" + str(os.getpid()), "c0ffee" + str(os.getpid())
HIDDEN_TEST = f"assert f(1) == '{EXPECTED}'"
TESTS = [
    "assert f(2) == 4 and f(3) == 9",
    "assert abs(f(0.5) - 0.25) < 1e-6 and f([]) == 7",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) in (9, 10)\ncheck(f)",
    "assert f(lambda x: x) == 4",
    "for got, right in zip(map(f, [2, 3]), [4, 9]): assert got == right",
    HIDDEN_TEST,
]
WRAPPERS = {
    "itself": "{code}",
    "a thread": "import threading\nt = threading.Thread(target=exec, args=({code!r}, {{}}))\nt.start(); t.join()",
    "a child": "import os\nif os.fork() == 0:\n    try: exec({code!r}, {{}})\n    finally:\n"
     "        import sys; sys.stdout.flush(); os._exit(0)\nos.wait()",
    "an exec": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {code!r}])",
}  # fmt: skip


class World:
    """Files, listeners and processes that no program may touch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "file"
        for path in (folder, *folder.parents):
            if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
                path.chmod(0o777)
        self.file.write_text("unchanged")
        self.file.chmod(0o666)
        self.mark = f"mark-{os.getpid()}"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.stream, self.datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.abstract = socket.socket(socket.AF_UNIX)
        self.stream.bind(str(folder / "s"))
        self.datagram.bind(str(folder / "s.d"))
        self.abstract.bind("\0" + self.mark)
        for one in (self.stream, self.abstract):
            one.listen()
        for one in (self.tcp, self.stream, self.datagram, self.abstract):
            one.setblocking(False)
        (folder / "s").chmod(0o777)
        (folder / "s.d").chmod(0o777)

    def fill(self, code: str) -> str:
        """Put the world's names into an attack."""
        names = {"FILE": self.file, "FOLDER": self.folder, "SOCKET": self.folder / "s", "MARK": self.mark,
                 "PORT": self.tcp.getsockname()[1], "PID": os.getpid(), "SECRET": SECRET, "DETCEPXE": EXPECTED[::-1],
                 "REPOSITORY": ROOT, "HOME": Path.home()}  # fmt: skip
        for name, value in names.items():
            code = code.replace("{" + name + "}", str(value))
        return code.replace("{{", "{").replace("}}", "}")

    def damage(self) -> str:
        """Return what has changed; "" if nothing has."""
        status = self.file.stat()
        if self.file.read_text() != "unchanged" or status.st_nlink != 1 or status.st_mode & 0o777 != 0o666:
            return "the file outside has changed"
        if sorted(os.listdir(self.folder)) != ["file", "s", "s.d"]:
            return "the folder outside has changed"
        for listener in (self.tcp, self.stream, self.abstract):
            try:
                listener.accept()
                return "somebody connected"
            except BlockingIOError:
                continue
        try:
            self.datagram.recv(1)
            return "a datagram arrived"
        except BlockingIOError:
            pass
        return f"left running: {self.mark}" if self._is_running() else ""

    def _is_running(self) -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.mark.encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                    return True
            except OSError:
                continue
        return False


def run(program: str, case: dict[str, Any], *, isolated: bool, user: int) -> Outcome:
    """Run one attack in a sandbox of that kind."""
    limits = {"timeout_s": SECONDS, "test_timeout_s": SECONDS, "memory_mib": MEMORY_MIB}
    if isolated:
        return run_program(program, [case], Limits(**limits))[0]
    outcomes = run_without_namespaces(program, case, user=user, **limits)
    if isinstance(outcomes, str):
        raise SystemExit(outcomes)
    return outcomes[0]


def is_graded_rightly(*, isolated: bool, user: int) -> bool:
    """Return whether an honest program still passes, and a wrong one still fails."""
    case = {"code": "assert f(3) == 9"}
    results = []
    for program in ("def f(x): return x * x", "def f(x): return x + x"):
        if isolated:
            results.append(run_program(program, [case], Limits(60, 30))[0])
        else:
            results.append(run_without_namespaces(program, case, user=user)[0])
    return [one.report for one in results] == [{"passed": True}, None]


def attacks(random: Random) -> list[tuple[str, str, tuple[str, str], dict[str, Any]]]:
    """Return (category, name, program, case) of every attack, in a drawn order, each in a drawn place."""
    tables = {
        "files": escapes.FILES,
        "network": escapes.NETWORK,
        "processes": escapes.PROCESSES,
        "memory": escapes.MEMORY,
        "floods and leftovers": escapes.FLOODS,
        "secrets": escapes.SECRETS,
        "kernel calls": {name: escapes.CALL + (code or escapes.CODE_32) for name, code in escapes.KERNEL.items()},
    }
    drawn = []
    for category, table in tables.items():
        for name, code in table.items():
            place = random.choice(list(WRAPPERS)) if category in ("files", "network", "kernel calls") else "itself"
            drawn.append((category, f"{name}, in {place}", (code, WRAPPERS[place]), {"input": ""}))
    for name, code in escapes.VERDICTS.items():
        drawn.append(
            ("verdicts", name, (code, "{code}"), {"code": HIDDEN_TEST if "DETCEPXE" in code else random.choice(TESTS)})
        )
    random.shuffle(drawn)
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="attacks; 0 for all, in both kinds of sandbox")
    options = parser.parse_args()
    if reason := refusal():
        raise SystemExit(reason)
    random, campaign = Random(options.seed), Campaign("ways out of the sandbox", options.seed)
    os.environ["SLIMECTL_SECRET"] = SECRET
    users = [0, 65534] if os.getuid() == 0 else [os.getuid()]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "world").mkdir()
        world = World(Path(folder).resolve() / "world")
        drawn = attacks(random)
        trials = [(attack, isolated) for isolated in (True, False) for attack in drawn]
        for (category, name, (code, wrapper), case), isolated in trials[: options.count or len(trials)]:
            user = random.choice(users)
            program = wrapper.format(code=world.fill(code)) if wrapper != "{code}" else world.fill(code)
            started = time.monotonic()
            outcome = run(program, case, isolated=isolated, user=user)
            taken = time.monotonic() - started
            reached = outcome.report == {"passed": True} if "code" in case else "REACHED" in outcome.stdout
            faults = [world.damage()]
            faults.append(f"reached: {outcome.stdout[:200]!r}" if reached else "")
            faults.append(f"took {taken:.0f} s" if taken > SECONDS + SLACK_S else "")
            if random.random() < 0.15:
                faults.append("" if is_graded_rightly(isolated=isolated, user=user) else "an honest program failed")
            observation = "; ".join(fault for fault in faults if fault)
            kind = "" if isolated else f", without namespaces as {'root' if user == 0 else 'another'}"
            place = category if isolated else f"{category}, without namespaces"
            campaign.record(place, f"{name}{kind}", survived=not observation, observation=observation)
        for isolated in (True, False):
            for user in users:
                graded = is_graded_rightly(isolated=isolated, user=user)
                campaign.record("honest programs afterwards", f"user {user}", survived=graded, observation="failed")
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
