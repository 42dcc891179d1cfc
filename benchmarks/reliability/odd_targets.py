"""Targets of convert, train, models, score and rollout where something of the user's lies already."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

from campaign import Campaign
from odd_folders import Case, attacked
from workshop import Workshop

Build = Callable[[Case], object]
TARGETS: dict[str, tuple[list[str], Build]] = {}
CONVERT = ["convert", "{model}", "{case}", "--force", "--no-verify"]
TRAIN = ["train", "samples.jsonl", "--model", "{model}", "--save", "{case}", "--force", "-s", "algorithm.name=sft"]
SCORE = ["score", "samples.jsonl", "--rm-type", "exact", "--out", "{case}"]
SAMPLES = [
    {
        "index": i,
        "group_index": i,
        "prompt": "a",
        "response": "b",
        "label": "b",
        "tokens": [65, 66],
        "response_length": 1,
    }
    for i in range(4)
]


def target(command: list[str]) -> Callable[[Build], Build]:
    """Register a case: something of the user's at the target `{case}` of a command."""

    def register(build: Build) -> Build:
        def prepared(case: Case) -> None:
            text = "".join(json.dumps(sample) + "\n" for sample in SAMPLES)
            (case.workshop.folder / "samples.jsonl").write_text(text)
            build(case)

        TARGETS[build.__name__.replace("_", " ")] = (command, prepared)
        return build

    return register


@target(CONVERT)
def convert_onto_a_users_folder(case: Case) -> None:
    case.notes(case.workshop.folder / case.name)


@target(CONVERT)
def convert_onto_a_file(case: Case) -> None:
    case.put(case.workshop.folder / case.name)


@target(CONVERT)
def convert_onto_a_link_to_a_users_folder(case: Case) -> None:
    case.notes(case.elsewhere())
    case.link(case.workshop.folder / case.name, case.elsewhere())


@target(CONVERT)
def convert_beside_a_users_staging_folder(case: Case) -> None:
    case.notes(case.workshop.folder / f".tmp-{case.name}")


@target(CONVERT)
def convert_beside_a_users_staging_link(case: Case) -> None:
    case.notes(case.elsewhere())
    case.link(case.workshop.folder / f".tmp-{case.name}", case.elsewhere())


@target(CONVERT)
def convert_beside_a_users_old_folder(case: Case) -> None:
    case.notes(case.workshop.folder / f".old-{case.name}")


@target(CONVERT)
def convert_beside_a_users_lock(case: Case) -> None:
    case.put(case.workshop.folder / f".{case.name}.lock")


@target(CONVERT)
def convert_again_onto_ours_with_notes_among_it(case: Case) -> None:
    folder = case.workshop.folder / case.name
    case.workshop.slimectl("convert", str(case.workshop.model), str(folder), "--no-verify")
    case.notes(folder)
    case.put(folder / "model.safetensors.bak")


@target(CONVERT)
def convert_onto_a_model_of_the_users(case: Case) -> None:
    shutil.copytree(case.workshop.model, case.workshop.folder / case.name)
    case.users += [file for file in (case.workshop.folder / case.name).rglob("*") if file.is_file()]


@target(TRAIN)
def train_onto_a_users_folder(case: Case) -> None:
    case.notes(case.workshop.folder / case.name)


@target(TRAIN)
def train_beside_a_users_staging_folder(case: Case) -> None:
    case.notes(case.workshop.folder / f".tmp-{case.name}")


@target(["models", "create", "tiny", "{case}"])
def create_beside_a_users_staging_folder(case: Case) -> None:
    case.notes(case.workshop.folder / f".tmp-{case.name}")


@target(["models", "create", "tiny", "{case}"])
def create_onto_a_dangling_link(case: Case) -> None:
    case.link(case.workshop.folder / case.name, case.elsewhere())


@target(SCORE)
def score_beside_a_users_partial_file(case: Case) -> None:
    case.put(case.workshop.folder / f"{case.name}.partial")


@target([*SCORE, "--force"])
def score_with_force_beside_a_users_partial_file(case: Case) -> None:
    case.put(case.workshop.folder / f"{case.name}.partial", b'{"index": 0}\n')


@target(SCORE)
def score_beside_a_users_partial_manifest(case: Case) -> None:
    case.put(case.workshop.folder / f"{case.name}.partial.manifest.json", b"{}")


@target(SCORE)
def score_beside_a_users_manifest(case: Case) -> None:
    case.put(case.workshop.folder / f"{case.name}.manifest.json", b'{"name": "mine"}')


@target(["rollout", "--data", "prompts.jsonl", "--model", "{model}", "-n", "1", "--out", "{case}"])
def rollout_beside_a_users_staging_file(case: Case) -> None:
    case.put(case.workshop.folder / f".tmp-{case.name}")
    case.put(case.workshop.folder / f".tmp-{case.name}.manifest.json")


def attack_targets(workshop: Workshop, campaign: Campaign) -> None:
    """Folders and files of the user's where other commands write."""
    for title, (command, build) in TARGETS.items():
        case = Case(workshop, workshop.folder, title.replace(" ", "-"))
        build(case)
        faults = attacked(case, [word.format(case=case.name, model=workshop.model) for word in command])
        campaign.record("other commands' targets", title, survived=not faults, observation="; ".join(faults))
