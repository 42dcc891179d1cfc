"""JSON Schemas as grammars: which texts they allow, which tokens may follow, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from operator import ge, gt, le, lt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.token_bytes import TokenBytes
from slimectl.engines.embedded.grammar import DEAD, Automaton, GrammarState, TokenGrammar, Vocabulary, token_table
from slimectl.engines.embedded.json_grammar import json_grammar
from slimectl.engines.embedded.json_regex import regex_grammar
from slimectl.errors import SettingsError

CPU = torch.device("cpu")
PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "description": "in years"},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 3]}, "minItems": 1, "maxItems": 2},
        "parent": {"anyOf": [{"$ref": "#/$defs/Parent"}, {"type": "null"}]},
        "score": {"type": ["number", "boolean"]},
    },
    "required": ["name", "parent"],
    "additionalProperties": False,
    "$defs": {
        "Parent": {
            "type": "object",
            "properties": {
                "known": {"const": True},
                "parent": {"anyOf": [{"$ref": "#/$defs/Parent"}, {"type": "null"}]},
            },
            "required": ["known"],
        }
    },
}
SCALARS = {"type": "object", "additionalProperties": {"type": ["integer", "null", "string"]}}


def allows(schema: Any, text: str) -> bool:
    return accepts(Automaton(json_grammar(schema)), text)


def accepts(automaton: Automaton, text: str) -> bool:
    state = automaton.start
    for byte in text.encode():
        state = automaton.step(state, byte)
        if state == DEAD:
            return False
    return automaton.accepts(state)


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (True, ['{"a": [1, {"b": null}], "c": "\\u00e9é\\n"}', "[]", "-0.5e-3", '"x"', "true"], ["", "01", "{a:1}"]),
        (None, ["{}", '{"a":\n  {}}'], ["[]", "1", '{"a": 1,}']),
        ({"type": "string"}, ['""', '"a b"', '"\\"\\\\"', '"\U0001f600"'], ['"a', '"\n"', '"\\ud800"', '"\\x"', "1"]),
        ({"type": "integer"}, ["0", "-7", "1" * 20], ["1.0", "-", "00", "1" * 21, "1e3"]),
        ({"type": "number"}, ["0.25", "1E+9", "-0"], [".5", "1.", "1e", "NaN"]),
        ({"enum": ["a b", 1, None]}, ['"a b"', "1", "null"], ['"a"', "2"]),
        ({"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
        ({"const": {"k": [1, 2]}}, ['{"k": [1, 2]}'], ['{"k": [1]}']),
        ({"type": "array", "items": {"type": "null"}}, ["[]", "[null, null,null]"], ["[null,]", "[1]"]),
        ({"type": "array", "minItems": 2, "maxItems": 3}, ["[1, 2]", "[1,2,3]"], ["[]", "[1]", "[1,2,3,4]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        (SCALARS, ["{}", '{"x": 1, "y": null}'], ['{"x": true}', '{"x": 1.5}']),
        ({"properties": {"a": {}}, "required": ["b"]}, ['{"b": 1}', '{"a": [], "b": {}}'], ["{}", '{"a": 1}']),
        (PERSON, ['{"name": "x", "parent": null}', '{"name":"x","age":3,"tags":["bé",3],"parent":{"known":true}}',
                  '{"name": "x", "parent": {"known": true, "parent": {"known": true}}, "score": false}'],
         ['{"name": "x"}', '{"parent": null, "name": "x"}', '{"name": "x", "parent": null, "z": 1}',
          '{"name": "x", "tags": [], "parent": null}']),
        ({"type": "boolean"}, ["true", "false"], ["True", " true", "true "]),
    ],
)  # fmt: skip
def test_a_grammar_allows_what_its_schema_accepts(schema: Any, texts: list[str], others: list[str]):
    assert [text for text in texts if not allows(schema, text)] == []
    assert [text for text in others if allows(schema, text)] == []


def test_whitespace_and_digits_come_to_an_end():
    assert allows(None, '{\n\t"a": 1 }')
    assert not allows(None, "{  }" + " " * 9)
    assert not allows(None, '{"a":\n' + " " * 25 + "1}")
    assert not allows({"type": "number"}, "0." + "3" * 21)


@pytest.mark.parametrize("schema", [PERSON, SCALARS, None])
def test_every_random_answer_is_json_that_the_schema_accepts(schema: Any):
    jsonschema = pytest.importorskip("jsonschema")
    grammar = TokenGrammar(json_grammar(schema), token_table(byte_tokenizer(), size=260, device=CPU))
    draw, ended = random.Random(0), 0
    for _ in range(40):
        state, tokens = GrammarState(grammar, [256]), list[int]()
        while 256 not in tokens and len(tokens) < 300:
            allowed = state.mask_V().nonzero()[:, 0].tolist()
            # Closing brackets and quotes more often than by chance, or most answers would not end.
            tokens += draw.choices(allowed, [20 if token == 256 or token in b'"}],:' else 1 for token in allowed])
            state.advance(tokens[-1])
        if tokens[-1] == 256:
            ended += 1
            jsonschema.validate(json.loads(bytes(tokens[:-1]).decode()), schema or {"type": "object"})
    assert ended > 20


PIECES = [
    '{"', '":', '": "', '",', "name", "na", "me", "n", "é", "a\\", '\\"', '"}', " ", "\n", "abc", "paré", '"', "}", "{",
    ":",
]  # fmt: skip
SPECIAL = "<|end|>"


def walked(automaton: Automaton, state: int, text: str) -> int:
    for byte in text.encode():
        state = state if state == DEAD else automaton.step(state, byte)
    return state


def test_the_tokens_that_may_follow_are_those_whose_bytes_may():
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([SPECIAL])
    vocabulary = Vocabulary(TokenBytes(SimpleNamespace(backend_tokenizer=backend)), size=len(PIECES) + 3, device=CPU)
    grammar = TokenGrammar(json_grammar(PERSON), vocabulary)
    automaton, end = grammar.automaton, len(PIECES)
    state, place = GrammarState(grammar, [end]), automaton.start
    for piece in ['{"', "na", "me", '": "', "abc", "é", "a\\", "n", '\\"', '",', "\n"]:
        allowed = state.mask_V().nonzero()[:, 0].tolist()
        assert allowed == [token for token, other in enumerate(PIECES) if walked(automaton, place, other) != DEAD], (
            piece
        )
        state.advance(PIECES.index(piece))
        place = walked(automaton, place, piece)
    state.advance(PIECES.index("abc"))  # as a stranger's token, or one after the end
    assert state.mask_V().nonzero()[:, 0].tolist() == [end]
    with pytest.raises(SettingsError, match="has no token for the character '!'"):
        token_table(SimpleNamespace(backend_tokenizer=backend), size=20, device=CPU)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"x": {"type": "integer", "multipleOf": 3}}}, r"\$.x: 'multipleOf' is not supported"),
        ({"pattern": r"(a)\1"}, r"json_schema: \$: pattern .* is not supported \(groupref\). Leave it out"),
        ({"pattern": "(?=a)"}, r"is not supported \(assert\)"),
        ({"pattern": r"\bword"}, r"is not supported \(at\)"),
        ({"pattern": "(?i:a)"}, r"is not supported \(subpattern\)"),
        ({"pattern": "a{65}"}, "more than 64 repetitions"),
        ({"pattern": "(a*)*"}, "repetitions of a part that may be empty"),
        ({"pattern": "("}, "missing"),
        ({"pattern": 3}, "pattern is not a string of at most 1000 characters"),
        ({"pattern": "a", "maxLength": 3}, "'maxLength' next to pattern is not supported"),
        ({"minLength": -1}, "minLength and maxLength are not valid bounds"),
        ({"maxLength": 10**6}, "above 1000 characters are not supported"),
        ({"type": "number", "minimum": 0.5}, "minimum 0.5 is not a whole number"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "no number is within exclusiveMaximum, minimum"),
        ({"type": "string", "minimum": 3}, "'minimum' is not supported"),
        ({"oneOf": [{}, {}]}, "'oneOf' is not supported"),
        ({"anyOf": [{}], "properties": {}}, "'properties' next to anyOf is not supported"),
        ({"type": "text"}, "type 'text' is not one of string, integer"),
        ({"$ref": "http://x/y"}, "points outside the schema"),
        ({"$ref": "#/$defs/x"}, "points to nothing"),
        ({"enum": ["a"], "type": "integer"}, "no value fits"),
        ({"allOf": [{}, {}]}, "allOf with several schemas"),
        ({"items": {}, "minItems": 3, "maxItems": 2}, "minItems and maxItems are not valid bounds"),
        ({"items": {}, "minItems": 10**6}, "above 1000 items are not supported"),
        (False, "False is not a schema that any value fits"),
        (json.loads('{"items":' * 80 + "{}" + "}" * 80), "too large or nested too deeply"),
    ],
)
def test_what_a_grammar_cannot_keep_is_refused_with_its_place(schema: Any, reason: str):
    with pytest.raises(SettingsError, match=reason):
        json_grammar(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_a_schema_that_contains_itself_is_refused_unless_it_may_end(schema: dict[str, Any]):
    with pytest.raises(SettingsError, match=r"requires itself endlessly\. Make the inner part optional\."):
        json_grammar(schema)
    assert allows({"anyOf": [schema, {"$ref": "#"}, {"type": "null"}]}, "null")
    assert allows({"type": "object", "properties": {"next": {"$ref": "#"}}}, '{"next": {}}')


def is_within(value: float, bounds: dict[str, int]) -> bool:
    tests = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
    return all(tests[name](value, bound) for name, bound in bounds.items())


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_keep_their_bounds(kind: str):
    """Random bounds, and numbers near them: a text is of the grammar where its number is within."""
    draw = random.Random(1)
    for _ in range(40):
        names = draw.sample(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], draw.randint(1, 3))
        bounds = {name: draw.choice((draw.randint(-12, 12), draw.randint(-1200, 1200))) for name in names}
        near = {bound + step for bound in bounds.values() for step in (-1, 0, 1)} | set(range(-15, 16))
        texts = [str(number) for number in near]
        if kind == "number":
            texts += [f"{number}{decimals}" for number in near - {0} for decimals in (".0", ".5", ".05")] + [
                "-0.5",
                "0.5",
            ]
        right = [text for text in texts if is_within(json.loads(text), bounds)]
        try:
            automaton = Automaton(json_grammar({"type": kind, **bounds}))
        except SettingsError:
            assert right == [], bounds
            continue
        accepted = [text for text in texts if automaton.accepts(walked(automaton, automaton.start, text))]
        assert accepted == right, bounds


PATTERNS = {
    r"^[a-z]{2,3}\d$": ["ab1", "abc9"], r"a+": ["a", "baab", "é a"], r"^(foo|ba[rz])?$": ["", "foo", "baz"],
    r"^[^\"x]*$": ["", "q\\", "日本"], r"\d{3}-\d{4}$": ["555-1234", "1 555-1234"], r"^.{2}$": ["ab", "é\""],
    r"^\w+@\w+\.com$": ["me@x.com"], r"^é[à-ü]$": ["éà"], r"^\s*x": ["  xy", "\tx"], r"^\D+$": ["ab", "é"],
    r"^a\nb$": ["a\nb"], r"^(?:ab)+?$": ["ab", "abab"], r"^[A-Z][a-z]*(?: [A-Z][a-z]*)*$": ["Ab Cd"],
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_strings_keep_their_pattern(pattern: str):
    others = ["", "x", '"', "ab", "ab1z", "foobar", "555-123", "me@x,com", "é", "éz", "a b", "1", "Ab cd", "\n"]
    as_in_ecma = re.compile(re.sub(r"\$$", r"\\Z", pattern), re.ASCII)  # whose $ is not before a last line break
    for text in PATTERNS[pattern] + others:
        expected = as_in_ecma.search(text) is not None
        assert allows({"pattern": pattern}, json.dumps(text, ensure_ascii=False)) == expected, text
    assert all(map(as_in_ecma.search, PATTERNS[pattern]))


FREE_PATTERNS = [
    r"^[a-z]+$", r"^\w+$", r"^[a-zA-Z0-9_-]+$", r"^(a|b)*c$", r"^a*$", r"^[b-z]+$", r"^[^b]*$", r"^[ -\x7f].*$",
    r"^(?:.x)+$", r"^[^\"]+$", r"^\S+@\S+$", r"[a-z]+", "m", "", r"^.*$", r"^\D*$", r"^[\W]+$", r"^[aé-ü]+$",
]  # fmt: skip
"""Patterns that a letter may leave as they are: what follows is still not any text."""
TEXTS = [*map(chr, range(0x20, 0x7F)), "m$", "ab", "abc", "aab", 'a"', "é", "aé", "日本", "\\n", "\\u00e9", "x y"]


STRINGS = [
    *({"type": "string", "pattern": pattern} for pattern in FREE_PATTERNS),
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 4},
    {"type": "string", "maxLength": 1},  # shorter than tokens of plain characters
    *({"type": "string", "pattern": pattern} for pattern in (r"^.{1,2}$", r"^(.{0,2}|abc+m)$", r"^b?.{2}c$")),
]


@pytest.mark.parametrize("string", STRINGS, ids=str)
def test_random_answers_keep_patterns_and_lengths_in_tokens_of_several_characters(string: dict[str, Any]):
    jsonschema = pytest.importorskip("jsonschema")
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(TEXTS)}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([SPECIAL])
    end = len(TEXTS)
    vocabulary = token_table(SimpleNamespace(backend_tokenizer=backend), size=end + 1, device=CPU)
    schema = {"type": "object", "properties": {"a": string, "b": {"type": "string"}}, "required": ["a", "b"]}
    grammar = TokenGrammar(json_grammar(schema), vocabulary)
    if "pattern" in string:  # as in ECMA, whose $ is not before a last line break
        string = string | {"pattern": "(?a)" + re.sub(r"\$$", r"\\Z", string["pattern"])}
    strict = schema | {"properties": {"a": string, "b": {"type": "string"}}}
    draw, ended, masks = random.Random(0), 0, dict[int, list[int]]()
    for _ in range(60):
        state, place, tokens = GrammarState(grammar, [end]), grammar.automaton.start, list[int]()
        while end not in tokens and len(tokens) < 60:
            allowed = state.mask_V().nonzero()[:, 0].tolist()
            if place not in masks:
                masks[place] = [i for i, text in enumerate(TEXTS) if walked(grammar.automaton, place, text) != DEAD]
            assert [token for token in allowed if token != end] == masks[place]
            tokens += draw.choices(allowed, [20 if token == end or TEXTS[token] in '"}' else 1 for token in allowed])
            state.advance(tokens[-1])
            place = walked(grammar.automaton, place, "" if tokens[-1] == end else TEXTS[tokens[-1]])
        if tokens[-1] == end:
            ended += 1
            jsonschema.validate(json.loads("".join(TEXTS[token] for token in tokens[:-1])), strict)
    assert ended > 10


def test_strings_keep_their_length_in_characters():
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    texts = {text: json.dumps(text, ensure_ascii=False) for text in ("", "é", "ab", "日本語", "abcd")}
    assert [text for text, written in texts.items() if allows(schema, written)] == ["ab", "日本語"]
    assert allows(schema, r'"\n\u00e9"')


@pytest.mark.parametrize(
    "pattern",
    [
        "( Yes| No)", "a|ab|abc", "(a|b)*c", "[a-c]{2,3}", "[^a]b?", "a.b", '"a"', r"\\n|\n", r"\{\n \}", "^ab", "a{2}",
        "(?:a|é)+", r"\d\.\w", "a+?b", r"[\s]a",
    ],
)  # fmt: skip
def test_a_regular_expression_allows_the_texts_that_it_matches_as_a_whole(pattern: str) -> None:
    automaton = Automaton(regex_grammar(pattern))
    texts = ["".join(letters) for n in range(4) for letters in itertools.product('abcé"\\\n', repeat=n)]
    texts += [" Yes", " No", "{\n }", "\\n", "1.x", " a", "\ta"]
    matching = [text for text in texts if re.fullmatch(pattern, text, re.ASCII)]
    assert [text for text in texts if accepts(automaton, text)] == matching
    assert matching


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("(?=a)b", "assert"), (r"(a)\1", "groupref"), ("a(", "missing"), (r"\bword", "at"), ("a{0,99}", "repetitions")],
)
def test_a_regular_expression_that_no_grammar_keeps_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=f"regex: pattern .* is not supported .*{reason}"):
        regex_grammar(pattern)
