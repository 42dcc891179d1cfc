"""`slimectl inspect --mask`: which tokens are trained on, and which are only read."""

from __future__ import annotations

import json

from workshop import Workshop

SAMPLE = {
    "index": 4,
    "prompt": "1+1=",
    "tokens": list(b"1+1=add(1,1) gives 2 so 2"),
    "response_length": 21,
    "response": "add(1,1) gives 2 so 2",
    "loss_mask": [1] * 8 + [0] * 8 + [1] * 5,
    "rollout_log_probs": [-1.0] * 8 + [0.0] * 8 + [-1.0] * 5,
    "status": "completed",
}


def test_what_a_tool_wrote_is_told_apart(workshop: Workshop):
    (workshop.folder / "s.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    out = workshop.slimectl("inspect", "s.jsonl", "--mask", "--model", str(workshop.model)).decode()
    assert out.splitlines()[1:] == [
        "--- sample 4: 4 + 21 tokens, 13 trained",
        "1+1=[[add(1,1)]](( gives 2))[[ so 2]]",
    ]


def test_colours_can_be_asked_for(workshop: Workshop, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    (workshop.folder / "s.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    out = workshop.slimectl("inspect", "s.jsonl", "--mask", "--model", str(workshop.model)).decode()
    assert "\x1b[30;42madd(1,1)\x1b[0m\x1b[33m gives 2\x1b[0m" in out


def test_a_chat_to_imitate_shows_what_its_template_makes_of_it(workshop: Workshop):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (workshop.folder / "chats.jsonl").write_text(json.dumps({"prompt": chat}) + "\n")
    out = workshop.slimectl("inspect", "chats.jsonl", "--mask", "--model", str(workshop.model)).decode()
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yes<|im_end|>]]" in out


def test_rows_are_read_as_train_would(workshop: Workshop):
    (workshop.folder / "rows.csv").write_text("question,answer\nhi,yes\n")
    keys = ["-s", "rollout.input_key=question", "-s", "rollout.label_key=answer", "-s", f"model.path={workshop.model}"]
    assert workshop.slimectl("inspect", "rows.csv", "--mask", *keys).decode().endswith("\nhi[[yes<|end|>]]\n")


def test_what_would_steer_the_terminal_is_pictured_and_colours_end_with_the_line(workshop: Workshop, monkeypatch):
    answer = b"\x1b[2J\ra\nb"
    steering = {**SAMPLE, "tokens": list(b"1+1=" + answer), "response_length": len(answer), "loss_mask": None}
    (workshop.folder / "s.jsonl").write_text(json.dumps({**steering, "rollout_log_probs": None}) + "\n")
    command = ("inspect", "s.jsonl", "--mask", "--model", str(workshop.model))
    assert workshop.slimectl(*command).decode().endswith("1+1=[[␛[2J␍a\nb]]\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert workshop.slimectl(*command).decode().endswith("\x1b[30;42m␛[2J␍a\x1b[0m\n\x1b[30;42mb\x1b[0m\n")


def test_samples_of_an_unknown_model_ask_for_it(workshop: Workshop):
    (workshop.folder / "s.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    workshop.slimectl("inspect", "s.jsonl", "--mask", code=2)
    assert workshop.stderr == "slimectl: s.jsonl: no manifest names the model. Add --model DIR\n"


def test_the_manifest_of_a_rollout_names_the_model(workshop: Workshop):
    workshop.slimectl("rollout", "-c", "slimectl.toml", "--out", "s.jsonl", "-n", "1")
    out = workshop.slimectl("inspect", "s.jsonl", "--mask", "--rows", "2").decode()
    assert out.count("--- sample") == 2
    assert "12 trained" in out
