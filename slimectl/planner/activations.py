"""Activations that autograd saves for one layer, derived from the modules that this package runs.

H hidden · F MLP columns · q, k columns of query and of key (value has as many) · c bytes of an element · t tensor
parallel size. Every figure is bytes per token. tests/planner/test_activations.py measures the same on real models.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.architectures.config import Architecture
from slimectl.planner.workload import Run, counted

DELTA_CHUNK = 64
"""Chunk length of policies/megatron/delta_net.py. A test in tests/planner/test_figures.py checks this."""


@dataclass(frozen=True)
class SavedActivation:
    """Saved tensors of a layer. `size` is bytes per token."""

    description: str
    size: float

    @property
    def text(self) -> str:
        return f"{self.description} {counted(round(self.size))}"


def size(saved: list[SavedActivation]) -> float:
    return sum(part.size for part in saved)


def columns(architecture: Architecture) -> tuple[int, int]:
    """Columns of all query heads, and of all key heads."""
    t = architecture.transformer
    return t["num_attention_heads"] * t["kv_channels"], _groups(architecture) * t["kv_channels"]


def _groups(architecture: Architecture) -> int:
    t = architecture.transformer
    return int(t.get("num_query_groups") or t["num_attention_heads"])


def fsdp_layer(architecture: Architecture, run: Run, *, experts: bool = False) -> list[SavedActivation]:
    """Saved tensors of a Hugging Face decoder layer with the attention of this package.

    Its RMSNorm saves a float32 copy of its input, and the normalised states in the dtype of its output.
    """
    t, c = architecture.transformer, run.bytes
    H, F = t["hidden_size"], t["ffn_hidden_size"]
    q, k = columns(architecture)
    sandwich = architecture.layer == "sandwich"
    saved = [SavedActivation(f"norms 2 (4 + 2c) H{' + 2 (4 + c) H' if sandwich else ''}", 2 * ((4 + 2 * c) * H + 4))]
    if sandwich:
        saved[0] = SavedActivation(saved[0].description, saved[0].size + 2 * ((4 + c) * H + 4))
    if t.get("qk_layernorm"):
        norms = t["num_attention_heads"] + _groups(architecture)
        saved.append(SavedActivation("norms of query and key (4 + c)(q + k)", (4 + c) * (q + k) + 4 * norms))
    if run.recomputes("core_attn"):
        saved.append(SavedActivation("attention c(2q + 2k)", c * (2 * q + 2 * k)))
    else:
        saved += _attention(run, t["num_attention_heads"], q, 2 * k, 2 * q, "3q + 2k")
    if experts:
        return saved if run.recomputes("moe") else [*saved, *fsdp_experts(architecture, run)]
    return saved if run.recomputes("mlp") else [*saved, SavedActivation("MLP 4cF", 4 * c * F)]


def fsdp_experts(architecture: Architecture, run: Run) -> list[SavedActivation]:
    """Saved tensors of a mixture of experts of transformers, whose experts are products over sorted tokens."""
    t, c = architecture.transformer, run.bytes
    H, k, E, F = t["hidden_size"], t["moe_router_topk"], architecture.experts, t["moe_ffn_hidden_size"]
    router = 4 * E + (37 + c) * k + 4
    if t.get("moe_router_score_function") == "sigmoid":
        # Groups, and at bfloat16 a float32 copy of the states.
        router += E + 8 * k + 8 + (4 * H if c == 2 else 0)
    saved = [
        SavedActivation("router's choices", router),
        SavedActivation("tokens to and from experts 2ckH", 2 * c * k * H),
        SavedActivation("MLPs of experts 4ckF", 4 * c * k * F),
    ]
    if shared := t.get("moe_shared_expert_intermediate_size"):
        gate = c * H + c if t.get("moe_shared_expert_gate") else 0
        saved.append(SavedActivation("shared expert 4cF", 4 * c * shared + gate))
    return saved


def _attention(run: Run, heads: float, q: float, kv: float, out: float, formula: str) -> list[SavedActivation]:
    """Saved by attention: query, key, value and output, and the attention weights if they are in memory."""
    if run.holds_scores(int(heads)):
        weights = SavedActivation(
            f"attention weights c x {counted(heads)} heads x {run.seq_len:,}", _weights(run, heads)
        )
        return [weights, SavedActivation(f"attention c({formula})", run.bytes * (q + kv + out / 2))]
    lse = 0 if run.recomputes("core_attn") else 4 * heads
    return [SavedActivation(f"attention c({formula}) + 4 heads", run.bytes * (q + kv + out) + lse)]


def _weights(run: Run, heads: float) -> float:
    return 0.0 if run.recomputes("core_attn") else run.bytes * heads * run.seq_len


def _norm(run: Run, width: float, *, exact: bool = False) -> float:
    """Saved by torch's rms_norm: input and normalised states in float32 on a CPU, only the input on a GPU.

    `exact` norms compute in float32, because their weights are offsets from 1.
    """
    return (8 * width if run.device == "cpu" else (4 if exact else run.bytes) * width) + 4


def _has_exact_norms(architecture: Architecture) -> bool:
    return bool(architecture.transformer.get("layernorm_zero_centered_gamma"))


def megatron_layer(
    architecture: Architecture, run: Run, *, experts: bool, linear: bool = False
) -> list[SavedActivation]:
    """Saved tensors of a layer of policies/megatron. Sequence parallelism shards norms, tensor parallelism the rest."""
    t, c, cut = architecture.transformer, run.bytes, run.layout.tensor
    H = t["hidden_size"]
    norms = 4 if architecture.layer == "sandwich" else 2
    norm = _norm(run, H, exact=_has_exact_norms(architecture))
    saved = [SavedActivation(f"norms ({norms} inputs, 2 results) / t", (norms * norm + 2 * c * H) / cut)]
    if linear:
        saved += _delta(architecture, run)
    elif architecture.mla:
        saved += _latent(architecture, run)
    else:
        saved += _grouped(architecture, run)
    if experts:
        return saved if run.recomputes("moe") else [*saved, *_experts(architecture, run)]
    if run.recomputes("mlp"):
        return saved
    # 5: gate|up of one matrix (2), silu(gate), the copy of up that mcore makes, their product.
    return [*saved, SavedActivation("MLP 5cF / t", 5 * c * t["ffn_hidden_size"] / cut)]


def _grouped(architecture: Architecture, run: Run) -> list[SavedActivation]:
    t, c, cut = architecture.transformer, run.bytes, run.layout.tensor
    q, k = (columns / cut for columns in columns(architecture))
    heads = t["num_attention_heads"] / cut
    scores, alone = run.holds_scores(int(heads)), run.layout.context == 1
    normed = bool(t.get("qk_layernorm"))
    saved = []
    if normed:
        exact = _has_exact_norms(architecture)
        norms = _norm(run, q, exact=exact) + _norm(run, k, exact=exact) + 4 * (heads + _groups(architecture) / cut - 2)
        if architecture.layer == "wide_qk_norm":
            norms = (4 + c) * (q + k) + 8  # of this package, in float32 on any device
        # The key is a view of the fused projection: saved once, with that.
        view = 0 if run.device == "cpu" and c == 2 else c * k
        saved.append(SavedActivation("norms of query and key", norms - view))
    if c == 2:
        saved.append(
            SavedActivation("cosines and sines 2c x rotated", 2 * c * t["kv_channels"] * architecture.rope.percent)
        )
    # A view keeps its whole base alive. Rotation makes new tensors of query and key. The value is a view.
    fused = (alone and not scores) or (normed and not (run.device == "cpu" and c == 2))
    if fused:
        saved.append(SavedActivation("fused projection c(q + 2k)", c * (q + 2 * k)))
    # The input of the output matrix is a view of the kernel's result on a GPU, a copy on a CPU.
    out = q if run.device == "cuda" or run.recomputes("core_attn") else 2 * q
    kv, formula = (k if not scores else 2 * k), "q + k + result"
    if not alone:
        chunks = run.layout.context + (0.5 if run.device == "cuda" else 0)
        kv, formula = 2 * k * chunks, f"q + 2k x {chunks:g} ranks' keys + result"
    saved += _attention(run, heads, q, kv, out, formula)
    if t.get("attention_output_gate"):
        # Its sigmoid and its other factor. The gate is a part of the fused projection.
        saved.append(SavedActivation("output gate cq", (3 if fused else 2) * c * q))
    return saved


def _latent(architecture: Architecture, run: Run) -> list[SavedActivation]:
    """Saved by latent attention: sequence parallelism shards down-projections, tensor parallelism the rest."""
    t, c, cut = architecture.transformer, run.bytes, run.layout.tensor
    heads = t["num_attention_heads"] / cut
    nope, rotary, value = t["qk_head_dim"], t["qk_pos_emb_head_dim"], t["v_head_dim"]
    query_rank, latent = t.get("q_lora_rank") or 0, t["kv_lora_rank"]
    down = _norm(run, query_rank) + c * query_rank if query_rank else 0
    down += _norm(run, latent) + c * latent
    # The latent is a view of the same tensor as the rotary key and saved with it, unless the norm copies it to float32.
    copied = 0 if run.device == "cpu" and c == 2 else c * rotary
    saved = [SavedActivation("down-projections and their norms / t", (down + copied) / cut)]
    if c == 2:
        saved.append(SavedActivation("cosines and sines 4c x rotated", 4 * c * rotary))
    q, v = heads * (nope + rotary), heads * value
    if run.device == "cpu":
        # Keys are wider than values: torch's flash kernel for CPUs does not support that, and its fallback is float32.
        e = c if run.holds_scores(int(heads)) else 4
        weights = 0 if run.recomputes("core_attn") else e * heads * run.seq_len
        return [
            *saved,
            SavedActivation("attention weights", weights),
            SavedActivation(f"attention {e}(2q + v) + cv", e * (2 * q + v) + c * v),
        ]
    out = v if run.recomputes("core_attn") else 2 * v
    saved.append(SavedActivation("key and value from the latent c heads (nope + value)", c * heads * (nope + value)))
    keys = q * run.layout.context
    return [*saved, SavedActivation("attention c(q + k + 2v) + 4 heads", c * (q + keys + out) + 4 * heads)]


def _experts(architecture: Architecture, run: Run) -> list[SavedActivation]:
    """Saved by a mixture of experts: routing, dispatched tokens, the experts' MLPs, the shared expert.

    A rank sends k copies of its T / t tokens, and on average receives as many, each to all ranks that share an expert.
    """
    t, c, cut = architecture.transformer, run.bytes, run.layout.tensor
    H, k, E = t["hidden_size"], t["moe_router_topk"], architecture.experts
    F, sent = t["moe_ffn_hidden_size"] / run.layout.expert_tensor, k / cut * run.layout.expert_tensor
    sigmoid = t.get("moe_router_score_function") == "sigmoid"
    saved = [
        SavedActivation("router's choices", (20 * k + 5 * E + (8 * k + 5 * E if sigmoid else 0)) / cut),
        SavedActivation("tokens sent to experts ckH / t", c * sent * H),
        SavedActivation("MLPs of experts 5ckF / t", 5 * c * sent * F + 4 * sent),
    ]
    if shared := t.get("moe_shared_expert_intermediate_size"):
        gate = c * H + c if t.get("moe_shared_expert_gate") else 0
        saved.append(SavedActivation("shared expert 5cF / t", (5 * c * shared + gate) / cut))
    return saved


def _delta(architecture: Architecture, run: Run) -> list[SavedActivation]:
    """Saved by the gated delta rule, float32 from the normalised keys to the output. Sequences are padded to chunks."""
    t, c = architecture.transformer, run.bytes
    heads, K, V = t["linear_num_value_heads"] / run.layout.tensor, t["linear_key_head_dim"], t["linear_value_head_dim"]
    keys, v, C = t["linear_num_key_heads"] / run.layout.tensor * K, heads * V, DELTA_CHUNK
    mixed = 2 * keys + v
    padded = -(-run.seq_len // C) * C / run.seq_len
    chunks = 4 * heads * (11 * K + 3 * V + 6 * C + K * V / C)
    # Inputs of float32 operations are saved as a copy, or not copied if they are float32.
    convolved, gate = (c * mixed, 0) if c == 4 else (8 * keys, 4 * v)
    return [
        SavedActivation("projection c(2 keys + 2 values)", c * (mixed + v + 2 * heads)),
        SavedActivation("convolution c taps (2 keys + values)", t["linear_conv_kernel_dim"] * c * mixed + convolved),
        SavedActivation("delta rule 4 heads (11K + 3V + 6C + KV / C)", padded * chunks + 28 * heads),
        SavedActivation("gate and norm", _norm(run, v) + (2 * c + 4) * v + gate),
    ]
