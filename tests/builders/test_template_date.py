"""A run keeps the date that its model's chat template prints."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from chat_families.families import build_model

from slimectl import load_settings
from slimectl.errors import SettingsError
from slimectl.runtime.builders import with_template_date


def test_a_date_that_is_printed_is_pinned(tmp_path: Path):
    dated, plain = build_model("llama3.2", tmp_path / "dated"), build_model("qwen2.5", tmp_path / "plain")
    days = [datetime.date.today().isoformat()]
    pinned = with_template_date(load_settings(None, {"model.path": str(dated)})).rollout.template_date
    days.append(datetime.date.today().isoformat())
    assert pinned in days
    assert with_template_date(load_settings(None, {"model.path": str(plain)})).rollout.template_date is None
    for date in ("2026-01-02", datetime.date(2026, 1, 2)):  # as a text, and as TOML reads it without quotes
        before = load_settings(None, {"model.path": str(dated), "rollout.template_date": date})
        assert with_template_date(before).rollout.template_date == "2026-01-02"
    for value in ("2. 1. 2026", datetime.datetime(2026, 1, 2, 3)):
        with pytest.raises(SettingsError, match=r"rollout\.template_date"):
            load_settings(None, {"rollout.template_date": value})
