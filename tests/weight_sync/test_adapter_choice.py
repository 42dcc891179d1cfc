"""sync.lora: who gets the adapter alone, who merged weights and why, and what is refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimectl.errors import SettingsError
from slimectl.runtime import builders
from slimectl.runtime.preflight import preflight
from slimectl.runtime.stage_functions import load_settings
from slimectl.settings import Settings

SERVERS = {"engine.num_engines": 2, "train.lora_rank": 2}


def settings(**values: Any) -> Settings:
    return load_settings(None, {**SERVERS, **{name.replace("__", "."): value for name, value in values.items()}})


@pytest.mark.parametrize(
    ("values", "obstacle"),
    [
        ({}, None),
        ({"sync__transport": "distributed"}, None),
        ({"sync__lora": "adapter"}, None),
        ({"sync__lora": "merged"}, 'sync.lora = "merged"'),
        (
            {"sync__transport": "disk"},
            "engines accept adapters only through sync.transport = tensor or distributed",
        ),
    ],
    ids=str,
)
def test_servers_get_the_adapter_alone_unless_something_is_in_the_way(values: dict[str, Any], obstacle: str | None):
    assert builders.adapter_obstacle(settings(**values)) == obstacle


def test_engines_that_sleep_on_the_trainers_gpus_get_merged_weights(monkeypatch: pytest.MonkeyPatch):
    given = settings(engine__backend="sglang", cluster__colocate=True)
    assert builders.adapter_obstacle(given) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    expected = "engines that share GPUs with the trainer lose the base model when they sleep"
    assert builders.adapter_obstacle(given) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sync__transport": "disk"}, "sync.lora: adapter, but sync.transport = disk writes whole checkpoints"),
        ({"engine__backend": "sglang", "engine__load": "fp8"}, "sync.lora: adapter, but the weights of engine.load"),
        ({"train__lora_rank": None}, "sync.lora has no effect without an adapter and servers that receive it"),
        ({"engine__num_engines": 1}, "sync.lora has no effect without an adapter and servers that receive it"),
    ],
    ids=str,
)
def test_an_adapter_that_is_asked_for_where_none_can_go_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        settings(sync__lora="adapter", **values)


def test_a_dry_run_says_what_a_push_has():
    def line(**values: Any) -> str:
        return next(iter(preflight(settings(**values), ["engine"]))).detail

    assert line() == "auto, 2 to start, updates send only the adapter"
    assert line(sync__lora="merged") == 'auto, 2 to start, updates send merged weights (sync.lora = "merged")'
    assert line(train__lora_rank=None) == "auto, 2 to start"
