"""What keeps processes of one machine from each other: proxies, and folders too long for sockets."""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import stat
import tempfile
import urllib.request
from pathlib import Path

import pytest

from slimectl.errors import StorageError
from slimectl.system import loopback
from slimectl.system.loopback import bypass_proxies, scratch_folder, short_temporary_folders, without_proxy


@pytest.mark.parametrize(
    ("environment", "hosts", "listed"),
    [
        ({}, (), "localhost,127.0.0.1"),
        ({"no_proxy": ".cluster.local"}, ("10.0.0.2",), ".cluster.local,localhost,127.0.0.1,10.0.0.2"),
        ({"no_proxy": "a, 127.0.0.1", "NO_PROXY": "b"}, ("127.0.0.1",), "a,127.0.0.1,b,localhost"),
        ({"NO_PROXY": "*"}, ("10.0.0.2",), "*"),
    ],
)
def test_what_the_user_excludes_from_proxies_is_kept(environment: dict[str, str], hosts: tuple[str, ...], listed: str):
    assert without_proxy(environment, *hosts) == {"NO_PROXY": listed, "no_proxy": listed}


def test_programs_reach_loopback_and_our_servers_past_every_kind_of_proxy(monkeypatch: pytest.MonkeyPatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    assert not urllib.request.proxy_bypass("127.0.0.1:8000")
    bypass_proxies("10.43.1.39")
    assert all(urllib.request.proxy_bypass(f"{host}:8000") for host in ("127.0.0.1", "localhost", "10.43.1.39"))
    assert not urllib.request.proxy_bypass("example.com:80")


@pytest.mark.parametrize("length", [20, 66, 130])
def test_a_socket_fits_below_a_scratch_folder_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
):
    given = "/tmp/" + "x" * (length - 5)
    os.makedirs(given, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", given)
    monkeypatch.setattr(multiprocessing.util.process.current_process(), "_config", {})
    monkeypatch.setattr(multiprocessing.util, "Finalize", lambda *arguments, **options: None)
    folder = scratch_folder("slimectl-server-")
    with short_temporary_folders():
        listeners = Path(multiprocessing.util.get_temp_dir())
    assert tempfile.tempdir == given  # for all other files
    for made in (folder, listeners):
        assert (made.parent == Path(given)) == (length == 20)
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(made / ("u" * 45)))  # the longest that SGLang, vLLM and multiprocessing append
        (made / ("u" * 45)).unlink()
        made.rmdir()
    os.rmdir(given)


def test_without_a_short_folder_the_error_names_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = tmp_path / ("x" * 90)
    monkeypatch.setattr(tempfile, "tempdir", str(given))
    monkeypatch.setattr(loopback, "SHORT_FOLDERS", ("/nowhere",))
    with pytest.raises(StorageError, match=rf"TMPDIR={given}: too long .* at most 107 bytes.* Set TMPDIR to a shorter"):
        scratch_folder("slimectl-env-")
