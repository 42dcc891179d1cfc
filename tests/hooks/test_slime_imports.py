"""Where `import slime` resolves: in functions of users, in plain Python, and beside a slime that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimectl.migrate.stand_ins import IMPORT_PATH, STAND_INS, SWITCH

ROOT = Path(__file__).parents[2]


def python(code: str, *paths: Path, **environment: str) -> str:
    """Run code in a new process with folders on its path and return its output."""
    path = os.pathsep.join(map(str, [ROOT, *paths]))
    variables = {**os.environ, "PYTHONPATH": path, SWITCH: "", **environment}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    return result.stdout.strip() or result.stderr.strip().splitlines()[-1]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a package named slime: with modules that have a stand-in, and others."""
    files = {
        "slime/__init__.py": "",
        "slime/utils/__init__.py": "",
        "slime/utils/types.py": "class Sample: origin = 'installed'\nRolloutBatch, ParamInfo = list, 'installed'",
        "slime/utils/memory.py": "from slime.utils.types import Sample\nfrom .types import ParamInfo",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


OFFER = "from slimectl.migrate.stand_ins import install_stand_ins; install_stand_ins()\n"


def test_stand_ins_go_before_an_installed_slime_and_one_in_the_current_folder(installed: Path) -> None:
    code = f"{OFFER}import sys; sys.path.insert(0, '')\nfrom slime.utils.types import Sample; print(Sample.__module__)"
    assert python(code, installed) == "slimectl.types"
    assert python(f"import os; os.chdir({str(installed)!r})\n{code}") == "slimectl.types"


def test_the_switch_asks_for_the_installed_slime(installed: Path) -> None:
    code = f"{OFFER}from slime.utils.types import Sample; print(Sample.origin)"
    assert python(code, installed, **{SWITCH: "installed"}) == "installed"
    assert "SLIMECTL_SLIME = installed requires it. Install slime" in python(code, **{SWITCH: "installed"})
    assert "SLIMECTL_SLIME = 'on' is not a valid value" in python(code, **{SWITCH: "on"})


def test_modules_and_names_without_a_stand_in_are_those_of_the_installed_slime(installed: Path) -> None:
    code = f"{OFFER}from slime.utils import memory; print(memory.Sample.__module__, memory.ParamInfo)"
    assert python(code, installed) == "slimectl.types installed"
    code = f"{OFFER}from slime.utils.types import ParamInfo, RolloutBatch; print(ParamInfo, RolloutBatch)"
    assert python(code, installed) == "installed dict[str, typing.Any]"


def test_without_an_installed_slime_the_error_names_what_there_is() -> None:
    error = python(f"{OFFER}import slime.utils.memory")
    assert "slimectl has no stand-in for slime.utils.memory. Available in slime.utils: slime.utils.arguments" in error
    error = python(f"{OFFER}from slime.utils.types import ParamInfo")
    assert "no stand-in for slime.utils.types.ParamInfo. This module has MultimodalType, MultimodalTypes" in error
    code = f"{OFFER}import slime.utils.types as types; print(getattr(types, 'ParamInfo', 'no attribute'))"
    assert python(code) == "no attribute"
    code = f"{OFFER}try: from slime.utils import nothing\nexcept ImportError: print('handled')"
    assert python(code) == "handled"


def test_plain_python_finds_the_stand_ins_at_the_end_of_its_path(installed: Path) -> None:
    code = "from slime.utils.types import Sample; print(Sample.__module__)"
    assert python(code, IMPORT_PATH) == "slimectl.types"
    assert python(code, installed, IMPORT_PATH) == "slime.utils.types"
    assert (IMPORT_PATH / "slimectl.pth").read_text() == "slimectl/migrate/import_path\n"


def test_every_stand_in_can_be_imported() -> None:
    code = OFFER + "import importlib\nfrom slimectl.migrate.stand_ins import STAND_INS\n"
    code += "print([1 for module, names in STAND_INS.items() for name in names "
    code += "if getattr(importlib.import_module(module), name) is None])"
    assert python(code) == "[]"


def test_importing_slimectl_imports_no_stand_in_and_a_sample_no_torch() -> None:
    assert python("import slimectl, sys; print([name for name in sys.modules if 'slime.' in name])") == "[]"
    code = f"{OFFER}from slime.utils.types import Sample; import sys; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_the_page_of_hooks_lists_every_stand_in() -> None:
    page = (ROOT / "docs/guides/slime-functions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(slime\.[\w.]+)` \| (.+) \|$", page, re.MULTILINE)
    listed = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    assert listed == {module: set(names) for module, names in STAND_INS.items() if names}
