"""`[sglang.args]` against the installed SGLang."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest
import serving

from slimectl.engines.sglang.launch import SGLANG, router_interpreter, sglang_server
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor.server_process import ServerOptions
from slimectl.errors import BackendError, SettingsError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def python() -> str:
    return serving.python_of("sglang")


def test_values_become_flags(python: str):
    args = {
        "mem_fraction_static": 0.8, "max_running_requests": 16, "disable_radix_cache": True, "sleep_on_idle": False,
        "lora_paths": ["a=x", "b=y"], "json_model_override_args": {"rope_theta": 1.0},
    }  # fmt: skip
    assert SGLANG.flags(args, python) == [
        "--mem-fraction-static", "0.8", "--max-running-requests", "16", "--disable-radix-cache",
        "--lora-paths", "a=x", "b=y", "--json-model-override-args", '{"rope_theta": 1.0}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"mem_fraction_statc": 0.8}, "Did you mean sglang.args.mem_fraction_static?"),
        ({"tp_size": 2}, "Change cluster.rollout_num_gpus_per_engine instead"),
        ({"max_running_requests": "many"}, "'many' is not a number"),
        ({"disable_radix_cache": "yes"}, "'yes' is not true or false"),
        ({"tokenizer_mode": "fast"}, "'fast' is not one of auto, slow"),
    ],
)
def test_what_sglang_does_not_take_is_refused_before_it_starts(python: str, args: dict[str, object], words: str):
    with pytest.raises(SettingsError) as refused:
        SGLANG.flags(args, python)
    assert str(refused.value).startswith(f"sglang.args.{next(iter(args))}: ")
    assert words in str(refused.value)


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(BackendError, match=r"sglang\.python: cannot run /no/such/python as Python: No such file"):
        SGLANG.interpreter("/no/such/python")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The folder of a Python that has no packages."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare"


def test_a_python_without_sglang_gets_the_pip_command(bare: Path, tmp_path: Path):
    python = str(bare / "bin" / "python")
    with pytest.raises(BackendError, match=rf"{python} has no sglang\. Run: {python} -m pip install .*sglang"):
        sglang_server(ServerSpec("sglang", tmp_path), ServerOptions(tmp_path / "log"), python=python)
    with pytest.raises(BackendError, match=r"has no sglang-router\. Run: .* -m pip install sglang-router==0\.3\.2"):
        router_interpreter(python)


def test_an_sglang_of_another_age_is_refused(bare: Path):
    package = next(bare.glob("lib/*/site-packages")) / "sglang-0.4.9.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.9\n")
    with pytest.raises(BackendError, match=r"has sglang 0\.4\.9, but slimectl supports 0\.5\.18 to 0\.5\.21\. Run: "):
        SGLANG.interpreter(str(bare / "bin" / "python"))
