"""What a server gets by its environment, because every user of a machine can read a command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimectl.engines.api_keys import ServerKeys, leave_key, local_key
from slimectl.engines.server.launch import serve_server
from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor.bootstrap import hidden_keys
from slimectl.engines.supervisor.server_process import ServerOptions

FOLDER = Path(hidden_keys.__file__).parent

WORD = "hunter2-of-a-server"
KEYS = ServerKeys(api_key=WORD, admin_api_key=f"{WORD}-admin")

PYTHON = """#!/bin/sh
"exec" "{python}" "$0" "$@"  # a line for sh, whose #! takes no blanks
import http.server, json, os, sys
if sys.argv[2] == "-c":
    print("0.5.20")
elif sys.argv[3] == "--describe":
    one = {{"off": None, "takes": "one", "type": "str", "choices": None, "default": None}}
    print(json.dumps({{name: {{"flag": "--" + name.replace("_", "-"), **one}} for name in ("api_key", "served_name")}}))
else:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_):
            pass
    host, port = (word.partition("=")[2] for word in sys.argv[-2:])
    http.server.HTTPServer((host, int(port)), Answer).serve_forever()
"""
"""A Python that says it has SGLang, and serves /health as its launch.py would."""


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def facts(pid: int | None) -> tuple[str, dict[str, str]]:
    """Command line and environment of a process."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return command, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_sglang_gets_its_keys_by_its_environment(python: str, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    spec = ServerSpec("sglang", tmp_path, args={"api_key": WORD, "served_name": "small"})
    server = sglang_server(spec, ServerOptions(tmp_path / "log", keys=KEYS), python=python)
    server.start()
    command, environment = facts(server.pid())
    server.stop()
    assert WORD not in command
    assert "--served-name small" in command
    assert json.loads(environment["SLIMECTL_FLAGS"]) == ["--api-key", WORD]
    assert json.loads(environment["SLIMECTL_KEYS"]) == [WORD, f"{WORD}-admin"]


def test_ours_gets_them_too(tmp_path: Path):
    server = serve_server(ServerSpec("serve", tmp_path), ServerOptions(tmp_path / "log", keys=KEYS))
    command = " ".join(server.program.command("127.0.0.1", 1))
    assert WORD not in command
    assert server.program.env == {"SLIMECTL_ENGINE_API_KEY": WORD, "SLIMECTL_ENGINE_ADMIN_API_KEY": f"{WORD}-admin"}


def test_flags_and_keys_go_behind_the_command_line(monkeypatch: pytest.MonkeyPatch):
    known = {"api_key", "admin_api_key", "port"}
    assert hidden_keys.flags(known) == []
    monkeypatch.setenv(hidden_keys.KEYS, json.dumps(["a", "b"]))
    assert hidden_keys.flags(known) == ["--api-key", "a", "--admin-api-key", "b"]
    assert hidden_keys.flags({"api_key"}) == ["--api-key", "a"]
    monkeypatch.setenv(hidden_keys.FLAGS, json.dumps(["--api-key", "c"]))
    assert hidden_keys.flags(known) == ["--api-key", "c", "--admin-api-key", "b"]
    monkeypatch.setenv(hidden_keys.KEYS, json.dumps([None, "-b"]))  # a random key may begin with a dash
    assert hidden_keys.flags(known) == ["--api-key", "c", "--admin-api-key=-b"]


def test_the_log_of_a_server_shows_none_of_them():
    code = (
        "import hidden_keys, logging; hidden_keys.mask_logs(); logging.basicConfig(level=20)\n"
        "logging.info('server_args=%s', {'api_key': 'first-key', 'admin_api_key': 'second-key', 'port': 1})"
    )
    keys = {
        hidden_keys.FLAGS: json.dumps(["--api-key", "first-key"]),
        hidden_keys.KEYS: json.dumps([None, "second-key"]),
    }
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, env=os.environ | keys, capture_output=True, text=True, check=True
    )
    assert said.stderr == (
        "INFO:root:server_args={'api_key': '__SECRET__', 'admin_api_key': '__SECRET__', 'port': 1}\n"
    )


@pytest.mark.parametrize(
    ("keys", "path", "sent"),
    [
        (ServerKeys(), "/pause_generation", {}),
        (ServerKeys(api_key="a"), "/generate", "a"),
        (ServerKeys(api_key="a"), "/pause_generation", "a"),
        (ServerKeys(api_key="a", admin_api_key="b"), "/pause_generation", "b"),
        (ServerKeys(api_key="a", admin_api_key="b"), "/flush_cache?timeout=3", "b"),
        (ServerKeys(api_key="a", admin_api_key="b"), "/server_info", "a"),
        (ServerKeys(admin_api_key="b"), "/generate", {}),
    ],
)
def test_each_request_carries_the_key_that_it_needs_as_sglang_has_it(keys: ServerKeys, path: str, sent: object):
    expected = {"Authorization": f"Bearer {sent}"} if isinstance(sent, str) else {}
    assert keys.headers("http://h:1/", path) == expected
    assert keys.headers("http://user:word@h:1", path) == {}


def test_a_key_that_a_server_left_is_found_by_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = leave_key("key-of-a-server", 31999)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert local_key("http://127.0.0.1:31999") == local_key("http://localhost:31999/v1") == "key-of-a-server"
    assert local_key("http://127.0.0.1:31998") is None
    assert local_key("http://192.0.2.1:31999") is None
    keys = ServerKeys(finds_local=True)
    assert keys.headers("http://127.0.0.1:31998", "/abort_request") == {}
    assert keys.headers("http://127.0.0.1:31999", "/abort_request") == {"Authorization": "Bearer key-of-a-server"}
    assert "key-of-a-server" not in repr(keys)
    path.chmod(0o644)
    assert local_key("http://127.0.0.1:31999") is None
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("key-of-another")
    (tmp_path / "elsewhere").chmod(0o600)
    assert local_key("http://127.0.0.1:31999") is None
    leave_key("key-of-the-next", 31999)
    assert local_key("http://127.0.0.1:31999") == "key-of-the-next"
    assert (tmp_path / "elsewhere").read_text() == "key-of-another"
