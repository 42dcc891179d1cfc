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


EXAMPLES = {
    "multi_agent": "rollout.rm_hub:batched_async_rm utils.http_utils:post utils.misc:load_function utils.types:Sample",
    "retool": "rollout.sglang_rollout:GenerateState utils.http_utils:post rollout.rm_hub.math_dapo_utils:compute_score",
    "search-r1": "rollout.sglang_rollout:GenerateState utils.http_utils:post utils.types:Sample",
    "strands_sglang": "rollout.rm_hub.math_dapo_utils:compute_score rollout.sglang_rollout:GenerateState",
    "geo3k_vlm_multi_turn": "rollout.sglang_rollout:GenerateState utils.processing_utils:build_processor_kwargs "
    "utils.processing_utils:encode_image_for_rollout_engine utils.http_utils:post utils.types:Sample",
    "coding_agent_rl": "agent.adapters:AnthropicAdapter agent.aiohttp_threaded:FilteredAccessLogger "
    "agent.aiohttp_threaded:run_app_in_thread agent.harness:CLAUDE_CODE agent.sandbox:E2BSandbox agent:sandbox "
    "agent.sandbox:Sandbox utils.misc:SingletonMeta utils.processing_utils:load_tokenizer",
    "train_infer_mismatch_helper": "backends.megatron_utils.cp_utils:all_gather_with_cp "
    "backends.megatron_utils.cp_utils:slice_log_prob_with_cp",
    "on_policy_distillation": "rollout.on_policy_distillation:reward_func utils.types:Sample "
    "rollout.on_policy_distillation:post_process_rewards_cross_vocab",
    "fully_async": "rollout.sglang_rollout:GenerateState rollout.sglang_rollout:generate_and_rm_group "
    "utils.async_utils:run utils.types:Sample",
    "DrGRPO": "utils.types:Sample",
}
"""What the functions of slime's example folders import, as MODULE:NAME below slime."""


def test_the_imports_of_slimes_example_folders_resolve() -> None:
    names = " ".join(EXAMPLES.values()).split()
    lines = [f"from slime.{module} import {value}" for module, _, value in (name.partition(":") for name in names)]
    assert python(OFFER + "\n".join([*lines, "print(len(set(dir())))"])).isdigit()


def test_importing_slimectl_imports_no_stand_in_and_a_sample_no_torch() -> None:
    assert python("import slimectl, sys; print([name for name in sys.modules if 'slime.' in name])") == "[]"
    code = f"{OFFER}from slime.utils.types import Sample; import sys; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_the_page_of_hooks_lists_every_stand_in() -> None:
    page = (ROOT / "docs/guides/slime-functions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(slime\.[\w.]+)` \| (.+) \|$", page, re.MULTILINE)
    listed = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    assert listed == {module: set(names) for module, names in STAND_INS.items() if names}
