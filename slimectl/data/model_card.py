"""Model cards: the README.md of a trained model, with metadata that the Hugging Face hub accepts.

A card holds nothing that differs between a resumed run and an uninterrupted one: no time, no machine, no name of the
run. It is published with the model, so it has no absolute path, no address of a server and no secret.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimectl import __version__
from slimectl.data.hugging_face import hub_name, snapshot
from slimectl.data.metrics_catalogue import evaluation_results
from slimectl.data.ownership import CARD
from slimectl.errors import CheckpointError
from slimectl.settings import Settings
from slimectl.settings.keys import changed, flat, toml_value
from slimectl.system.model_files import follow_links, open_file, policy_folder
from slimectl.system.redaction import MASK, is_reference, redact, redact_text

MAX_CARD_BYTES = 1024**2
CONVERTED = re.compile(r"iter_\d+|release")
"""Folder of weights in a torch_dist checkpoint, whose companions lie above it."""
FRONT_MATTER = re.compile(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
CACHED = re.compile(r"models--(?P<owner>[\w.-]+)--(?P<name>[\w.-]+)")
"""Folder of a model in the Hugging Face cache."""
PLAIN = re.compile(r"[\w.+/-]{1,100}")
"""A licence, a language or a repository in the metadata of another card."""
PUBLISHED = ("algorithm", "rollout", "score", "train", "sft_warmup", "eval", "run", "custom")
"""Sections of settings that a card shows. The others describe machines and services."""
UNPUBLISHED = re.compile(r"run\.(name|dir|save_.*|keep_.*|async_save|max_restarts|on_.*|grace_s)|.*\.(num_)?workers")
FOLDERS = re.compile(r"(?<![\w.:/])(?:~|file:)?/(?:[^\s/'\"\]]+/)+")
ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"]+", re.IGNORECASE)
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
STEP = re.compile(r"latest|best|policy|model|warmup|step_\d+|\.*")
"""Last part of a path that does not name a model."""
MAX_ROWS = 11
"""Points of the curve in a card."""


@dataclass(frozen=True)
class TrainingProgress:
    """What a run has done when its model is saved."""

    rounds: int
    steps: int
    scores: Sequence[tuple[int, float]] = ()
    """(round, mean reward or loss)."""
    evaluations: Sequence[tuple[int, Mapping[str, float]]] = ()
    """(round, metrics)."""


@dataclass(frozen=True)
class BaseModel:
    """The model that training started from."""

    name: str | None
    """Repository on the hub, if it is known."""
    metadata: Mapping[str, Any]
    """Metadata of its own card."""

    def value(self, key: str) -> Any:
        """Return a value of its card that is a name or a list of names, or None."""
        value = self.metadata.get(key)
        names = value if isinstance(value, list) else [value]
        fits = bool(names) and all(isinstance(name, str) and PLAIN.fullmatch(name) for name in names)
        return value if fits else None


def base_model(path: str | None) -> BaseModel:
    """Return what is known of the model at model.path: from its place on the hub or in the cache, and its card."""
    if path is None:
        return BaseModel(None, {})
    folder, hub = follow_links(Path(path)), hub_name(path)
    name = hub[0] if hub else None
    if hub is not None and not folder.exists():
        folder = snapshot(hub[0], "model") or folder
    folder = policy_folder(folder)
    metadata = read_metadata(folder / CARD)
    for part in folder.resolve().parts if name is None else ():
        if match := CACHED.fullmatch(part):
            name = f"{match['owner']}/{match['name']}"
    if name is None and "slimectl" in (metadata.get("tags") or []):  # trained further: its base is the last known one
        name = BaseModel(None, metadata).value("base_model")
    return BaseModel(name if isinstance(name, str) else None, metadata)


def read_metadata(card: Path) -> dict[str, Any]:
    """Return the metadata of a model's card, or nothing if it has none that can be read."""
    import yaml

    try:
        with open_file(card) as file:
            text = file.read(MAX_CARD_BYTES).decode(errors="replace")
        match = FRONT_MATTER.match(text)
        metadata = yaml.safe_load(match[1]) if match else None
    except (OSError, CheckpointError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def model_card(settings: Settings, progress: TrainingProgress, *, adapter: bool = False) -> str:
    """Return the card of a model that was trained with these settings, or of its LoRA `adapter`."""
    base = base_model(settings.model.path)
    title = _title(settings, base, adapter)
    metadata = _metadata(settings, base, progress, title, adapter)
    missing = [key for key in ("license", "base_model") if key not in metadata and _needs(key, settings)]
    reason = "training began with random weights" if settings.model.path is None else "the base model's folder lacks it"
    parts = [
        f"---\n{_yaml(metadata)}\n---",
        f"# {title}",
        _todo(missing, reason, *_adapter_todo(adapter)),
        _origin(settings, base, progress, adapter),
        "## Use",
        _use(settings, base, adapter),
        "## Training",
        _training(settings, progress),
        *_curve(settings, progress),
        *_evaluation(progress),
        "## Limits",
        _limits(settings),
        "## License",
        _license(metadata),
    ]
    return redact_text("\n\n".join(filter(None, parts)) + "\n")


def write_cards(folder: Path, settings: Settings, progress: TrainingProgress) -> None:
    """Write the card of a model that was saved in `folder`, and of its adapter if there is one."""
    (folder / CARD).write_text(model_card(settings, progress), encoding="utf-8")
    if (folder / "adapter").is_dir():
        (folder / "adapter" / CARD).write_text(model_card(settings, progress, adapter=True), encoding="utf-8")


def convert_card(source: Path, target: Path, *, quantize: str | None = None) -> None:
    """Copy the card of a model to its converted form in `target`. Without one, write a short card to complete."""
    for folder in (source, source.parent) if source.is_dir() and CONVERTED.fullmatch(source.name) else (source,):
        with suppress(OSError, CheckpointError), open_file(folder / CARD) as file:
            (target / CARD).write_bytes(file.read(MAX_CARD_BYTES))
            return
    base = base_model(str(source)) if source.is_dir() else BaseModel(None, {})
    metadata = {"base_model": base.name} if base.name else {}
    metadata |= {"base_model_relation": "quantized"} if base.name and quantize else {}
    metadata |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    form = f" and quantized to {quantize}" if quantize else ""
    missing = [key for key in ("license", "base_model") if key not in metadata]
    parts = [
        f"---\n{_yaml(metadata)}\n---",
        f"# {(base.name or source.stem).rpartition('/')[2]}",
        _todo(missing, "the source has no card"),
        f"Converted{form} with slimectl {__version__}. The source had no model card.",
    ]
    (target / CARD).write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _title(settings: Settings, base: BaseModel, adapter: bool) -> str:
    start = (base.name or settings.model.path or settings.model.card or "Model").rstrip("/").rpartition("/")[2]
    start = "Model" if STEP.fullmatch(start) else start
    return f"{'LoRA adapter for ' if adapter else ''}{start} trained with {settings.algorithm.name}"


def _needs(key: str, settings: Settings) -> bool:
    return key != "base_model" or settings.model.path is not None


def _metadata(
    settings: Settings, base: BaseModel, progress: TrainingProgress, title: str, adapter: bool
) -> dict[str, Any]:
    """Return the metadata of a card in the hub's form."""
    from huggingface_hub import EvalResult, ModelCardData

    classifies = settings.algorithm.name == "reward_model"
    task = "text-classification" if classifies else base.value("pipeline_tag") or "text-generation"
    number, metrics = progress.evaluations[-1] if progress.evaluations else (0, {})
    results = [
        EvalResult(
            task_type=task, dataset_type=_dataset_id(settings, dataset), dataset_name=dataset,
            metric_type=measure.replace(" ", "_"), metric_name=f"{measure} after round {number}",
            metric_value=round(value, 6),
            metric_args=None if error is None else {"standard_error": round(error, 6)},
        )
        for (dataset, measure), (value, error) in evaluation_results(metrics).items()
    ]  # fmt: skip
    data = ModelCardData(
        base_model=base.name,
        datasets=[hub[0] for source in settings.rollout.data if (hub := hub_name(source))] or None,
        language=base.value("language"),
        library_name="peft" if adapter else "transformers",
        license=base.value("license"),
        license_name=base.value("license_name"),
        license_link=base.value("license_link"),
        pipeline_tag=task,
        tags=["slimectl", settings.algorithm.name, *(["lora"] if adapter else [])],
        model_name=title,
        eval_results=results or None,
        base_model_relation="adapter" if adapter and base.name else None,
    )
    return dict(sorted(data.to_dict().items()))


def _dataset_id(settings: Settings, dataset: str) -> str:
    source = settings.eval.sources.get(dataset)
    hub = hub_name(source) if isinstance(source, str) else None
    return hub[0] if hub else dataset


def _yaml(metadata: Mapping[str, Any]) -> str:
    from huggingface_hub.repocard_data import yaml_dump

    return str(yaml_dump(dict(metadata), sort_keys=False)).strip()


def _todo(missing: Sequence[str], reason: str, *more: str) -> str:
    """Return what the user must fill in before publishing."""
    lines = [f"- add `{key}:` to the block at the top. It is not known, because {reason}" for key in missing]
    lines = ["**Before you publish this model:**", "", *lines, *more] if lines or more else []
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _adapter_todo(adapter: bool) -> list[str]:
    """Return what to change in the configuration of an adapter, which names its base model by folder."""
    text = "- set `base_model_name_or_path` in adapter_config.json, which names a folder of this machine"
    return [text] if adapter else []


def _origin(settings: Settings, base: BaseModel, progress: TrainingProgress, adapter: bool) -> str:
    link = f"[{base.name}](https://huggingface.co/{base.name})" if base.name else ""
    start = link or (
        "a local model" if settings.model.path else f"random weights (`{_published(settings.model.card)}`)"
    )
    rank = f" as a LoRA adapter of rank {settings.train.lora_rank}" if adapter else ""
    return (
        f"Trained from {start}{rank} with slimectl {__version__} for"
        f" {progress.rounds} rounds ({progress.steps} optimizer steps). {_method(settings)}"
    )


def _method(settings: Settings) -> str:
    """Return the first paragraph of the algorithm's description, with links to its papers."""
    text = (inspect.getdoc(type(settings.algorithm)) or "").partition("\n\n")[0].replace("\n", " ")
    return PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _use(settings: Settings, base: BaseModel, adapter: bool) -> str:
    model = base.name or "BASE_MODEL"
    if settings.algorithm.name == "reward_model":
        return '```toml\n[score]\nrm_type = "reward_model"\nrm_options = { path = "THIS_MODEL" }\n```'
    if adapter:
        load = f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{model}"), "THIS_MODEL")'
        return f"```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n{load}\n```"
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("THIS_MODEL")\n'
        'tokenizer = AutoTokenizer.from_pretrained("THIS_MODEL")\n```'
    )


def _training(settings: Settings, progress: TrainingProgress) -> str:
    """Return the changed settings of the training as a file for `slimectl run -c`."""
    values, sections = dict(flat(settings)), dict[str, list[str]]()
    for name in changed(settings):
        section, _, key = name.partition(".")
        value = redact(values[name], name=key)
        if section in PUBLISHED and not UNPUBLISHED.fullmatch(name) and value is not None and not is_reference(value):
            text = _published(toml_value(value))
            if MASK not in text:
                sections.setdefault(section, []).append(f"{key} = {text}")
    blocks = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    listing = "\n\n".join(blocks)
    ticks = "`" * max(3, max((len(run) + 1 for run in re.findall("`+", listing)), default=0))
    return (
        "The settings that differ from slimectl's defaults. Folders and addresses are left out."
        f"\n\n{ticks}toml\n{listing}\n{ticks}"
    )


def _published(text: Any) -> str:
    """Return a text without the folders of absolute paths and without addresses.

    >>> _published("python /home/me/agent.py --url http://10.0.0.1:8000/v1")
    'python agent.py --url ADDRESS'
    """
    return FOLDERS.sub("", ADDRESS.sub("ADDRESS", str(text)))


def _curve(settings: Settings, progress: TrainingProgress) -> list[str]:
    """Return a table of at most MAX_ROWS points of the reward or loss, evenly spaced, the last one included."""
    scores = list(progress.scores)
    if len(scores) < 2:
        return []
    last, count = len(scores) - 1, min(MAX_ROWS, len(scores))
    rows = [scores[round(at * last / (count - 1))] for at in range(count)]
    name = "mean reward" if settings.algorithm.trains_on == "rollouts" else "loss"
    return [_table(["round", name], [[str(number), f"{value:.4g}"] for number, value in rows])]


def _evaluation(progress: TrainingProgress) -> list[str]:
    if not progress.evaluations:
        return []
    (first, before), (last, after) = progress.evaluations[0], progress.evaluations[-1]
    start = evaluation_results(before) if last != first else {}
    rows = [
        [f"`{dataset}`", measure, _measured(start.get((dataset, measure))), _measured(result)]
        for (dataset, measure), result in evaluation_results(after).items()
    ]
    note = "± is the standard error of the mean over prompts." if "±" in str(rows) else ""
    head = ["evaluation", "measure", f"round {first}" if start else "before", f"round {last}"]
    return ["## Evaluation", _table(head, rows), note] if rows else []


def _measured(result: tuple[float, float | None] | None) -> str:
    if result is None:
        return ""
    value, error = result
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def _limits(settings: Settings) -> str:
    source = {
        "rollouts": "It was rewarded for one task only",
        "demonstrations": "It was trained on demonstrations of one kind only",
        "preferences": "It was trained on preferences of one kind only",
    }[settings.algorithm.trains_on]
    return (
        f"{source}. On other tasks it may be worse than the model that it was trained from. It has the biases of its"
        " base model and of its training data. Its safety was not evaluated."
    )


def _license(metadata: Mapping[str, Any]) -> str:
    if "license" in metadata:
        return f"`{metadata['license']}`, as the base model. Check that the training data allows it."
    return "Not known. The license of the base model and of the training data apply."
