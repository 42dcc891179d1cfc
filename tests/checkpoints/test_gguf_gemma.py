"""GGUF of Gemma: norms, windows, two rotary bases and the SentencePiece vocabulary become those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma3TextConfig, GenerationConfig

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.gguf_metadata import changed_keys
from slimectl.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'slimectl[gguf]'")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES: list[tuple[str, float, int]] = [
    ("<pad>", -1000, CONTROL), ("<eos>", -1000, CONTROL), ("<bos>", -1000, CONTROL), ("<unk>", -1000, UNKNOWN),
    ("  ", -1000, USER_DEFINED), ("<end_of_turn>", -1000, NORMAL), ("<0xC3>", 0, BYTE), ("<0xA9>", 0, BYTE),
    ("▁", -9, NORMAL), ("a", -10, NORMAL), ("b", -11, NORMAL), ("c", -12, NORMAL), ("d", -13, NORMAL),
    ("bc", -1, NORMAL), ("ab", -2, NORMAL), ("abcd", 0, NORMAL), ("▁a", -3, NORMAL),
]  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": len(PIECES), "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "max_position_embeddings": 64,
}  # fmt: skip


def gemma_gguf(path: Path, model: Any, **fields: Any) -> Path:
    """The model in a file as llama.cpp's converter writes it: 1 is added to the weight of each norm."""
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in PIECES])
    writer.add_token_scores([score for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    for role, token in (("padding", 0), ("eos", 1), ("bos", 2), ("unknown", 3)):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    for name, value in ({"tokenizer.ggml.add_space_prefix": False} | fields).items():
        add = {float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](name, value)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            added = 1 if name.endswith("norm.weight") else 0
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), (tensor + added).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # norms too, which begin at 0 and would hide what is added to them
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


TWO_BASES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            Gemma3TextConfig(**SHAPE, num_hidden_layers=7, query_pre_attn_scalar=16),
            {"gemma3.rope.freq_base": 1e6},
        ),
        (
            Gemma3TextConfig(
                **SHAPE, num_hidden_layers=2, query_pre_attn_scalar=16, sliding_window_pattern=2,
                rope_parameters=TWO_BASES, final_logit_softcapping=20.0,
            ),
            {
                "gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 5000.0, "gemma3.rope.scaling.factor": 8.0,
                "gemma3.attention.sliding_window_pattern": 2, "gemma3.final_logit_softcapping": 20.0,
            },
        ),
        (
            Gemma2Config(**SHAPE, num_hidden_layers=2, query_pre_attn_scalar=16, attn_logit_softcapping=9.0),
            {"gemma2.attn_logit_softcapping": 9.0, "gemma2.attention.sliding_window_pattern": [True, False]},
        ),
    ],
    ids=["gemma3", "gemma3 scaled", "gemma2"],
)  # fmt: skip
@torch.no_grad()
def test_a_converted_gemma_computes_what_the_original_does(config: Any, fields: dict[str, Any], tmp_path: Path):
    model = random_model(config)
    summary = convert_checkpoint(gemma_gguf(tmp_path / "gemma.gguf", model, **fields), tmp_path / "out")
    assert summary["logits_max_difference"] == 0
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert written.config.layer_types == config.layer_types
    tokens = torch.arange(12)[None] % len(PIECES)
    torch.testing.assert_close(written(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "metadata", "changes"),
    [
        # llama.cpp: 1 / sqrt(5376 / 32) = 1 / sqrt(168) for 62 layers, as in the model's own config.json
        (
            Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, head_dim=128),
            {"attention.sliding_window": 1024},
            {"query_pre_attn_scalar": 168},
        ),
        (
            Gemma2Config(num_hidden_layers=46, hidden_size=4608, num_attention_heads=32, head_dim=128),
            {"attention.sliding_window": 4096},
            {"query_pre_attn_scalar": 144},
        ),
        (Gemma3TextConfig(num_hidden_layers=2), {}, {"layer_types": ["full_attention"] * 2}),
        (
            Gemma3TextConfig(num_hidden_layers=2),
            {"attention.sliding_window": 512, "attention.sliding_window_pattern": 1},
            {"layer_types": ["full_attention"] * 2},
        ),
    ],
    ids=["27b", "gemma2-27b", "no window", "no windowed layer"],
)
def test_keys_that_a_file_of_gemma_implies(config: Any, metadata: dict[str, Any], changes: dict[str, Any]):
    assert changed_keys(config, metadata, ["attention.sliding_window"]) == changes


def test_a_second_rotary_base_of_a_family_with_one_is_refused():
    with pytest.raises(CheckpointError, match=r"rope.freq_base_swa = 5000.0 changes what the model computes"):
        changed_keys(Gemma2Config(), {"rope.freq_base_swa": 5000.0, "attention.sliding_window": 8}, [])


@pytest.mark.slow
def test_the_real_vocabulary_gives_the_pieces_of_the_sentencepiece_package(gemma3: tuple[Path, dict[str, Any]]):
    folder, summary = gemma3
    assert (summary["tensors"], summary["parameters"], summary["verified"]) == (236, 268_098_176, True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Hello, world!  It's 12\n\n\U0001d518"
    expected = ["<bos>", "Hello", ",", "▁world", "!", "  ", "It", "'", "s", "▁", "1", "2", "\n\n"]
    expected += ["<0xF0>", "<0x9D>", "<0x94>", "<0x98>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == expected
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["a", "bc"]),  # bc has a better score than ab
        ("abab", ["ab", "ab"]),
        ("abcd", ["a", "bc", "d"]),  # no two pieces join to abcd, so its score does not matter
        ("d a", ["d", "▁a"]),
        ("d  a", ["d", "  ", "a"]),  # user-defined pieces are found first
        ("é", ["<0xC3>", "<0xA9>"]),
        ("a<end_of_turn>b", ["a", "<end_of_turn>", "b"]),
    ],
)
def test_the_vocabulary_is_read_as_sentencepiece_reads_it(text: str, pieces: list[str], gemma: Path):
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == ["<bos>", *pieces]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_end_of_a_turn_ends_a_response_though_the_file_does_not_name_it(gemma: Path):
    assert GenerationConfig.from_pretrained(gemma).eos_token_id == [1, 5]
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    assert tokenizer.decode([9, 5], skip_special_tokens=True) == "a"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 2)


def test_files_of_llama_begin_each_text_with_a_space(tmp_path: Path):
    model = random_model(Gemma3TextConfig(**SHAPE, num_hidden_layers=1))
    fields = {"tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.add_bos_token": False}
    convert_checkpoint(gemma_gguf(tmp_path / "gemma.gguf", model, **fields), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab a")) == ["▁", "ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    model = random_model(Gemma3TextConfig(**SHAPE, num_hidden_layers=1))
    convert_checkpoint(gemma_gguf(folder / "gemma.gguf", model), folder / "out")
    return folder / "out"
