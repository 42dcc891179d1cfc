"""GGUF to Hugging Face: a real model keeps its words, and what cannot be carried over is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.gguf import GGUFFile
from slimectl.data.convert_options import ConvertOptions
from slimectl.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'slimectl[gguf]'")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.slow
def test_real_model_loads_plainly_and_answers(smollm2: tuple[Path, dict[str, Any]]):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, summary = smollm2
    assert (summary["tensors"], summary["parameters"], summary["verified"]) == (272, 134_515_008, True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    assert model.config.rms_norm_eps == 1e-5
    asked = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"  # it ends by itself


@pytest.mark.slow
def test_real_tokenizer_keeps_text_and_special_tokens(smollm2: tuple[Path, dict[str, Any]]):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2[0])
    for text in ("x  1 , . é中▁\n\n 12345\t<|im_end|>", "def f(a1b):\n    return '''it's'''  ", "🙂‍↔️ 1,000.5"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x  12")] == ["x", "  ", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|im_end|>", 2, 1)
    assert (tokenizer.pad_token_id, tokenizer.unk_token) == (2, "<|endoftext|>")
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.decode([1, 19556], skip_special_tokens=True) == "Hello"
    assert GenerationConfig.from_pretrained(smollm2[0]).eos_token_id == 2
    rendered = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def small_gguf(
    path: Path, *, pre: str = "smollm", kind: str = "gpt2", extra: str | None = None, rows: int = 5, **fields: Any
) -> Path:
    """A llama of one layer whose vocabulary is a, b, ab, 1 and an end token; `fields` are more of its metadata."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(5)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab", "1", "<end>"])
    writer.add_token_types([1, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    for name, value in fields.items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](name, value)
    shapes = {
        "token_embd": (rows, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16),
    }  # fmt: skip
    random = numpy.random.default_rng(0)
    for name, shape in {**shapes, **({extra: (4,)} if extra else {})}.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_small_file_converts_in_any_precision(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = small_gguf(tmp_path / "small.gguf")
    summary = convert_checkpoint(source, tmp_path / "out", ConvertOptions(dtype="bfloat16"))
    assert (summary["tensors"], summary["dtype"]) == (11, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("abb11<end>") == [2, 1, 3, 3, 4]


def test_written_model_computes_what_the_file_holds(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    source = small_gguf(tmp_path / "small.gguf")
    convert_checkpoint(source, tmp_path / "out")
    tensors = dict(GGUFFile(source).read())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    held = AutoModelForCausalLM.from_config(GGUFFile(source).config, dtype=torch.float32)
    assert held.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]  # tied to the embedding
    asked = torch.tensor([[0, 1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(held(asked).logits, written(asked).logits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: small_gguf(path, pre="gpt-9"), "the pre-tokenizer 'gpt-9' is not supported, only gpt-2, smollm"),
        (lambda path: small_gguf(path, kind="t5"), "a tokenizer of kind t5 is not supported"),
        (lambda path: small_gguf(path, extra="rope_freqs"), "12 tensors, of which only 11 have a Hugging Face name"),
        (lambda path: small_gguf(path, rows=6), r"embed_tokens.weight has shape \(6, 8\), but \(5, 8\) is expected"),
        (
            lambda path: small_gguf(path, **{"split.count": 2}),
            "one of the 2 files of a model. .* llama-gguf-split --merge",
        ),
        (lambda path: path.write_bytes(b"not a gguf"), "cannot be read as GGUF"),
        (lambda path: path.write_bytes(small_gguf(path).read_bytes()[:-2000]), "cannot be read as GGUF"),
    ],
    ids=["words", "unigram", "rope_freqs", "shape", "split", "garbage", "cut_off"],
)
def test_what_cannot_be_carried_over_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str):
    make(tmp_path / "odd.gguf")
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "odd.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def scaling(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    keys = {"type": kind, "factor": factor, **more}
    return {f"llama.rope.scaling.{key}": value for key, value in keys.items()}


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        (scaling("linear", 4.0), LINEAR),
        ({"llama.rope.scaling.factor": 4.0}, LINEAR),  # llama.cpp: without a type it is linear
        ({"llama.rope.scale_linear": 4.0}, LINEAR),
        ({**scaling("linear", 4.0), "llama.rope.freq_base": 500.0}, {**LINEAR, "rope_theta": 500.0}),
        (scaling("yarn", 4.0, original_context_length=16), YARN),
        (scaling("yarn", 4.0), {**YARN, "original_max_position_embeddings": 64}),  # the context of the file
        # 2 (1 + 0.1 ln 4) = 2 x 1.1386294
        (scaling("yarn", 4.0, original_context_length=16, attn_factor=2.0), {**YARN, "attention_factor": 2.2772589}),
        (
            scaling("yarn", 4.0, original_context_length=16, yarn_beta_fast=16.0, yarn_beta_slow=2.0),
            {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (scaling("none", 4.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (scaling("linear", 0.0), {"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_scaled_rotary_frequencies_are_written(fields: dict[str, Any], rope: dict[str, Any], tmp_path: Path):
    summary = convert_checkpoint(small_gguf(tmp_path / "a.gguf", **fields), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert written.pop("attention_factor", None) == pytest.approx(rope.pop("attention_factor", None))
    assert written == rope
    assert summary["logits_max_difference"] == 0
    more = ", with rope_parameters of the file's metadata" if rope["rope_type"] != "default" else ""
    assert summary["logits_compared_with"] == f"transformers' GGUF reader{more}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (scaling("longrope", 4.0), r"rope.scaling.type = 'longrope' is not supported, only linear and yarn"),
        (scaling("yarn", 4.0, yarn_log_multiplier=0.5), r"yarn_log_multiplier = 0.5 changes the rotary frequencies"),
        (scaling("linear", 4.0, attn_factor=2.0), r"attn_factor = 2.0 changes the rotary frequencies"),
        ({"llama.attention.sliding_window": 16}, "attention.sliding_window = 16 changes what the model computes"),
        ({"llama.logit_scale": 0.1}, "logit_scale = 0.1 changes"),
        ({"llama.attention.scale": 0.3}, "attention.scale = 0.3 changes"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale = 12.0 changes"),
        ({"llama.residual_scale": 0.2}, "residual_scale = 0.2 changes"),
        ({"llama.expert_count": 8}, "expert_count = 8 changes"),
        ({"llama.expert_weights_scale": 2.5}, "expert_weights_scale = 2.5 changes"),
        ({"llama.attention.value_length": 8}, "attention.value_length = 8 changes"),
        ({"llama.attention.causal": False}, "attention.causal = False changes"),
        ({"llama.attention.key_length": 4, "llama.rope.dimension_count": 2}, "rope.dimension_count is 2, but llama"),
        ({"llama.key_of_tomorrow": 1}, "key_of_tomorrow = 1 changes"),
    ],
)
def test_metadata_that_config_json_cannot_hold_is_refused(fields: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=message) as error:
        convert_checkpoint(small_gguf(tmp_path / "a.gguf", **fields), tmp_path / "out")
    assert "Convert from the model's original checkpoint instead" in str(error.value)


def test_metadata_that_changes_nothing_is_read(tmp_path: Path):
    neutral = {
        "logit_scale": 1.0, "attention.scale": 0.5, "attention.sliding_window": 64, "expert_count": 0,
        "attention.causal": True, "attention.key_length": 4, "attention.value_length": 4, "rope.dimension_count": 4,
        "rope.scaling.finetuned": True, "residual_scale": 0.0, "rope.scale_linear": 1.0,
    }  # fmt: skip
    source = small_gguf(tmp_path / "a.gguf", **{f"llama.{name}": value for name, value in neutral.items()})
    assert convert_checkpoint(source, tmp_path / "out")["logits_max_difference"] == 0


def test_tokens_that_end_a_turn_are_ends_of_responses(tmp_path: Path):
    from transformers import GenerationConfig

    ends = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 2}
    convert_checkpoint(small_gguf(tmp_path / "a.gguf", **ends), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [4, 3, 2]


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def gguf_bytes(*, tensors: int = 0, fields: int = 1, body: bytes = b"") -> bytes:
    return b"GGUF" + (3).to_bytes(4, "little") + number(tensors) + number(fields) + body


KEY = number(1) + b"a"
ARRAY = (9).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes(body=KEY + ARRAY + bytes(4) + number(2**60)), "an array of 1152921504606846976 values"),
        (gguf_bytes(body=KEY + ARRAY + bytes(4) + number(10**6)), "truncated"),
        (gguf_bytes(body=KEY + ARRAY + ARRAY + number(2)), "an array of values of kind 9"),
        (gguf_bytes(body=number(2**40)), "a text of 1099511627776 bytes"),
        (gguf_bytes(body=KEY + (99).to_bytes(4, "little")), "a value of kind 99"),
        (gguf_bytes(fields=2**60), "1152921504606846976 fields and 0 tensors"),
        (gguf_bytes(fields=0, tensors=2**60), "0 fields and 1152921504606846976 tensors"),
        (
            gguf_bytes(fields=0, tensors=1, body=KEY + (2**31).to_bytes(4, "little")),
            "a tensor of 2147483648 dimensions",
        ),
        (gguf_bytes(), "truncated"),
        (b"GGUF", "truncated"),
        (b"", "the file does not begin with GGUF"),
        (bytes(100), "the file does not begin with GGUF"),
    ],
)
def test_a_header_that_lies_is_refused_before_it_is_read(data: bytes, message: str, tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
    assert str(error.value) == f"{tmp_path}/a.gguf: cannot be read as GGUF ({message}). Download it again."
