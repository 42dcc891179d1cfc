"""The axis of proof: files that Megatron-core wrote convert right, and it reads ours; names mapped by hand here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.data.convert_options import ConvertOptions

pytestmark = pytest.mark.slow

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'slimectl[megatron]'")

RANKS, VOCABULARY, LAYERS, EXPERTS = 2, 99, 2, 4
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**SHAPE, "model_type": "qwen3"},
    "experts": {
        **SHAPE, "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
}  # fmt: skip
FIELDS = {
    "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 8, "qk_layernorm": True,
}  # fmt: skip
MCORE = {
    "dense": FIELDS,
    "experts": {**FIELDS, "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 24},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME/hf: a random model; NAME/given: converted by us; NAME/saved: another, saved by two ranks of Megatron."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = tmp_path_factory.mktemp("megatron")
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
        model.save_pretrained(made / name / "hf")
        convert_checkpoint(made / name / "hf", made / name / "given", ConvertOptions(to="torch_dist", logits=0))
    # Megatron-core imports W&B where it is installed, and torch's compiler for decorators: together 3 s of CPU.
    code = "import sys; sys.modules['wandb'] = None; import mcore_ranks; mcore_ranks.start(*sys.argv[1:])"
    eager = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-E", "-c", code, str(made), str(RANKS), json.dumps(MCORE)]  # -E: without support/cpu
    ranks = subprocess.run(
        command, cwd=Path(__file__).parent, env=eager, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert ranks.returncode == 0, ranks.stderr
    return made


def by_hand(ranks: list[dict[str, Tensor]], layers: int) -> dict[str, Tensor]:
    """Hugging Face's tensors of two tensor-parallel ranks' parts; two key-value groups, so one a rank."""

    def rows(name: str) -> Tensor:
        return torch.cat([part[name] for part in ranks])

    def columns(name: str) -> Tensor:
        return torch.cat([part[name] for part in ranks], dim=1)

    def mlp(mcore: str, hf: str) -> dict[str, Tensor]:
        halves = [part[f"{mcore}.linear_fc1.weight"].chunk(2) for part in ranks]
        return {
            f"{hf}.gate_proj.weight": torch.cat([gate for gate, _ in halves]),
            f"{hf}.up_proj.weight": torch.cat([up for _, up in halves]),
            f"{hf}.down_proj.weight": columns(f"{mcore}.linear_fc2.weight"),
        }

    found = {
        "model.embed_tokens.weight": rows("embedding.word_embeddings.weight")[:VOCABULARY],
        "lm_head.weight": rows("output_layer.weight")[:VOCABULARY],
        "model.norm.weight": ranks[0]["decoder.final_layernorm.weight"],
    }
    for i in range(layers):
        mcore, hf = f"decoder.layers.{i}", f"model.layers.{i}"
        qkv = [part[f"{mcore}.self_attention.linear_qkv.weight"].split([16, 8, 8]) for part in ranks]
        for j, letter in enumerate("qkv"):
            found[f"{hf}.self_attn.{letter}_proj.weight"] = torch.cat([parts[j] for parts in qkv])
        for letter in "qk":
            norm = ranks[0][f"{mcore}.self_attention.{letter}_layernorm.weight"]
            found[f"{hf}.self_attn.{letter}_norm.weight"] = norm
        found[f"{hf}.self_attn.o_proj.weight"] = columns(f"{mcore}.self_attention.linear_proj.weight")
        found[f"{hf}.input_layernorm.weight"] = ranks[0][f"{mcore}.input_layernorm.weight"]
        found[f"{hf}.post_attention_layernorm.weight"] = ranks[0][f"{mcore}.pre_mlp_layernorm.weight"]
        if f"{mcore}.mlp.router.weight" not in ranks[0]:
            found |= mlp(f"{mcore}.mlp", f"{hf}.mlp")
            continue
        found[f"{hf}.mlp.gate.weight"] = ranks[0][f"{mcore}.mlp.router.weight"]
        for e in range(EXPERTS):
            found |= mlp(f"{mcore}.mlp.experts.local_experts.{e}", f"{hf}.mlp.experts.{e}")
    return found


def parts(folder: Path, what: str) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"{what}_{rank}.pt") for rank in range(RANKS)]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_what_megatron_saved_from_its_own_model_converts_to_hugging_face(name: str, folder: Path, tmp_path: Path):
    (folder / name / "saved" / "config.json").write_text(json.dumps(CONFIGS[name]))
    convert_checkpoint(folder / name / "saved", tmp_path / "hf")
    weights = HFWeights(tmp_path / "hf")
    found = {tensor: weights.get(tensor) for tensor in weights.forms()}
    same(found, by_hand(parts(folder / name, "saved"), LAYERS))


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_itself_reads_what_was_converted(name: str, folder: Path):
    weights = HFWeights(folder / name / "hf")
    expected = {tensor: weights.get(tensor) for tensor in weights.forms()}
    same(by_hand(parts(folder / name, "loaded"), LAYERS), expected)
