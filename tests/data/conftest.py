import json
from pathlib import Path

import pytest
from ten_prompts import ROWS


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """A file of ten prompts, with a blank line after each."""
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    return path
