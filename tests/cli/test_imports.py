"""Commands import what they use: modules that a call has loaded when it ends, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "ray", "aiohttp", "pyarrow", "pandas", "math_verify", "sympy"}


def modules_of(tmp_path: Path, *args: str) -> set[str]:
    """Return the modules that `slimectl ARGS` has imported when it ends."""
    report = tmp_path / "modules.json"
    code = (
        "import json, sys; from pathlib import Path; from slimectl.cli import main\n"
        "try: main()\n"
        f"finally: Path({str(report)!r}).write_text(json.dumps(list(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(json.loads(report.read_text()))


def samples_file(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    sample = {"prompt": "2+2=", "label": "4", "response": "4", "tokens": [1, 2], "response_length": 1}
    path.write_text("".join(json.dumps(sample | {"index": i, "group_index": i}) + "\n" for i in range(10)))
    return path


def model_folder(tmp_path: Path) -> Path:
    from slimectl.architectures import cards

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(cards.load("qwen3-0.6B")["config"]))
    return folder


SETTINGS_CLASSES = "slimectl.settings.root"


@pytest.mark.parametrize(
    ("args", "unused"),
    [
        (
            ["score", "SAMPLES", "--rm-type", "exact"],
            {"numpy", "slimectl.stages.generation", "slimectl.stages.rollout"},
        ),
        (["plan", "--card", "qwen3-4B", "--gpus", "8"], {"numpy", "slimectl.runtime.builders", SETTINGS_CLASSES}),
        (["plan", "--model", "MODEL"], {"numpy", "slimectl.stages", "slimectl.engines"}),
        (["models", "check", "qwen3-0.6B", "MODEL"], {"numpy", "slimectl.stages", "slimectl.engines"}),
        (["inspect", "SAMPLES"], {"slimectl.runtime.builders", "slimectl.stages", SETTINGS_CLASSES}),
        (["metrics"], {"numpy", "slimectl.runtime.builders", SETTINGS_CLASSES}),
        (["--help"], {"numpy", "pydantic", "slimectl.runtime.builders", SETTINGS_CLASSES}),
        (["run", "--help"], {"numpy", "slimectl.runtime.builders", SETTINGS_CLASSES}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_command_imports_nothing_that_it_does_not_use(args: list[str], unused: set[str], tmp_path: Path):
    places = {"SAMPLES": samples_file, "MODEL": model_folder}
    modules = modules_of(tmp_path, *(str(places[arg](tmp_path)) if arg in places else arg for arg in args))
    assert "slimectl.cli.app" in modules
    assert modules & (HEAVY | unused) == set()
