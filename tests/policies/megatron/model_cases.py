"""Tiny models of every family, as Hugging Face computes them and as Megatron-core does, with the same numbers.

T tokens of all sequences · V vocabulary · H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slimectl.architectures.config import read_config
from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.checkpoints.hf import InMemoryWeights
from slimectl.checkpoints.validate import UnfusedExperts
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.megatron.parallel import parallel_state

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GEMMA3 = {
    "tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip

EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
LATENT = {
    **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 1.7, "head_dim": 8,
}  # fmt: skip
LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3_rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama_linear_rope": {"model_type": "llama", "rope_parameters": LINEAR},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3"},
    "qwen2_moe": {
        "model_type": "qwen2_moe", **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False, "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "deepseek_v3_yarn": {
        "model_type": "deepseek_v3", **LATENT, "rope_parameters": LATENT_YARN, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **LATENT},
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa", **LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 5,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "gemma3": {"model_type": "gemma3_text", **GEMMA3},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "glm4": {"model_type": "glm4", "attention_bias": True},
    "glm4_moe": {
        "model_type": "glm4_moe", **LATENT, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
        "use_qk_norm": True,
    },
    "minimax_m2": {
        "model_type": "minimax_m2", **EXPERTS, "num_local_experts": 4,
        # transformers (5.12.1) reads only this; published configurations say rotary_dim, which it ignores.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_next": {
        "model_type": "qwen3_next", **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 40,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 40,
    },
}  # fmt: skip

LENGTHS = (7, 12, 12, 5, 1)
"""Unequal on purpose, with two neighbours alike and a single token."""


@dataclass(frozen=True)
class Reference:
    """What Hugging Face's model answers; gradients are those of `loss_of(logits)`, by their names on disk."""

    config: dict[str, Any]
    links: list[ParamMapping]
    weights: dict[str, Tensor]
    tokens: list[list[int]]
    logits_TV: Tensor
    gradients: dict[str, Tensor]

    @property
    def tokens_T(self) -> Tensor:
        """All sequences one after another."""
        return torch.tensor([token for row in self.tokens for token in row])

    def megatron(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole Megatron parameters of tensors by their names on disk."""
        weights = UnfusedExperts(InMemoryWeights(tensors.items()), family_of(self.config))
        return {link.megatron: link.to_megatron([weights.get(name) for name in link.hf]) for link in self.links}


def reference(name: str, folder: Path, *, lengths: Sequence[int] = LENGTHS) -> Reference:
    """A random model of the case, its answers to sequences of these lengths, each computed alone."""
    model = _hf_model(CASES[name])
    weights = _on_disk(model, folder / "weights")
    tokens = tokens_of(lengths)
    logits_TV = torch.cat([model(torch.tensor([row])).logits[0] for row in tokens])
    loss_of(logits_TV, loss_weights(len(logits_TV))).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    config = read_config(folder / "weights")
    return Reference(
        config, family_of(config).links(config), weights, tokens, logits_TV.detach(), _on_disk(model, folder / "grads")
    )


def tokens_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def loss_of(logits_TV: Tensor, weights_TV: Tensor) -> Tensor:
    """Some function of every logit."""
    return (torch.log_softmax(logits_TV, dim=-1) * weights_TV).sum()


def loss_weights(tokens: int) -> Tensor:
    return torch.randn(tokens, SHAPE["vocab_size"], generator=torch.Generator().manual_seed(2))


def _hf_model(case: dict[str, Any]) -> Any:
    """Every parameter random, norms and biases too: ones and zeros would hide mistakes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, **case})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for value in [*model.parameters(), *biases]:
            if value.ndim > 1:
                value.normal_(0, 0.15)
            else:
                value.add_(torch.randn_like(value) * 0.1)
    return model.eval()


def _on_disk(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def parameters_of(chunks: Iterable[PackedGPT]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that checkpoints keep, by the names that they have in the whole model."""
    experts = parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        kept = set(chunk.state_dict())
        for name, value in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name not in kept:
                continue
            name = re.sub(
                r"^decoder\.layers\.(\d+)",
                lambda m, c=chunk: f"decoder.layers.{c.decoder.layers[int(m[1])].layer_number - 1}",
                name,
            )
            held = (
                chunk.config.num_moe_experts and chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
            )
            yield (
                re.sub(r"local_experts\.(\d+)", lambda m, h=held: f"local_experts.{int(m[1]) + experts * h}", name),
                value,
            )


def share(link: ParamMapping, whole: Tensor, layout: ParallelLayout) -> Tensor:
    """The part of a whole Megatron parameter that this rank holds."""
    expert = ".local_experts." in link.megatron
    ranks = layout.expert_tensor if expert else layout.tensor
    rank = (
        parallel_state.get_expert_tensor_parallel_rank() if expert else parallel_state.get_tensor_model_parallel_rank()
    )
    if link.padded:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, -whole.shape[0] % ranks))
    return whole if link.split is None else link.split.shard(whole, rank, ranks)


def load(chunks: list[PackedGPT], reference: Reference, layout: ParallelLayout) -> None:
    """Fill every parameter of the chunks with its part of the reference's weights."""
    links = {link.megatron: link for link in reference.links}
    wholes = reference.megatron(reference.weights)
    with torch.no_grad():
        for name, value in parameters_of(chunks):
            name = _tied(name, links)
            value.copy_(share(links[name], wholes[name], layout))


def _tied(name: str, links: dict[str, ParamMapping]) -> str:
    """The last stage's copy of a tied embedding goes by the embedding's name."""
    return "embedding.word_embeddings.weight" if name == "output_layer.weight" and name not in links else name
