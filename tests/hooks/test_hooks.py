"""User callables are found by path, checked before anything is loaded, and called by parameter name."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from slimectl.errors import HookError
from slimectl.hooks import HOOKS, FlatSettings
from slimectl.plugins.callables import Hook
from slimectl.settings import Settings

OFFERS = ("args", "settings", "sample")


def hook(tmp_path: Path, text: str, name: str = "f") -> Hook:
    file = tmp_path / f"hooks_{abs(hash(text))}.py"
    file.write_text(text)
    return Hook(f"{file}:{name}", setting="score.custom_rm_path", offers=OFFERS)


def test_a_hook_gets_only_what_it_asks_for(tmp_path: Path):
    found = hook(tmp_path, "def f(sample): return sample + 1")
    assert found({"args": 0, "settings": 0, "sample": 41}) == 42


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("def f(sample, /, settings=7): return (sample, settings)", (41, 0)),
        ("def f(sample, other=7, /, **kwargs): return (sample, other, sorted(kwargs))", (41, 7, ["args", "settings"])),
    ],
)
def test_positional_only_parameters_get_the_argument_of_their_name(tmp_path: Path, text: str, result: object):
    found = hook(tmp_path, text)
    assert found({"args": 1, "settings": 0, "sample": 41}) == result


def test_the_older_shape_with_args_first_works_too(tmp_path: Path):
    found = hook(tmp_path, "def f(args, sample, **kwargs): return (args, sample, sorted(kwargs))")
    assert found({"args": 1, "settings": 2, "sample": 3}) == (1, 3, ["settings"])


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def f(sampel): pass", "f", "asks for sampel. Functions of this setting can ask for args, settings, sample"),
        ("x = 1", "f", "has no such name: f"),
        ("f = 3", "f", r"f is int 3\. Give a function\."),
        ("from .other import x", "f", r"with no known parent package \(hooks_.*py:1\). Name it as a module, as in "),
        ("import sys\nimport no_such_package_at_all", "f", r"ModuleNotFoundError: .* \(hooks_.*py:2\)$"),
    ],
)
def test_a_hook_of_the_wrong_shape_is_refused_at_once(tmp_path: Path, text: str, name: str, message: str):
    with pytest.raises(HookError, match=message):
        hook(tmp_path, text, name)


def test_an_async_hook_runs_to_its_end_where_a_result_is_needed(tmp_path: Path):
    text = "import asyncio\nasync def f(sample):\n    await asyncio.sleep(0)\n    return 1 / sample"
    waiting = hook(tmp_path, text)

    async def inside_of_a_loop() -> float:
        return waiting({"sample": 4})

    assert (waiting({"sample": 2}), asyncio.run(inside_of_a_loop())) == (0.5, 0.25)
    with pytest.raises(HookError, match=r"raised ZeroDivisionError: division by zero \(hooks_.*py:4\)"):
        waiting({"sample": 0})


def test_a_missing_file_is_named():
    with pytest.raises(HookError, match=r"score.custom_rm_path: nowhere.py: no such file"):
        Hook("nowhere.py:f", setting="score.custom_rm_path", offers=OFFERS)


def test_what_a_hook_raises_comes_back_with_its_own_words(tmp_path: Path):
    found = hook(tmp_path, "def f(sample): raise KeyError('gold')")
    with pytest.raises(HookError, match="raised KeyError: 'gold'"):
        found({"sample": 1})


def test_args_read_by_the_flat_names_that_people_know():
    args = FlatSettings(Settings())
    assert args.rollout_temperature == 1.0
    assert args.lr == 1e-6
    assert args.train.lr == 1e-6
    with pytest.raises(AttributeError, match="is in several sections"):
        _ = args.timeout_s


def test_modules_of_the_current_folder_and_neighbours_of_a_file_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "folder_of_mine").mkdir()
    (tmp_path / "folder_of_mine" / "rewards_of_mine.py").write_text(
        "from words_of_mine import WORD\ndef f(): return WORD"
    )
    (tmp_path / "folder_of_mine" / "words_of_mine.py").write_text("WORD = 'fine'")
    monkeypatch.chdir(tmp_path)
    file = Hook("folder_of_mine/rewards_of_mine.py:f", setting="score.custom_rm_path", offers=OFFERS)
    module = Hook("folder_of_mine.rewards_of_mine.f", setting="score.custom_rm_path", offers=OFFERS)
    assert file({}) == module({}) == "fine"


def test_an_import_of_slime_that_is_not_here_names_those_that_are(tmp_path: Path):
    file = tmp_path / "of_slime.py"
    file.write_text("from slime.utils.memory_utils import clear_memory\ndef f(sample): return 0")
    with pytest.raises(
        HookError,
        match=r"no stand-in for slime.utils.memory_utils. Available in slime.utils: .*, slime.utils.types. Remove",
    ):
        HOOKS["score.custom_rm_path"].load(f"{file}:f")


def test_a_bare_call_leaves_the_exception_as_it_is(tmp_path: Path):
    found = hook(tmp_path, "def f(sample): raise KeyError('gold')")
    with pytest.raises(KeyError):
        found.bare({"sample": 1})
