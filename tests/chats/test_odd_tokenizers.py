"""Odd tokenizers of others: text is encoded as the library tokenizers encodes it with the model's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import import_protobuf

from slimectl.chats.model_tokens import unknown_token, unknown_tokens
from slimectl.chats.tokenizer import PROBES, corrected_config, load_tokenizer, token_decoder, tokenizer_of
from slimectl.data.chat import encode, encode_raw, render
from slimectl.errors import CheckpointError, SlimectlError
from slimectl.types import Prompt

TEXTS = (*PROBES, "the capital", " two  blanks ", "Ünïcode ① ＡＢ", "a<|im_end|>b", "", "1234567")
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
BYTES = pre_tokenizers.ByteLevel.alphabet()
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_level(*, prefix: bool = False, use_regex: bool = True) -> Tokenizer:
    vocabulary = {char: number for number, char in enumerate(sorted(BYTES))}
    vocabulary |= {"th": 256, "the": 257, "Ġc": 258, "12": 259}
    core = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "c"), ("1", "2")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    return core


def split_digits() -> Tokenizer:
    core = byte_level()
    split = pre_tokenizers.Split(Regex(r"\d|\s+|[^\d\s]+"), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.normalizer = normalizers.NFC()
    return core


def ignores_merges() -> Tokenizer:
    core = byte_level()
    core.model.ignore_merges = True
    return core


def lowercase() -> Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return core


def byte_fallback() -> Tokenizer:
    """Return a BPE of characters with byte fallback and a normalizer that writes blanks, as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefilnoprsthT", "th", "▁t"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("▁", "t")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    core.add_special_tokens(SPECIALS)
    return core


def no_prefix() -> Tokenizer:
    core = byte_fallback()
    core.normalizer = normalizers.Replace(" ", "▁")
    return core


def metaspace() -> Tokenizer:
    core = byte_fallback()
    core.normalizer, core.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return core


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -1.0), *((c, -3.0) for c in "abcehit")]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.add_special_tokens(SPECIALS)
    return core


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "the", "cap", "##ital", "##s", *"abcdef1234567"]
    core = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(SPECIALS)
    return core


def word_level() -> Tokenizer:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "capital": 2, "two": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(SPECIALS)
    return core


def with_bos() -> Tokenizer:
    core = byte_level()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return core


def with_limits() -> Tokenizer:
    """Return a tokenizer whose file was saved in the middle of a training: it cuts and pads what it encodes."""
    core = byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=64, pad_id=0)
    return core


CORES: dict[str, Callable[[], Tokenizer]] = {
    core.__name__: core
    for core in (
        byte_level, split_digits, ignores_merges, lowercase, byte_fallback, no_prefix, metaspace, unigram, word_piece,
        word_level, with_bos, with_limits,
    )
}  # fmt: skip
CORES["prefix blank"] = lambda: byte_level(prefix=True)
CORES["no regex"] = lambda: byte_level(use_regex=False)
CLASSES: dict[str, dict[str, Any]] = {
    "none": {},
    **{
        name: {"tokenizer_class": name}
        for name in (
            "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizerFast", "GemmaTokenizerFast", "Qwen2Tokenizer",
            "T5TokenizerFast", "GPT2TokenizerFast", "BertTokenizerFast", "XLMRobertaTokenizer", "CohereTokenizerFast",
            "DebertaV2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchTokenizer",
        )
    },
    "code of the model": {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["x.X", "x.X"]}},
    "prefix blank": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    "not legacy": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
}  # fmt: skip


def folder(path: Path, core: Tokenizer | None, **config: Any) -> Path:
    if core is not None:
        core.save(str(path / "tokenizer.json"))
    write(path / "tokenizer_config.json", {"eos_token": "</s>", **config})
    write(path / "config.json", {"model_type": "llama", "vocab_size": 300, "eos_token_id": 2})
    return path


def write(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values), encoding="utf-8")


def file_tokens(path: Path, text: str) -> list[int]:
    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    core.no_truncation()  # a prompt is never cut
    core.no_padding()
    return core.encode(text, add_special_tokens=False).ids


# Each file under three classes, and one file under every class.
PAIRS = {(core, [*CLASSES][(i + shift) % len(CLASSES)]) for i, core in enumerate(CORES) for shift in (1, 6, 11)}
PAIRS |= {("byte_level", name) for name in CLASSES}


@pytest.mark.parametrize(("core", "class_name"), sorted(PAIRS))
def test_tokens_are_those_of_the_file_under_every_class(core: str, class_name: str, tmp_path: Path):
    path = folder(tmp_path, CORES[core](), **CLASSES[class_name])
    tokenizer, decoder = load_tokenizer(path), token_decoder(path)
    assert tokenizer.eos_token_id == decoder.token_to_id("</s>")
    for text in TEXTS:
        tokens = file_tokens(path, text)
        assert encode(tokenizer, text) == tokens, text
        assert tokenizer.backend_tokenizer.decode(tokens) == decoder.decode(tokens)


def test_a_class_that_encodes_text_differently_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = folder(tmp_path, byte_level(), tokenizer_class="CodeLlamaTokenizerFast")
    load_tokenizer(path)
    load_tokenizer(path)
    (line,) = [record.message for record in caplog.records]
    assert "tokenizer.json encodes text. transformers' CodeLlamaTokenizer, which" in line


def test_servers_get_a_configuration_with_which_transformers_reads_the_file(tmp_path: Path):
    path = folder(tmp_path, byte_level(), tokenizer_class="CodeLlamaTokenizerFast")
    write(path / "tokenizer_config.json", corrected_config(path))
    by_transformers = AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert by_transformers.encode(text, add_special_tokens=False) == file_tokens(path, text)


def test_a_class_that_reads_the_file_needs_no_other_configuration(tmp_path: Path):
    assert corrected_config(folder(tmp_path, byte_level(), tokenizer_class="GPT2TokenizerFast")) is None


def test_a_class_that_agrees_with_the_file_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    load_tokenizer(folder(tmp_path, byte_level(), tokenizer_class="GPT2TokenizerFast"))
    assert not caplog.records


def extra_tokens(path: Path) -> None:
    decoder = {"300": {"content": "<tool>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}}
    folder(path, byte_level(), added_tokens_decoder=decoder, extra_special_tokens={"image_token": "<image>"})


def tokens_as_objects(path: Path) -> None:
    special = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "normalized": False}
    folder(path, byte_level(), eos_token=special, additional_special_tokens=["<|im_end|>"])


def only_a_map(path: Path) -> None:
    folder(path, byte_level())
    write(path / "tokenizer_config.json", {})
    write(path / "special_tokens_map.json", {"eos_token": "</s>", "bos_token": {"content": "<s>"}})


def only_the_file(path: Path) -> None:
    folder(path, byte_level())
    (path / "tokenizer_config.json").unlink()


def null_values(path: Path) -> None:
    folder(path, byte_level(), chat_template=None, pad_token=None, bos_token=None, unk_token=None, model_max_length=4)


def older_vocabulary(path: Path) -> None:
    folder(path, byte_level())
    write(path / "added_tokens.json", {"<|im_end|>": 263})
    write(path / "vocab.json", {"a": 0})
    (path / "merges.txt").write_text("#version: 0.2\n")


def byte_order_mark(path: Path) -> None:
    folder(path, byte_level())
    file = path / "tokenizer_config.json"
    file.write_bytes(file.read_bytes() + b"\n\n")


@pytest.mark.parametrize(
    ("build", "eos"),
    [
        (extra_tokens, "</s>"), (tokens_as_objects, "</s>"), (only_a_map, "</s>"), (only_the_file, None),
        (null_values, "</s>"), (older_vocabulary, "</s>"), (byte_order_mark, "</s>"),
    ],
)  # fmt: skip
def test_odd_companions_leave_the_tokens_of_the_file(build: Callable[[Path], None], eos: str | None, tmp_path: Path):
    build(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token == eos
    for text in TEXTS:
        assert encode(tokenizer, text) == file_tokens(tmp_path, text)


def test_tokens_that_only_the_configuration_adds_are_read_and_decoded(tmp_path: Path):
    extra_tokens(tmp_path)
    tokenizer, decoder = load_tokenizer(tmp_path), token_decoder(tmp_path)
    tokens = encode(tokenizer, "a<tool>b<image>")
    assert [tokenizer.convert_ids_to_tokens(token) for token in tokens] == ["a", "<tool>", "b", "<image>"]
    assert decoder.decode(tokens, skip_special_tokens=False).replace(" ", "") == "a<tool>b<image>"


def test_a_text_gets_the_first_token_that_the_file_adds(tmp_path: Path):
    path = folder(tmp_path, with_bos(), tokenizer_class="LlamaTokenizerFast")
    expected = Tokenizer.from_file(str(path / "tokenizer.json")).encode("the capital").ids
    assert encode_raw(load_tokenizer(path), "the capital") == expected
    assert expected[0] == 261  # <s>, after 256 bytes, four merges and <unk>


@pytest.mark.parametrize("adds", [True, False])
def test_the_file_decides_the_first_token_whatever_the_configuration_says(adds: bool, tmp_path: Path):
    path = folder(tmp_path, with_bos(), bos_token="<s>", add_bos_token=adds)
    assert encode_raw(load_tokenizer(path), "the") == [261, 257]  # as transformers 5.12 reads it


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer.model": b"\x0a\x03abc"}, "the tokenizer cannot be loaded"),
        ({"qwen.tiktoken": b"YQ== 0\n"}, "the tokenizer cannot be loaded"),
        ({"spiece.model": b"\x0a\x03abc"}, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": b"{}"}, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": b'{"version": "1.0", "model": {"type": "Future"}}'}, "the tokenizer cannot be loaded"),
        ({"tokenizer.json": b"not json"}, r"tokenizer\.json: not JSON"),
        ({"tokenizer.json": b""}, r"tokenizer\.json: not JSON"),
        ({"tokenizer.json": b"\x1f\x8b gzip"}, r"tokenizer\.json: not JSON"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}, r"tokenizer_config\.json: not a JSON object"),
        ({"tokenizer.json": b"{}", "special_tokens_map.json": b"[1]"}, r"special_tokens_map\.json: not a JSON object"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_one_line(files: dict[str, bytes], message: str, tmp_path: Path):
    folder(tmp_path, None, tokenizer_class="LlamaTokenizer")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def several_templates(path: Path) -> None:
    write(path / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": CHATML},
                                                             {"name": "tool_use", "template": "no"}]})  # fmt: skip


@pytest.mark.parametrize(
    "write_template",
    [
        lambda path: (several_templates(path), (path / "chat_template.jinja").write_text("{{ messages[0].content }}")),
        lambda path: ((path / "chat_template.jinja").write_text(CHATML), write(path / "chat_template.json", {"a": 1})),
        several_templates,
        lambda path: write(path / "tokenizer_config.json", {"chat_template": {"default": CHATML}}),
        lambda path: (path / "chat_template.jinja").write_bytes(CHATML.replace("{%", "\r\n{%").encode()),
        lambda path: (path / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf" + CHATML.encode()),
        lambda path: (path / "chat_template.jinja").write_text(
            CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
        ),
    ],
    ids=["two that differ", "two files", "several", "by name", "lines of Windows", "byte order mark", "generation"],
)  # fmt: skip
def test_the_template_is_the_one_that_transformers_takes(write_template: Callable[[Path], Any], tmp_path: Path):
    write_template(folder(tmp_path, byte_level()))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = reference.apply_chat_template(
        [{"role": "user", "content": "the"}], tokenize=False, add_generation_prompt=True
    )
    tokens = render(Prompt(text=[{"role": "user", "content": "the"}]), load_tokenizer(tmp_path))
    assert tokens == file_tokens(tmp_path, text)


@pytest.mark.parametrize(
    ("class_name", "prefix", "fits"),
    [("LlamaTokenizer", True, True), ("GemmaTokenizer", False, True), ("GemmaTokenizer", True, False)],
)
def test_a_sentencepiece_file_is_read_as_sentencepiece_reads_it(
    class_name: str, prefix: bool, fits: bool, tmp_path: Path
):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = import_protobuf().ModelProto()
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256))]
    rows += [(piece, -float(i), 1) for i, piece in enumerate(["▁t", "▁th", "he", "▁the", *"▁thecapil"])]
    for piece, score, kind in rows:
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.normalizer_spec.add_dummy_prefix, model.normalizer_spec.remove_extra_whitespaces = prefix, False
    (folder(tmp_path, None, tokenizer_class=class_name) / "tokenizer.model").write_bytes(model.SerializeToString())
    if not fits:
        with pytest.raises(CheckpointError, match=r"encodes text differently from tokenizer\.model; copy tokenizer"):
            load_tokenizer(tmp_path)
        return
    processor, tokenizer = (
        sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model")),
        load_tokenizer(tmp_path),
    )
    for text in (PROBES[0], "the cat", "a\n\n  b 日本語"):
        assert encode(tokenizer, text) == processor.encode(text)


def test_a_name_that_is_no_folder_is_one_line():
    with pytest.raises(CheckpointError, match="no such model folder"):
        tokenizer_of("no/such-model")


OTHER = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
LISTED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": OTHER}]


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": CHATML}, {}, CHATML),
        ({"chat_template": OTHER}, {"chat_template.jinja": CHATML}, CHATML),  # the file goes first, as in transformers
        ({"chat_template": LISTED}, {}, CHATML),
        ({}, {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": OTHER}, CHATML),
        ({}, {"chat_template.json": json.dumps({"chat_template": CHATML})}, CHATML),
        ({"chat_template": None}, {}, None),
        ({"chat_template": [{"name": "rag", "template": OTHER}]}, {}, None),
    ],
)
def test_the_default_template_renders_a_chat(
    config: dict[str, Any], files: dict[str, str], expected: str | None, tmp_path: Path
):
    path = folder(tmp_path, byte_level(), **config)
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    tokenizer, prompt = load_tokenizer(path), Prompt([{"role": "user", "content": "the"}])
    if expected is None:
        with pytest.raises(SlimectlError, match="template"):
            render(prompt, tokenizer)
    else:
        assert render(prompt, tokenizer) == file_tokens(path, "<s>user\nthe<|im_end|>\n<s>assistant\n")


def test_tokens_beyond_the_embedding_are_named_if_texts_can_contain_them(tmp_path: Path):
    path = folder(tmp_path, byte_level(), additional_special_tokens=["<new>"])
    write(path / "config.json", {"model_type": "llama", "vocab_size": 264})
    tokenizer = load_tokenizer(path)
    assert "'<new>' (264). The vocabulary has 264 tokens." in unknown_tokens(path, tokenizer)
    assert unknown_token(encode(tokenizer, "a <new>"), tokenizer).startswith("token 264 ('<new>')")
    assert unknown_token(encode(tokenizer, "a"), tokenizer) == ""


def test_a_padded_embedding_lacks_no_token(tmp_path: Path):
    path = folder(tmp_path, byte_level())
    assert unknown_tokens(path, load_tokenizer(path)) == ""
