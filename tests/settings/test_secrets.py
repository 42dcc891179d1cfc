"""Secrets of settings: usable, and in nothing that is printed or written."""

from __future__ import annotations

import json
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rewards.graders import grading
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.data.manifest import Manifest, settings_hash
from slimectl.errors import BackendError, SettingsError
from slimectl.runtime.builders.trackers import identity
from slimectl.runtime.builders.weight_sync import keyed
from slimectl.settings import Settings
from slimectl.settings.keys import settings_toml
from slimectl.settings.layers import Layer, from_assignments
from slimectl.settings.loading import resolve
from slimectl.settings.secret import check_complete, reveal
from slimectl.stages.grader import Grader
from slimectl.system.redaction import MASK, is_secret_name, mask_addresses, redact, redact_text, remember
from slimectl.types import Sample

WORD = "hunter2-correct-horse"
PLACES = [
    f'engine.backend=sglang sglang.args={{api_key = "{WORD}"}}',
    f"engine.backend=sglang sglang.args.admin_api_key={WORD}",
    f'engine.backend=sglang sglang.args.ssl_keyfile_password="{WORD}"',
    f'engine.backend=sglang sglang.server_groups=[{{name = "a", args = {{api_key = "{WORD}"}}}}]',
    f"score.rm_url=http://user:{WORD}@127.0.0.1:9/score",
    f"score.rm_url=http://{WORD}@127.0.0.1:9/score",
    f"score.rm_url=http://127.0.0.1:9/score?token={WORD}&x=1",
    f"score.rm_url=http://user:{WORD}/slash@127.0.0.1:9/score",
    f"score.rm_options.url=http://user:{WORD}@127.0.0.1:9/v1",
    f'score.rm_options={{body={{apiKey="{WORD}",headers={{Authorization="Bearer\u0020{WORD}"}}}}}}',
    f'score.rm=[{{type = "remote_rm", url = "http://u:{WORD}@127.0.0.1:9"}}]',
    f"engine.api_key={WORD}",
    f"engine.admin_api_key={WORD}",
    f"engine.url=http://user:{WORD}@127.0.0.1:9",
    f'algorithm.opd_kl_coef=1 rollout.temperature=1.0 algorithm.opd_teacher_url=["http://user:{WORD}@127.0.0.1:9"]',
    f"track.with=['wandb'] track.host=https://user:{WORD}@wandb.example",
    f"track.with=['wandb'] track.api_key={WORD}",
    f"rollout.data=https://user:{WORD}@data.example/prompts.jsonl",
]


def settle(*assignments: str) -> Settings:
    return resolve([from_assignments(assignments)]).settings


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_in_nothing_that_is_written_or_printed(place: str, tmp_path: Path):
    # Assignments stand apart by a space and a section.
    assigned = re.split(r" (?=[a-z]+\.)", place)
    settings = settle(*assigned)
    written = settings_toml(settings)
    assert WORD not in written
    manifest = Manifest("run", settings.model_dump(by_alias=True), {f"https://u:{WORD}@data.example": "0"})
    assert WORD not in json.dumps(manifest.signed({}), default=str)
    assert WORD not in json.dumps(identity(settings, tmp_path).config, default=str)
    assert WORD not in repr(settings)
    for command in (["settings", "show"], ["settings", "show", "--changed"], ["rollout", "--dry-run"]):
        options = [word for each in assigned for word in ("-s", each)]
        shown = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
        assert (shown.exit_code == 0 or command[0] == "rollout", WORD in shown.output) == (True, False)
        assert "all users of this machine can read the command line" in shown.output
    with pytest.raises(SettingsError) as lacking:
        check_complete(tomllib.loads(written))
    lines = str(lacking.value).splitlines()
    assert all(line.startswith(assigned[-1].partition("=")[0]) for line in lines)
    assert all("secrets are never written to files. Supply it again with -s " in line for line in lines)


def test_settings_without_secrets_are_written_as_ever():
    settings = settle(
        'eval.data={token = "a.jsonl", password = "b.jsonl"}',
        "score.rm_url=http://127.0.0.1:9/a@b?x=1",
        "score.rm_options.values={SECRET = 1.0}",
        "rollout.data=git@h:a.jsonl",
        "score.reward_key=acc",
    )
    assert redact(settings.model_dump(by_alias=True)) == settings.model_dump(by_alias=True)
    check_complete(tomllib.loads(settings_toml(settings)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["engine.admin_api_key=one"], ["engine.admin_api_key=env:TWO"]),
        (["engine.api_key=one"], []),
        (["score.rm_url=http://u:one@h/x"], ["score.rm_url=http://u:two@h/x"]),
        (["score.rm_url=http://u:one@h/x"], ["score.rm_url=http://h/x"]),
        (["engine.backend=sglang", "sglang.args.api_key=one"], ["engine.backend=sglang", "sglang.args.api_key=two"]),
    ],
)
def test_another_secret_is_no_other_work(one: list[str], other: list[str], tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text("")
    first, second = (settle(*each).model_dump(by_alias=True) for each in (one, other))
    Manifest("score", first, {}).write(out, counts={})
    assert Manifest("score", second, {}).unchanged(out)
    assert settings_hash(first) != settings_hash(settle("score.rm_url=http://h/y").model_dump(by_alias=True))


def test_a_run_that_goes_on_says_which_secret_it_lacks_and_takes_it_from_anywhere(tmp_path: Path):
    first = settle("score.rm_url=http://u:hunter2@h/x", "engine.backend=sglang", "sglang.args.api_key=hunter2")
    layer = Layer("run.toml", tomllib.loads(settings_toml(first)))
    with pytest.raises(SettingsError) as lacking:
        check_complete(resolve([layer]).settings.model_dump(by_alias=True))
    assert str(lacking.value).splitlines() == [
        "sglang.args.api_key: secrets are never written to files. Supply it again with "
        "-s sglang.args.api_key=env:VARIABLE",
        "score.rm_url: secrets are never written to files. Supply it again with -s score.rm_url=env:VARIABLE or "
        "SLIMECTL_SCORE_RM_URL in the environment",
    ]
    again = from_assignments(["score.rm_url=http://u:hunter2@h/x", "sglang.args.api_key=env:KEY"])
    settings = resolve([layer, again]).settings
    check_complete(settings.model_dump(by_alias=True))
    assert settings.score.rm_url == first.score.rm_url


def test_a_resumed_run_without_its_secret_ends_with_one_line(tmp_path: Path):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "run.toml").write_text(settings_toml(settle("engine.url=http://u:hunter2@h:1", "model.path=m")))
    resumed = CliRunner().invoke(app, ["run", "--resume", str(run)])
    assert resumed.exit_code == 2
    assert resumed.output == (
        "slimectl: engine.url: secrets are never written to files. Supply it again with -s engine.url=env:VARIABLE or "
        "SLIMECTL_ENGINE_URL in the environment\n"
    )


def test_a_reference_is_followed_where_the_secret_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_KEY", WORD)
    (tmp_path / "key").write_text(f"{WORD}\n")
    for place in ("env:TEST_KEY", f"file:{tmp_path}/key"):
        keys = [f"engine.api_key={place}", f"sglang.args.api_key={place}", f"score.rm_url={place}"]
        settings = settle("engine.backend=sglang", *keys)
        assert place in settings_toml(settings)
        assert WORD not in settings_toml(settings)
        assert reveal(settings.engine.api_key, setting="engine.api_key") == WORD
        assert keyed(settings).sglang.args == {"api_key": WORD}
        assert keyed(settings).score.rm_url == WORD
    for place, why in (
        ("env:NO_SUCH", "env:NO_SUCH: the variable is not set. Set it, or use another one."),
        ("file:/no/such", "file:/no/such: No such file or directory. Use a file that contains only the secret."),
        (MASK, "secrets are never written to files. Supply it again with -s engine.api_key=env:VARIABLE or "
               "SLIMECTL_ENGINE_API_KEY in the environment"),
    ):  # fmt: skip
        with pytest.raises(SettingsError) as refused:
            reveal(settle(f"engine.api_key={place}").engine.api_key, setting="engine.api_key")
        assert str(refused.value) == f"engine.api_key: {why}"


@pytest.mark.parametrize("place", ["engine.api_key=two words", "engine.api_key='näh'", "engine.api_key=''"])
def test_what_fits_into_no_header_is_refused_without_being_shown(place: str):
    with pytest.raises(SettingsError) as refused:
        settle(place)
    assert str(refused.value) == (
        "engine.api_key: value error, a key must be printable ASCII without spaces, and not empty (command line)"
    )


def test_messages_show_no_password_whoever_says_it():
    said: list[Any] = []

    def answer(body: Any) -> web.Response:
        said.append(body)
        return web.json_response({"error": f"no: {WORD} is wrong"}, status=401)

    with grading(answer) as server:
        url = server.url.replace("http://", f"http://user:{WORD}@")
        grader = Grader(settle("score.rm_type=remote_rm", f"score.rm_url={url}"))
        with pytest.raises(BackendError) as failed:
            grader(Sample(response="x"))
    assert said
    assert WORD not in str(failed.value)
    assert f"http://{MASK}@127.0.0.1" in str(failed.value)
    assert f"no: {MASK} is wrong" in str(failed.value)


def test_explanations_of_a_reward_server_show_no_password():
    with grading(lambda body: web.json_response(1.0)) as server:
        url = server.url.replace("http://", f"http://user:{WORD}@")
        verdict = Grader(settle("score.rm_type=remote_rm", f"score.rm_url={url}")).explain(Sample(response="x"))
    assert verdict.reward == 1.0
    assert verdict.why == f"{server.url.replace('http://', f'http://{MASK}@')} answered 1.0"


def test_a_worker_process_masks_what_its_settings_hold(monkeypatch: pytest.MonkeyPatch):
    from slimectl.system import redaction

    packed = pickle.dumps(settle("engine.backend=sglang", "sglang.args.api_key=a-key-of-another-process"))
    monkeypatch.setattr(redaction, "_SECRETS", set())
    assert redact_text("a-key-of-another-process") == "a-key-of-another-process"
    pickle.loads(packed)
    assert redact_text("it is a-key-of-another-process!") == f"it is {MASK}!"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key", True), ("admin_api_key", True), ("apiKey", True), ("X-Api-Key", True), ("Authorization", True),
        ("hf_token", True), ("token", True), ("ssl_keyfile_password", True), ("aws_secret_access_key", True),
        ("client_secret", True), ("ssl_keyfile", False), ("key", False), ("reward_key", False), ("input_key", False),
        ("eos_token", False), ("stop_token_ids", False), ("max_tokens", False), ("api_key_env", False),
        ("tokenizer_path", False),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, secret: bool):
    assert is_secret_name(name) == secret


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("at http://u:p@h:1/x: refused", f"at http://{MASK}@h:1/x: refused"),
        ("https://token@h", f"https://{MASK}@h"),
        ("http://u:p/q@h/x", f"http://{MASK}@h/x"),
        ("http://h/x?a=1&api_key=p#f", f"http://h/x?a=1&api_key={MASK}#f"),
        ("https://h/x?X-Amz-Signature=p&b=2", f"https://h/x?X-Amz-Signature={MASK}&b=2"),
        ("postgres://u:p@h/db", f"postgres://{MASK}@h/db"),
        ("ssh://git@h/x", "ssh://git@h/x"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("http://h:80/a@b?page=2", "http://h:80/a@b?page=2"),
        ("https://medium.com/@user", "https://medium.com/@user"),
        ("who: a@b?key=c", "who: a@b?key=c"),
    ],
)
def test_addresses_lose_users_and_secret_parameters(text: str, masked: str):
    assert mask_addresses(text) == masked
    assert mask_addresses(masked) == masked


def test_a_remembered_secret_is_masked_in_every_error():
    remember("a-long-remembered-secret")
    assert str(BackendError("it said a-long-remembered-secret and Bearer abcdefghijklmnop")) == (
        f"it said {MASK} and Bearer {MASK}"
    )
