"""An installed package of somebody else adds a verifier, a tracker, an engine, a trainer and an executor."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
from workshop import Workshop

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import BackendError, SettingsError
from slimectl.plugins.registry import ENGINES, TRACKERS, VERIFIERS, Component, Registry
from slimectl.rewards import known_types, verifier
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.keys import settings_toml
from slimectl.settings.layers import Layer, from_assignments, from_environment
from slimectl.settings.loading import resolve
from slimectl.types import Sample

PACKAGE = Path(__file__).parents[2] / "examples" / "package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the package into."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source)  # the build writes into it
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture
def package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is importable in this process."""
    monkeypatch.syspath_prepend(str(installed))
    return installed


def add_package(folder: Path, name: str, entry_points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an installed package with these entry points on the path; its modules are in `folder`."""
    metadata = folder / f"{name}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(assignments)]).settings


def slimectl(workshop: Workshop, installed: Path, *arguments: str) -> str:
    """Run a command in a process that has the package, and return its stdout."""
    environment = workshop.environment | {"PYTHONPATH": str(installed)}
    pipe = subprocess.PIPE
    process = forkserver.start([*arguments], cwd=workshop.folder, env=environment, stdout=pipe, stderr=pipe)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()


@pytest.mark.slow
def test_samples_are_scored_by_the_verifier_of_a_package(workshop: Workshop, installed: Path):
    samples = [{"prompt": "?", "response": text, "label": "no", "tokens": [1], "response_length": 1}
               for text in ("None", "no", "yes")]  # fmt: skip
    (workshop.folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    options = ("--rm-type", "starts_with", "-s", "score.rm_options={ignore_case = true}", "--explain")
    out = slimectl(workshop, installed, "score", "samples.jsonl", *options)
    scored = [json.loads(line) for line in out.splitlines()]
    assert [sample["reward"] for sample in scored] == [1.0, 1.0, 0.0]
    assert scored[2]["metadata"]["explanation"]["why"] == "does not begin with the label"


@pytest.mark.slow
def test_a_run_has_all_parts_from_a_package(workshop: Workshop, installed: Path):
    chosen = {"engine.backend": "echo", "echo.tokens": "2", "train.backend": "norm_only", "cluster.executor": "noted",
              "track.with": "['csv']", "csv.delimiter": "none", "run.num_rollout": "2"}  # fmt: skip
    (workshop.folder / "by_index.py").write_text("def reward(sample):\n    return sample.index % 2\n")
    chosen["score.custom_rm_path"] = "by_index.py:reward"
    flags = [part for key, value in chosen.items() for part in ("-s", f"{key}={value}")]
    slimectl(workshop, installed, "run", "slimectl.toml", *flags)
    run = workshop.folder / "runs" / "a"
    rows = list(csv.reader((run / "metrics.csv").open(), delimiter="\t"))
    lengths = [float(row[2]) for row in rows if row[1] == "rollout/response_len/mean"]
    assert lengths == [2.0, 2.0]
    assert max(line["step"] for line in workshop.metrics("a")) == 2
    assert "sampler" in (run / "hosted.txt").read_text()
    before, after = (dict(HFCheckpoint().read(folder)) for folder in (workshop.model, run / "step_000002" / "policy"))
    assert {name for name in before if not before[name].equal(after[name])} == {"model.norm.weight"}
    slimectl(workshop, installed, "run", "--resume", "runs/a", "--dry-run")
    again = slimectl(workshop, installed, "settings", "show", "-c", "runs/a/run.toml")
    lines = {line.split()[0]: line.split()[1] for line in again.splitlines()}
    assert (lines["echo.tokens"], lines["csv.delimiter"], lines["csv.file"]) == ("2", "none", '"metrics.csv"')


def test_names_of_packages_stand_beside_those_of_slimectl(package: Path):
    assert known_types() == sorted([*VERIFIERS.parts, "starts_with"])
    assert ENGINES.names() == ["auto", "echo", "embedded", "sglang", "transformers", "vllm"]
    assert (ENGINES.package("echo"), ENGINES.package("sglang")) == ("slimectl-example 1.2", "slimectl")
    with pytest.raises(SettingsError, match=r"engine.backend: no engine 'eco'\. Did you mean echo\? Available: auto"):
        settings("engine.backend=eco")


def test_a_prefix_and_a_sum_work_with_a_verifier_of_a_package(package: Path):
    assert verifier("boxed_starts_with")(Sample(response=r"so \boxed{42 km}", label="42")) == 1.0
    assert verifier("boxed_starts_with")(Sample(response="42 km", label="42")) == 0.0
    with pytest.raises(SettingsError, match=r"score.rm_options.ignore_cas: no option of starts_with; did you mean"):
        verifier("starts_with", ignore_cas=True)


def test_a_section_of_a_package_is_validated_like_any_other(package: Path, monkeypatch: pytest.MonkeyPatch):
    assert settings("track.with=['csv']").model_dump()["csv"] == {"file": "metrics.csv", "delimiter": ","}
    with pytest.raises(SettingsError, match=r"csv.fiel: unknown setting \(command line\)\. Did you mean csv.file\?"):
        settings("csv.fiel=a.csv")
    with pytest.raises(SettingsError, match=r"echo.tokens: input should be greater than or equal to 1, not 0"):
        settings("echo.tokens=0")
    monkeypatch.setenv("SLIMECTL_ECHO_TOKENS", "5")
    resolution = resolve([from_environment()])
    assert (resolution.settings.model_dump()["echo"], resolution.origins["echo.tokens"]) == (
        {"tokens": 5},
        "environment",
    )


def test_settings_with_a_section_of_a_package_survive_their_file(package: Path, tmp_path: Path):
    import tomllib

    resolved = settings("track.with=['csv']", "csv.delimiter=none", "echo.tokens=4")
    written = tomllib.loads(settings_toml(resolved))
    assert (written["csv"], written["echo"]) == ({"file": "metrics.csv", "delimiter": "none"}, {"tokens": 4})
    assert resolve([Layer("file", written)]).settings == resolved


def test_a_broken_package_is_one_line_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_module.py").write_text("import a_library_that_nobody_installed")
    parts = "[slimectl.trackers]\nbroken = broken_module:Tracker\n[slimectl.verifiers]\ncareless = json:JSONDecoder\n"
    parts += "partial = partial_module:Partial\nplain = partial_module:Plain\n"
    parts += "[slimectl.engines]\nfaulty = json:JSONDecoder\n"
    (tmp_path / "partial_module.py").write_text(
        "from dataclasses import dataclass\nfrom slimectl.rewards import Verifier\n"
        "@dataclass(frozen=True)\nclass Partial(Verifier):\n    def explain(self, sample): ...\n"
        "class Plain(Verifier):\n    def explain(self, sample): ...\n"
    )
    add_package(tmp_path, "careless", parts, monkeypatch)
    with pytest.raises(BackendError) as broken:
        settings("track.with=['broken']")
    assert str(broken.value) == (
        "careless 0.1: its tracker broken (broken_module:Tracker) cannot be imported: ModuleNotFoundError: No module "
        "named 'a_library_that_nobody_installed'. Fix or uninstall that package."
    )
    with pytest.raises(
        BackendError, match=r"careless 0.1: its verifier careless does not derive from slimectl\.rewards\.Ver"
    ):
        verifier("careless")
    with pytest.raises(BackendError, match=r"its verifier plain lacks the decorator @dataclass\(frozen=True\)\. R"):
        verifier("plain")
    with pytest.raises(BackendError, match=r"careless 0.1: its verifier partial lacks the method extract. Repair or"):
        verifier("partial")
    with pytest.raises(
        BackendError, match=r"careless 0.1: its engine faulty does not derive from .*EngineBackend\. Fix"
    ):
        builders.check_engine(settings("engine.backend=faulty"))
    assert "broken" in TRACKERS.names()  # and a list of names imports nothing


def test_a_tracker_that_rejects_its_arguments_is_a_wrong_setting(package: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"track.kwargs.csv.fiel: no such argument\. Drop it"):
        builders.start_trackers(settings("track.with=['csv']", 'track.kwargs.csv={fiel = "a"}'), tmp_path)


def test_a_tracker_without_its_methods_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "silent_module.py").write_text(
        "class Silent:\n    def __init__(self, run): ...\n    def close(self): ...\n"
    )
    add_package(tmp_path, "careless", "[slimectl.trackers]\nsilent = silent_module:Silent\n", monkeypatch)
    with pytest.raises(BackendError, match=r"careless 0.1: its tracker silent lacks the method log and table\. Fix or"):
        builders.start_trackers(settings("track.with=['silent']"), tmp_path)


def test_an_engine_without_servers_is_refused_in_several(package: Path):
    with pytest.raises(SettingsError, match=r"engine.num_engines: echo has no servers, and a process runs only one"):
        builders.check_engine(settings("engine.backend=echo", "engine.num_engines=2"))


def test_two_packages_with_one_name_are_named_both(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    add_package(tmp_path, "other", "[slimectl.trackers]\ncsv = other:Csv\nstdout = other:Stdout\n", monkeypatch)
    with pytest.raises(
        BackendError, match=r"tracker csv: defined by both other 0.1 and slimectl-example 1.2. Uninstall"
    ):
        TRACKERS.load("csv")
    assert TRACKERS.package("stdout") == "slimectl"  # a name of its own stays slimectl's


def test_a_built_in_name_reads_no_entry_points(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimectl.plugins.registry.entry_points", lambda group: pytest.fail("read"))
    registry = Registry("codec", "slimectl.codecs", {"json": Component("json:dumps", binary=False)})
    assert "json" in registry
    assert (registry.load("json")([1]), registry.fact("json", "binary"), registry.package("json")) == (
        "[1]", False, "slimectl"
    )  # fmt: skip


def test_every_part_of_slimectl_can_be_loaded():
    from slimectl.plugins.registry import EXECUTORS, POLICIES

    for registry in (ENGINES, POLICIES, EXECUTORS, TRACKERS, VERIFIERS):
        for name in registry.parts:
            assert callable(registry.load(name)), name
