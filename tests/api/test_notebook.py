"""examples/tutorial.ipynb runs from top to bottom, inside the event loop of a kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"
SHORTER = [
    (r"ROUNDS = \d+", "ROUNDS = 2"),
    (r'"sft_warmup.max_steps": \d+', '"sft_warmup.max_steps": 3'),
    (r'"run.rollout_batch_size": \d+', '"run.rollout_batch_size": 4'),
    (
        r'"eval.interval": ROUNDS',
        '"eval.interval": ROUNDS, "eval.data.held_out": "slimectl.recipes.spelling:prompts?split=held_out&size=4"',
    ),
]
"""What a run of seconds has in place of the tutorial's settings."""


def test_the_tutorial_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []  # kept without outputs
    for pattern, text in SHORTER:
        code[0].source, changed = re.subn(pattern, text, code[0].source)
        assert changed == 1, pattern
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout") for cell in code
    ]
    assert printed[0] == "2 steps\n"
    assert [len(re.findall(r"^\w+>", text, re.MULTILINE)) for text in printed] == [0, 0, 8, 0]
    pictures = [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code]
    assert pictures == [0, 1, 0, 1]
