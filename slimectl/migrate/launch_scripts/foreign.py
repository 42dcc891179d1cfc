"""Recognizes files and programs that cannot be converted to settings, and describes each in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

PAIRS = "The nearest is algorithm.name = dpo, which learns from pairs"
TEACHER = "The nearest is algorithm.name = opd, which asks a teacher about the policy's own responses"
SAMPLED = "The nearest is algorithm.name = grpo, which learns from rewards of sampled responses"
GRADED = "The nearest is algorithm.name = reward_model, which grades whole responses"
DEMONSTRATED = "The nearest is algorithm.name = sft, which learns from responses to prompts"
BEST = "Sample with `slimectl rollout`, keep the best, and train with algorithm.name = sft"
TOKENS = "The nearest is algorithm.name = gspo, which takes the ratio of the whole response"


def _named(**purposes: tuple[str, str]) -> dict[str, str]:
    """Return the sentence about each of the names: what it does, and the nearest algorithm here."""
    table: dict[str, str] = {}
    for key, (purpose, nearest) in purposes.items():
        table.update(dict.fromkeys(key.split("__"), f"{purpose}. {nearest} (docs/algorithms.md)"))
    return table


ALGORITHMS: Mapping[str, str] = _named(
    kto__bco=("learns from responses that are marked good or bad one by one", PAIRS),
    orpo__cpo__simpo__alphapo__robust_dpo=("learns from pairs without a reference model", PAIRS),
    ipo__odpo__mpo__ncapair__exo=("learns from pairs with a loss other than dpo's", PAIRS),
    tpo=("learns from three responses to each prompt", PAIRS),
    prm=("trains a reward model that grades single steps", GRADED),
    gkd__minillm__gold__kd__knowledge_distillation=("distils from a teacher", TEACHER),
    distillation__async_distillation__server_distillation__iw_opd=("distils from a teacher", TEACHER),
    sdft__sdpo__ssd=("distils from the policy itself", TEACHER),
    online_dpo__dpo_online__xpo__nash_md__spin__sppo=("learns from pairs that it samples and compares", SAMPLED),
    papo=("adds a loss on masked images to GRPO", SAMPLED),
    a2po=("learns from advantages of a fixed estimate of each prompt's value", SAMPLED),
    gfpo=("leaves responses out of each group by a metric of their own", SAMPLED),
    prime=("learns from rewards of single tokens that it trains as it runs", SAMPLED),
    flowrl__flow_rl=("matches the distribution of rewards instead of raising their mean", SAMPLED),
    raft__rft__iterative_sft=("fine-tunes on the best of its own responses", BEST),
    grpo_with_replay_buffer=("repeats old groups from a buffer", SAMPLED),
    gspo_token=("gives every token its own advantage under one ratio for the whole response", TOKENS),
    ddpo__alignprop=("trains a model that draws images", "slimectl trains language models"),
    es=("trains by evolution strategies, without gradients", SAMPLED),
    pt__pretrain__clm=("pretrains on plain text", DEMONSTRATED),
)
"""Algorithms without a counterpart, by the name in classes, subcommands and scripts."""
OWN = {
    "grpo": "grpo", "asyncgrpo": "grpo", "gmpo": "gmpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "ppo": "ppo",
    "reward": "reward_model", "rewardmodeling": "reward_model", "rm": "reward_model", "gspo": "gspo", "dapo": "dapo",
}  # fmt: skip
"""Algorithms that can be read, by the name in classes, subcommands and scripts, without underscores."""
_ABSENT = {name.replace("_", ""): purpose for name, purpose in ALGORITHMS.items()}

OTHER_STACK = "whose configuration is not read. Give the script of TRL, verl, OpenRLHF, ROLL or slime"
LLAMA_FACTORY = (
    "is of LLaMA-Factory, which is not read. Its stages sft, dpo and rm are algorithm.name = sft, dpo, reward_model"
)
SWIFT = "is of ms-swift, which is not read. Its types grpo, dpo and rm are algorithm.name = grpo, dpo, reward_model"
WHOLE = "Give the whole configuration, or the script that starts the training"
EVALUATION = "evaluates a model. Set eval.data, or run `slimectl rollout` and `slimectl score`"
SAMPLING = "samples responses and trains nothing. That is `slimectl rollout` or `slimectl serve`"
WEIGHTS = "merges or converts weights. That is `slimectl convert`"
PREPARATION = "prepares or downloads data and trains nothing. Set rollout.data to the file that it writes"
SERVER = "starts a server. Set engine.url to its address, or engine.backend for a server"
PROGRAMS: Sequence[tuple[str, str]] = (
    (r"\bserve_rm\b", "serves a reward model. Grade with score.rm_type = reward_model or remote_rm"),
    (r"\btrl vllm-serve\b|\bvllm serve\b|vllm\.entrypoints\b|\bvllm_serve\b", f"{SERVER} of vLLM"),
    (
        r"\bmegatron_server\b",
        "starts a teacher of slime. Start it with `slimectl serve MODEL`, and set algorithm.opd_teacher_url",
    ),
    (r"sglang\.launch_server\b|sglang_router\b", f"{SERVER} of SGLang"),
    (r"\b(lm_eval|lm-eval|lighteval|evalscope|opencompass|evalplus|inspect eval|swift eval)\b", EVALUATION),
    (r"\bstart_distill(_vl)?_pipeline\b", ALGORITHMS["distillation"]),
    (r"\bstart_agentic_rollout_pipeline\b", SAMPLING),
    (r"\bstart_reward_fl_pipeline\b", ALGORITHMS["ddpo"]),
    (r"\bmain_eval\b", "grades responses in a file. That is `slimectl score`"),
    (r"\bmain_generation(_server)?\b|\bbatch_inference\b|\bvllm_infer\b|\binteractive_chat\b|\btrl chat\b", SAMPLING),
    (r"\bllamafactory-cli (chat|api|webchat)\b|\bswift (infer|deploy|sample|app)\b", SAMPLING),
    (r"\blora_combiner\b|\bmodel_merger\b|\b(llamafactory-cli|swift) export\b|\bmerge_(lora|adapter)\w*", WEIGHTS),
    (r"\bllamafactory-cli\b|\bllama_?factory\b|\btrain_bash\.py\b", LLAMA_FACTORY),
    (r"\b(swift|megatron) (rlhf|sft|pt)\b|\bswift/cli/\w+\.py", SWIFT),
    (r"\baxolotl\b", f"is axolotl, {OTHER_STACK}"),
    (r"\btune run\b|\btorchtune\b", f"is torchtune, {OTHER_STACK}"),
    (r"\b(nemo_rl|nemo_aligner)\b", f"is NeMo, {OTHER_STACK}"),
    (r"\b(prepare|preprocess|download)\w*\.py\b|\bdata_preprocess\b|/examples/datasets/", PREPARATION),
    (r"\b(hf|huggingface-cli|modelscope) download\b|\bgit lfs\b|\bwget\b", PREPARATION),
    (r"\bconvert_\w*(hf|torch_dist|fp8|int4|nvfp4)\w*\.py\b|\bfp8_cast_bf16\b", WEIGHTS),
    (r"\btrain_es_ray\b", ALGORITHMS["es"]),
)
"""Patterns of commands that cannot be converted, and the sentence about each."""
DOCUMENTS: Sequence[tuple[str, str]] = (
    ("compute_environment|distributed_type|fsdp_config machine_rank", "is a configuration of Accelerate and starts "
     "processes. Give the script that trains: slimectl starts its own processes (cluster.actor_num_gpus_per_node)"),
    ("zero_optimization|train_micro_batch_size_per_gpu|zero_allow_untested_optimizer", "is a configuration of "
     "DeepSpeed and divides memory. Give the script that trains: here that is train.offload"),
    ("jobs", "is a workflow of GitHub Actions. Give the script that one of its steps starts"),
    ("stages image|stages variables|before_script|include stages",
     "is a pipeline of GitLab CI. Give the script that one of its jobs starts"),
    ("services", "is a file of Docker Compose. Give the command that one of its services starts"),
    ("apiVersion kind", "is a manifest of Kubernetes. Give the command that its container starts"),
    ("resources run|resources setup", "is a task of SkyPilot. Give the commands of its `run` as a script"),
    ("stage finetuning_type|stage template|finetuning_type template|stage cutoff_len", LLAMA_FACTORY),
    ("base_model sequence_len|base_model datasets|rl base_model|base_model adapter", f"is of axolotl, {OTHER_STACK}"),
    ("rlhf_type", SWIFT),
    ("loss_fn policy|grpo policy", f"is of NeMo-RL, {OTHER_STACK}"),
    ("output_dataset_name", PREPARATION),
    ("data.path data.response_key", "grades responses in a file. That is `slimectl score`"),
    ("recipe model|optimizer tokenizer dataset", f"is of torchtune, {OTHER_STACK}"),
    ("method parameters", "is a sweep of Weights & Biases. Give the program that it starts"),
    (
        "task doc_to_text|task doc_to_target|task dataset_path output_type|task dataset_path metric_list",
        "is a task of lm-evaluation-harness. Set eval.data to its rows",
    ),
    ("dataset_info|task_categories|configs license|splits features", "describes data. Set rollout.data to its rows"),
    ("tokenizer_class|added_tokens_decoder|added_tokens model", "belongs to a tokenizer. Set model.path to its folder"),
    ("architectures|model_type transformers_version|transformers_version eos_token_id",
     "belongs to a model. Set model.path to its folder"),
    ("_target_", f"is a part of a configuration of Hydra. {WHOLE}"),
    ("peft_type", "belongs to an adapter. Set train.lora_load to its folder"),
    ("log_history", "is the state of a training that ran. Give the script that started it"),
    ("channels dependencies|dependencies devDependencies", "lists packages and starts no training"),
    ("repos", "is a configuration of pre-commit and starts no training"),
    ("site_name nav", "describes pages of documentation and starts no training"),
)  # fmt: skip
"""Top-level keys of other kinds of documents: alternatives between bars, each a set of keys that must all exist."""
SUFFIXES = {
    ".md": "is text, such as a README or a data card. Give the script that it shows",
    ".rst": "is text. Give the script that it shows",
    ".ipynb": "is a notebook. Save its code as a Python file",
    ".toml": "is TOML. Settings of slimectl are read by `-c FILE`. Give a launch script, YAML or Python",
    ".jsonl": "has rows of data. Set rollout.data to it",
    ".parquet": "has rows of data. Set rollout.data to it",
    ".csv": "has rows of data. Set rollout.data to it",
    ".safetensors": "has weights. Set model.path to its folder",
}
"""Kinds of files that are not launch files, by suffix."""
NAMES = {
    "Dockerfile": "builds an image. Give the script that its containers start",
    "Makefile": "has rules of make. Give the command of one of them as a script",
    "requirements.txt": "lists packages and starts no training",
    "Jenkinsfile": "is a pipeline of Jenkins. Give the script that one of its stages starts",
}
"""Other kinds of files, by name."""
LIBRARIES = {
    **dict.fromkeys(("lm_eval", "lighteval"), EVALUATION),
    "llamafactory": LLAMA_FACTORY,
    "swift": SWIFT,
    **{name: f"is of {name}, {OTHER_STACK}" for name in ("torchtune", "axolotl", "lightning", "pytorch_lightning")},
}
"""Libraries that show what a Python file without a trainer does."""
GENERAL = (
    f"trains with the Trainer of transformers, which uses the model's own loss. {DEMONSTRATED} (docs/algorithms.md)"
)
READ = "Set algorithm.name to the nearest algorithm (docs/algorithms.md), and the rest by hand"
"""The remedy for a trainer whose name does not show the algorithm."""
CALLS = {
    **dict.fromkeys([f"transformers.{name}" for name in ("Trainer", "Seq2SeqTrainer", "TrainingArguments")], GENERAL),
    **dict.fromkeys(("vllm.LLM", "sglang.Engine"), SAMPLING),
    "fastapi.FastAPI": "is a server. Set score.rm_type = remote_rm if it grades responses",
    **dict.fromkeys(("datasets.load_dataset", ".to_json", ".to_parquet", ".save_to_disk", ".to_csv"), PREPARATION),
}
"""Calls that show what a Python file without a trainer does, by library and name, or by the name of a method."""


def absent_algorithm(name: str) -> str:
    """The sentence about an algorithm without a counterpart, by any spelling of its name, or an empty string."""
    return _ABSENT.get(_plain(name), "")


def own_algorithm(name: str) -> str:
    """The algorithm here for a class, a subcommand or a script, or an empty string."""
    return OWN.get(_plain(name), "")


def _plain(name: str) -> str:
    return re.sub(r"(config|trainer|arguments)$", "", re.sub(r"[^a-z0-9]", "", name.lower()))


def is_training_class(name: str) -> bool:
    """Whether the name of a class shows its algorithm, as in GRPOConfig and KTOTrainer."""
    is_class = name.endswith(("Config", "Trainer", "Arguments"))
    return is_class and bool(own_algorithm(name) or absent_algorithm(name))


def algorithm_of(name: str) -> str:
    """The algorithm in the name of a class, available here or not."""
    return own_algorithm(name) or _plain(name)


def algorithms_in(stem: str) -> tuple[set[str], set[str]]:
    """Algorithms in the name of a script, available here or not. `train_online_dpo` means online_dpo only."""
    parts = [word for word in re.split(r"[^a-z0-9]+", stem.lower()) if word]
    served: set[str] = set()
    absent: set[str] = set()
    position = 0
    while position < len(parts):
        for length in (4, 3, 2, 1):
            name = "".join(parts[position : position + length])
            if name in _ABSENT or name in OWN:
                (absent if name in _ABSENT else served).add(name)
                position += length - 1
                break
        position += 1
    return served, absent


def absent_program(name: str, flags: Collection[str] = ()) -> str:
    """The sentence about a program that cannot be read, by its path or module, or an empty string."""
    last = re.sub(r"\.py$", "", name.rpartition("/")[2]).rpartition(".")[2]
    if {"stage", "finetuning_type"} <= set(flags) or {"stage", "template"} <= set(flags):
        return command_purpose("llamafactory-cli train")
    if "rlhf_type" in flags:
        return command_purpose("swift rlhf")
    served, absent = algorithms_in(last)
    if absent and not served:
        return _ABSENT[min(absent)]
    return command_purpose(name)


def command_purpose(command: str) -> str:
    """The sentence about a command that cannot be converted, or an empty string."""
    return next((purpose for pattern, purpose in PROGRAMS if re.search(pattern, command)), "")


def document_purpose(keys: Collection[str]) -> str:
    """The sentence about a document of another kind, by its top-level keys, or an empty string."""
    present = set(keys)
    for alternatives, purpose in DOCUMENTS:
        if any(present.issuperset(names.split()) for names in alternatives.split("|")):
            return purpose
    return ""


def file_purpose(path: Path) -> str:
    """The sentence about a file of another kind, by its suffix, or an empty string."""
    if ".github" in path.parts and "workflows" in path.parts:
        return next(purpose for names, purpose in DOCUMENTS if names.startswith("jobs"))
    if path.name == ".gitlab-ci.yml":
        return next(purpose for names, purpose in DOCUMENTS if names.startswith("stages"))
    if path.name.startswith("_generated_ppo"):
        return f"lists the defaults of verl. {WHOLE}"
    return NAMES.get(path.name, SUFFIXES.get(path.suffix, ""))


def program_purpose(modules: Collection[str], calls: Collection[str]) -> str:
    """The sentence about a Python file without a trainer, by its imports and calls, or an empty string."""
    roots = {module.partition(".")[0] for module in modules}
    by_library = next((purpose for name, purpose in LIBRARIES.items() if name in roots), "")
    return by_library or next((purpose for name, purpose in CALLS.items() if name in calls), "")
