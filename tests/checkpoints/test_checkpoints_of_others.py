"""Odd checkpoints: every reader computes transformers' logits of the model that was meant, or refuses with one line.

The readers are the embedded engine (rollout, eval, serve), the FSDP policy (train, score) and convert.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
from slimectl.data.convert_options import ConvertOptions
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.errors import SlimectlError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.runtime.builders import model_folder
from slimectl.types import SamplingParams, TrainingSample

ModelDir = Callable[[str], Path]
PROMPT, COUNT = list(b"2+3="), 4
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING, LAST = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
SAME, UNTRIED = "", "untried"
"""In place of a refusal: the reader computes the model's logits, or is not asked."""


class Folder:
    """A copy of a model that a case changes: its tensors, its config.json, and how both are written."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
        self.tensors = load_file(source / "model.safetensors")
        self.names = list(self.tensors)

    def config(self, **changes: Any) -> None:
        config = json.loads((self.path / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (self.path / "config.json").write_text(json.dumps(config))

    def write(self, tensors: Mapping[str, Tensor] | None = None, name: str = "model.safetensors") -> None:
        held = self.tensors if tensors is None else tensors
        save_file({key: value.clone() for key, value in held.items()}, self.path / name, metadata={"format": "pt"})

    def shards(self, *, copies: Mapping[str, Tensor] = {}, listed: Mapping[str, str] = {}, omit: str = "") -> None:
        """Write two shards: the second has `copies` too, which the index leaves to the first one."""
        half = len(self.names) // 2
        parts = [{name: self.tensors[name] for name in part} for part in (self.names[:half], self.names[half:])]
        weight_map = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
        for name in copies:
            parts[0][name], weight_map[name] = self.tensors[name], SHARDS[0]
        parts[1] |= copies
        for shard, part in zip(SHARDS, parts, strict=True):
            self.write(part, shard)
        weight_map = {name: shard for name, shard in (weight_map | listed).items() if name != omit}
        (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def renamed(self, rename: Callable[[str], str]) -> None:
        self.write({rename(name): tensor for name, tensor in self.tensors.items()})

    def cast(self, dtype: torch.dtype, *, only: str = "") -> None:
        self.write({name: tensor.to(dtype) if only in name else tensor for name, tensor in self.tensors.items()})

    def pickled(self, **parts: Any) -> None:
        for name, part in (parts or {"pytorch_model": self.tensors}).items():
            torch.save(part, self.path / f"{name}.bin")


@dataclass(frozen=True)
class Case:
    """What is done to a model, and what the engine, the trainer and convert say to it: SAME, or part of a refusal."""

    change: Callable[[Folder], Any]
    engine: str = SAME
    trainer: str = SAME
    convert: str = SAME
    model: str = "llama"
    own: bool = False
    """Whether the folder itself is the reference, as transformers reads it, not the model before the change."""


def refused(change: Callable[[Folder], Any], reason: str, convert: str | None = None, **fields: Any) -> Case:
    """A case that is refused for one reason, by convert too unless it has an own result."""
    return Case(change, reason, reason, reason if convert is None else convert, **fields)


def noise(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.2


def quantized_parts(folder: Folder, *parts: str) -> None:
    """The tensors, with int32 numbers and such parts in place of one matrix."""
    module = LAST.removesuffix("weight")
    numbers = {f"{module}{part}": torch.zeros(8, 8, dtype=torch.int32) for part in parts}
    folder.write({name: tensor for name, tensor in folder.tensors.items() if name != LAST} | numbers)


def fp8(folder: Folder) -> None:
    folder.write(folder.tensors | {LAST: folder.tensors[LAST].to(torch.float8_e4m3fn),
                                   LAST.replace("weight", "weight_scale_inv"): torch.ones(1, 1)})  # fmt: skip


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def adapter(folder: Folder) -> None:
    (folder.path / "config.json").unlink()
    (folder.path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    folder.write({"base_model.model.a.lora_A.weight": torch.ones(2)}, "adapter_model.safetensors")


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of a checkpoint ran",))


def fused(folder: Folder, sources: tuple[str, ...], target: str, join: Callable[[list[Tensor]], Tensor]) -> None:
    """Write the tensors of some names of a layer as one, in every layer that has them."""
    tensors = dict(folder.tensors)
    for layer in ("model.layers.0.", "model.layers.1."):
        if layer + sources[0] in tensors:
            tensors[layer + target] = join([tensors.pop(layer + source) for source in sources])
    folder.tensors = tensors


def fused_experts(folder: Folder) -> None:
    """Write the experts of a layer in two tensors, as transformers 5 holds them: gate over up, and down."""
    gates = tuple(f"mlp.experts.{i}.{part}_proj.weight" for i in range(5) for part in ("gate", "up"))
    fused(folder, gates, "mlp.experts.gate_up_proj", lambda parts: torch.cat(parts).view(5, 64, 64))
    downs = tuple(f"mlp.experts.{i}.down_proj.weight" for i in range(5))
    fused(folder, downs, "mlp.experts.down_proj", torch.stack)
    folder.write()


def cached(folder: Folder) -> None:
    """Lay the folder out as the hub's cache does: links to blobs, below a folder with a blank and an accent."""
    folder.write()
    cache = folder.path.parent / "a céche @1" / "models--org--name"
    snapshot, blobs = cache / "snapshots" / ("a" * 40), cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.path.iterdir())):
        file.rename(blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    folder.path = snapshot


OTHER_MODEL = "config.json describes another model"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, Case] = {
    # Heads.
    "head_of_its_own": refused(lambda f: f.write(f.tensors | {HEAD: noise(f.tensors[EMBEDDING])}),
                               "lm_head.weight differs from model.embed_tokens.weight, but they are tied"),
    "head_repeated": Case(lambda f: f.write(f.tensors | {HEAD: f.tensors[EMBEDDING]})),
    "head_repeated_in_bfloat16": refused(
        lambda f: f.write(f.tensors | {HEAD: f.tensors[EMBEDDING].bfloat16()}), "lm_head.weight differs from"),
    "head_missing": refused(lambda f: f.write({n: t for n, t in f.tensors.items() if n != HEAD}),
                            "no tensor for lm_head.weight", model="llama_untied"),
    "head_untied_by_default": refused(lambda f: (f.config(tie_word_embeddings=None), f.write()),
                                      "no tensor for lm_head.weight"),
    "head_without_embedding": refused(
        lambda f: f.write({HEAD if n == EMBEDDING else n: t for n, t in f.tensors.items()}),
        "no tensor for model.embed_tokens.weight"),
    # Shards and indexes.
    "shards": Case(lambda f: f.shards()),
    "old_copy": refused(lambda f: f.shards(copies={EMBEDDING: noise(f.tensors[EMBEDDING])}),
                        "embed_tokens.weight comes twice, .* slimectl convert", convert=SAME),
    "equal_copy": Case(lambda f: f.shards(copies={EMBEDDING: f.tensors[EMBEDDING]})),
    "single_file_beside_index": refused(lambda f: (f.shards(), f.write()), "two models, model.safetensors and"),
    "missing_shard": refused(lambda f: (f.shards(), (f.path / SHARDS[1]).unlink()),
                             "lists model-00002-of-00002.safetensors, which does not exist"),
    "shard_outside": refused(lambda f: f.shards(listed={LAST: "../model.safetensors"}), "which is outside"),
    "unlisted_tensor": Case(lambda f: f.shards(omit=LAST)),
    "listed_tensor_of_no_shard": Case(lambda f: f.shards(listed={"model.rotary_emb.inv_freq": SHARDS[0]})),
    "listed_in_the_other_shard": Case(lambda f: f.shards(listed={f.names[-1]: SHARDS[0]})),
    "index_of_one_file": Case(lambda f: (f.write(), (f.path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(f.names, "model.safetensors")})))),
    "index_of_numbers": refused(lambda f: (f.write(), (f.path / INDEX).write_text('{"weight_map": {"a": 7}}')),
                                "lists 7, which is outside"),
    "shards_without_index": Case(lambda f: (f.shards(), (f.path / INDEX).unlink())),
    "old_copy_without_index": refused(
        lambda f: (f.write(), f.write({LAST: noise(f.tensors[LAST])}, "model-2.safetensors")), "comes twice, in model"),
    "optimizer_beside": Case(lambda f: (f.write(), f.write({"exp_avg": torch.ones(2)}, "optimizer.safetensors"))),
    "junk_tensor": Case(lambda f: f.write(f.tensors | {"model.junk": torch.ones(2)}), "model.junk is not part of",
                        "the model has no model.junk", "model.junk: llama models have no such tensor"),
    "old_rotary_table": Case(lambda f: f.write(f.tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq":
                                                            torch.ones(8)})),
    # Dtypes.
    "bfloat16": Case(lambda f: f.cast(torch.bfloat16), own=True),
    "float16": Case(lambda f: f.cast(torch.float16), own=True),
    "float64": Case(lambda f: f.cast(torch.float64)),
    "norms_in_float32": Case(lambda f: f.cast(torch.bfloat16, only="proj"), own=True),
    # Names.
    "compiled": refused(lambda f: f.renamed(lambda n: f"_orig_mod.{n}"),
                        r"torch.compile's prefix\) should be model\..* slimectl convert", convert=SAME),
    "compiled_inside": refused(lambda f: f.renamed(lambda n: n.replace("model.", "model._orig_mod.")),
                               r"torch.compile's prefix\) should be", convert=SAME),
    "data_parallel": refused(lambda f: f.renamed(lambda n: f"module.{n}"),
                             r"DistributedDataParallel's prefix\) should be", convert=SAME),
    "wrapped_twice": refused(lambda f: f.renamed(lambda n: f"module._orig_mod.{n}"), "prefix", convert=SAME),
    "merged_by_peft": refused(lambda f: f.renamed(lambda n: f"base_model.model.{n}"), "peft's prefix", convert=SAME),
    "one_model_too_many": refused(lambda f: f.renamed(lambda n: f"model.{n}"),
                                  r"model\.\S+ should be", convert=SAME, model="llama_untied"),
    "bare_decoder": refused(lambda f: f.renamed(lambda n: n.removeprefix("model.")),
                            r"should be model\..* slimectl convert", convert=SAME),
    "adapter_inside": refused(lambda f: f.write(f.tensors | {"model.layers.0.self_attn.q_proj.lora_A.weight":
                                                             torch.ones(2, 64)}), "an unmerged adapter"),
    "adapter_folder": refused(adapter, "this is a LoRA adapter of org/base. Train it with --model org/base"),
    # Pickles.
    "pickle": refused(lambda f: f.pickled(), "weights are pickled. Convert it with `slimectl convert", convert=SAME),
    "pickled_shards": refused(lambda f: f.pickled(**{f"pytorch_model-0000{i}-of-00002": {
        n: f.tensors[n] for n in f.names[i - 1 :: 2]} for i in (1, 2)}), "pickled", convert=SAME),
    "pickled_state_dict": refused(lambda f: f.pickled(pytorch_model={"state_dict": f.tensors}), "pickled",
                                  convert=SAME),
    "pickled_code": refused(lambda f: f.pickled(pytorch_model={"a": Command()}), "pickled",
                            convert="cannot be read as pickled weights"),
    "pickled_view": refused(lambda f: f.pickled(pytorch_model={"a": torch.ones(1).expand(10**9)}), "pickled",
                            convert="holds more than named tensors"),
    # Quantization.
    "fp8": refused(lambda f: (fp8(f), f.config(quantization_config=FP8)),
                   r"quantized \(fp8\), which only SGLang and vLLM can sample from. .* --dtype", convert=UNTRIED),
    "fp8_without_config": refused(fp8, "the weights are quantized, but config.json has no quantization_config"),
    "gptq": refused(lambda f: (quantized_parts(f, "qweight", "qzeros"),
                               f.config(quantization_config={"quant_method": "gptq", "bits": 4})),
                    r"quantized \(gptq\), which only .* Use the model", convert="quantized as gptq"),
    "awq_without_config": refused(lambda f: quantized_parts(f, "qweight"), "config.json has no quantization_config"),
    "bitsandbytes": refused(lambda f: (f.write(f.tensors | {LAST: torch.zeros(8, 1, dtype=torch.uint8)}),
                                       f.config(quantization_config={"quant_method": "bitsandbytes"})),
                            r"quantized \(bitsandbytes\)", convert="quantized as bitsandbytes"),
    "stale_quantization": Case(lambda f: (f.write(), f.config(quantization_config=FP8))),
    "stale_gptq": Case(lambda f: (f.write(), f.config(quantization_config={"quant_method": "gptq", "bits": 4}))),
    # Rotary frequencies, in the keys of old and new configurations.
    "linear_old_keys": Case(lambda f: (f.write(), f.config(
        rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0})), own=True),
    "yarn_old_keys": Case(lambda f: (f.write(), f.config(rope_parameters=None, rope_theta=5000.0, rope_scaling=YARN)),
                          own=True),
    "theta_alone": Case(lambda f: (f.write(), f.config(rope_parameters=None, rope_theta=100.0)), own=True),
    "llama3": Case(lambda f: f.write(), own=True, model="llama3_rope"),
    "qwen2": Case(lambda f: f.shards(), model="qwen2"),
    "experts": Case(lambda f: f.shards(), model="qwen3_moe"),
    # Layouts of other programs.
    "experts_in_two_tensors": Case(fused_experts, model="qwen3_moe", own=True),
    "query_key_value_in_one": refused(
        lambda f: (fused(f, ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                         "self_attn.qkv_proj.weight", torch.cat), f.write()), rf"qkv_proj\S+ .*{OTHER_MODEL}"),
    "head_of_a_classifier": refused(
        lambda f: f.write({"score.weight" if n == HEAD else n: t for n, t in f.tensors.items()}),
        rf"score.weight.* {OTHER_MODEL}", model="llama_untied"),
    "biases_without_key": refused(
        lambda f: f.write(f.tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), OTHER_MODEL),
    "mistral_file_beside": Case(lambda f: (f.shards(), f.write({"norm.weight": torch.ones(2)},
                                                               "consolidated.safetensors"))),
    "llama_folder_inside": Case(lambda f: (f.write(), (f.path / "original").mkdir(), f.write(
        {"norm.weight": torch.ones(2)}, "original/consolidated.00.safetensors"))),
    "cache_of_the_hub": Case(cached),
    "pickle_beside": Case(lambda f: (f.write(), f.pickled(pytorch_model={LAST: torch.zeros(2)}))),
    "variant_beside": refused(lambda f: (f.write(), f.write({LAST: noise(f.tensors[LAST])}, "model.fp16.safetensors")),
                              "comes twice, in model"),
    "shard_of_no_tensors": Case(lambda f: (f.shards(), (f.path / INDEX).unlink(), f.write({}, "model-3.safetensors"))),
    "shard_of_no_bytes": refused(lambda f: (f.shards(), (f.path / SHARDS[1]).write_bytes(b"")), "header is damaged"),
    "tensor_of_no_rows": refused(lambda f: f.write(f.tensors | {LAST: torch.empty(0, 64)}), "has shape"),
    "index_of_nothing": refused(lambda f: (f.shards(), (f.path / INDEX).write_text('{"weight_map": {}}')),
                                "no tensor for"),
    # Keys of config.json.
    "two_dtypes": Case(lambda f: (f.write(), f.config(dtype="float32", torch_dtype="float16"))),
    "heads_without_groups": Case(lambda f: (f.write(), f.config(num_key_value_heads=None, head_dim=None)),
                                 model="llama_untied"),
    "two_ropes": Case(lambda f: (f.write(), f.config(rope_scaling={"rope_type": "linear", "factor": 4.0})), own=True),
    "theta_beside_rope": Case(lambda f: (f.write(), f.config(rope_theta=7.0)), own=True),
    "window_off": Case(lambda f: (f.write(), f.config(sliding_window=2, use_sliding_window=False)), own=True,
                       model="qwen2"),
    "more_layers": refused(lambda f: (f.write(), f.config(num_hidden_layers=3)), "no tensor for model.layers.2"),
    "fewer_layers": refused(lambda f: (f.write(), f.config(num_hidden_layers=1)),
                            rf"model.layers.1\S+ .*{OTHER_MODEL}"),
    "number_as_text": refused(lambda f: (f.write(), f.config(hidden_size="64")), "hidden_size '64', not a number"),
    "number_too_large": refused(lambda f: (f.write(), f.config(vocab_size=10**30)), "vocab_size 10+, not a number"),
}  # fmt: skip


@lru_cache(maxsize=4)
def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def log_probs(folder: Path, tokens: list[int]) -> Tensor:
    """Log-probabilities of the last COUNT tokens from transformers."""
    hf = reference_model(folder)
    with torch.no_grad():
        logits_TV = hf(torch.tensor([tokens])).logits[0, -COUNT - 1 : -1]
    return logits_TV.log_softmax(-1)[torch.arange(COUNT), tokens[-COUNT:]]


@pytest.fixture(scope="module")
def tokenizer(model_dir: ModelDir) -> Any:
    return AutoTokenizer.from_pretrained(model_dir("llama"))


def from_engine(folder: Path, tokenizer: Any) -> tuple[list[int], list[float]]:
    path = model_folder(str(folder))
    engine = EmbeddedEngine(AutoConfig.from_pretrained(path), tokenizer, EngineOptions(compile_kernels=False))
    engine.load_weights(ModelCheckpoint().read(path), version="0")
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    completion = asyncio.run(engine.generate(PROMPT, params=params))
    return PROMPT + completion.tokens, completion.log_probs


def from_trainer(folder: Path) -> tuple[list[int], list[float]]:
    path = model_folder(str(folder))
    policy = FsdpPolicy(path, ModelCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.0), trains=False))
    tokens = [*PROMPT, 7, 8, 9, 10]
    row = TrainingSample(tokens=tokens, response_length=COUNT, advantages=[0.0] * COUNT, loss_weights=[1.0] * COUNT)
    return tokens, policy.log_probs([row])[0]


def from_conversion(folder: Path) -> tuple[list[int], list[float]]:
    target = folder.with_name("converted")
    convert_checkpoint(folder, target, ConvertOptions(logits=0))
    tokens = [*PROMPT, 11, 12, 13, 14]
    return tokens, log_probs(target, tokens).tolist()


@pytest.mark.parametrize("name", CASES)
def test_readers_compute_the_model_or_refuse_it_by_name(
    name: str, tmp_path: Path, model_dir: ModelDir, tokenizer: Any
) -> None:
    case = CASES[name]
    folder = Folder(model_dir(case.model), tmp_path / "model")
    case.change(folder)
    readers = {
        "engine": (case.engine, lambda: from_engine(folder.path, tokenizer)),
        "trainer": (case.trainer, lambda: from_trainer(folder.path)),
        "convert": (case.convert, lambda: from_conversion(folder.path)),
    }
    for reader, (expected, read) in readers.items():
        if expected == SAME:
            tokens, actual = read()
            reference = log_probs(folder.path if case.own else model_dir(case.model), tokens)
            torch.testing.assert_close(torch.tensor(actual), reference, atol=1e-4, rtol=0, msg=reader)
        elif expected != UNTRIED:
            with pytest.raises(SlimectlError) as error:
                read()
            assert "\n" not in str(error.value)
            assert re.search(expected, str(error.value)), f"{reader}: {error.value}"
