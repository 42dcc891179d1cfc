"""Pairs of a response and a label, made by families: whether a person pays for the response is known beforehand."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple


class Pair(NamedTuple):
    response: str
    label: str
    right: bool
    metadata: dict[str, Any] = {}  # noqa: RUF012


Family = Callable[[Random], Iterator[Pair]]
LETTERS = "ABCDEFGH"


def thinking(text: str, guess: str, random: Random) -> str:
    """The text behind a thought that guesses something else."""
    opening, closing = random.choice(
        (("<think>\n", "\n</think>\n\n"), ("<thinking>", "</thinking>\n"), ("", "</think>\n"), ("[THINK]", "[/THINK]"),
         ("<reasoning>\n", "\n</reasoning>\n"), ("<think>a</think>b<think>", "</think>"))
    )  # fmt: skip
    return f"{opening}{guess}{closing}{text}"


def in_another_form(text: str, random: Random) -> str:
    return unicodedata.normalize(random.choice(("NFC", "NFD")), text)


# Letters: a statement in one of the languages, and what may stand around it without another meaning.

STATEMENTS = [
    "The answer is {}.", "The correct answer is {}", "Answer: {}", "**Answer:** {}", "**Final answer: {}**",
    "the best option is {}", "My final choice is {}.", "ANSWER IS {}", "Answer:\n{}", "The answer is: {}", "答案是{}。",
    "正确答案为{}。", "答案：{}", "因此选{}。", "选择{}选项", "故選{}", "答えは{}です。", "正解：{}",
    "正解は{}だ", "정답은 {}입니다.",
    "답: {}", "La respuesta correcta es {}.", "La réponse est {}.", "Die richtige Antwort ist {}.",
    "La risposta è {}", "A resposta correta é {}.", "Правильный ответ — {}.", "Đáp án là {}", "Cevap: {}",
]  # fmt: skip
SPELLED = ["{}", "({})", "**{}**", "[{}]", "'{}'", "“{}”", "`{}`", "$\\mathbf{{{}}}$", "\\text{{{}}}", "\\({}\\)"]
BOXES = [
    r"\boxed{{{}}}", r"$\boxed{{\text{{{}}}}}$", r"\boxed{{({})}}", r"\boxed{{{}. 42 m}}", r"\boxed{{\textbf{{{}}}}}",
    r"\boxed{{\text{{({}) the second}}}}", r"\fbox{{{}}}", r"\boxed{{{}) 3}}", r"\boxed{{\mathrm{{{}}}}}",
    r"\boxed{{\text{{Option {}}}}}", r"\boxed{{{}: 12 kg}}", r"\boxed{{{}\ 42}}",
]  # fmt: skip
BEFORE = ["", "", "", "E = mc^2 holds.\n", "{other} is wrong.\n", "Not {other}.\n", "At 300 K it is 5 A.\n",
          "I think so.\n", "(A) 1 (B) 2\n", "I compare {other} with {letter}.\n", "{other}错误。\n",
          "F = ma, so it falls.\n", "**{other}** is tempting.\n"]  # fmt: skip
AFTER = ["", "", "", "\n\nCheck: F = ma", " Not {other}.", "\nA large one, I think.", "\nI hope this helps.",
         "\n\nbecause $E = mc^2$", "\n{other} is wrong."]  # fmt: skip


def around(text: str, letter: str, other: str, random: Random) -> str:
    before, after = (random.choice(texts).format(letter=letter, other=other) for texts in (BEFORE, AFTER))
    return f"{before}{text}{after}"


def two_letters(random: Random) -> tuple[str, str]:
    letter, other = random.sample(LETTERS[1:], 2)
    return letter, other


def stated_letters(random: Random) -> Iterator[Pair]:
    letter, other = two_letters(random)
    text = around(random.choice(STATEMENTS).format(random.choice(SPELLED).format(letter)), letter, other, random)
    yield Pair(text, letter, True)
    yield Pair(text, other, False)


def lower_case_letters(random: Random) -> Iterator[Pair]:
    letter, other = two_letters(random)
    form = random.choice(
        ("The answer is {}.", "answer: {}", "{}. 42", "({})", "{}", "答案是{}", "Answer: {}) 3", "**{}**")
    )
    text = form.format(letter.lower())
    yield Pair(text, letter, True)
    yield Pair(text, other, False)


def wide_letters(random: Random) -> Iterator[Pair]:
    letter, other = two_letters(random)
    wide = chr(ord(letter) + 0xFEE0)
    text = random.choice(("答案是（{}）", "答案：{}。", "{}", "正解は{}です", "答案【{}】")).format(
        random.choice((wide, letter))
    )
    yield Pair(text, letter, True)
    yield Pair(text, other, False)


def boxed_letters(random: Random) -> Iterator[Pair]:
    letter, other = two_letters(random)
    text = around(random.choice(BOXES).format(letter), letter, other, random)
    yield Pair(text, letter, True)
    yield Pair(text, other, False)
    formula = random.choice((r"{} = mc^2", r"{} = 2\pi r", r"{}_0 + 1", r"{} \cdot 3", r"{} < 5", r"{}^2")).format(
        other
    )
    text = f"Answer: {letter}\n\nbecause \\boxed{{{formula}}}"
    yield Pair(text, letter, True)
    yield Pair(text, other, False)


def several_letters(random: Random) -> Iterator[Pair]:
    letter, other = two_letters(random)
    both = random.choice(("{} and {}", "{}, {}", "{} or {}", "{}/{}", "({}) and ({})", "{} & {}", "{}、{}", "{}和{}"))
    text = random.choice(
        ("Answer: {}", r"\boxed{{{}}}", "The answer is {}.", "{}", "答案是{}。", r"\boxed{{\text{{{}}}}}")
    )
    for label in (letter, other):
        yield Pair(text.format(both.format(letter, other)), label, False)


def no_letters(random: Random) -> Iterator[Pair]:
    text = random.choice(
        ("I do not know.", "E = mc^2", "A large one", "The answer is not {}.", "F = ma", "It is 5 A", "Because",
         "Répondez É", "The answer is a matter of taste.", "Answer: В", "{} is wrong", "It isn't {}.", "42",
         "The answer is E = 3 J", "I'd say so", r"\boxed{{x}}", "Answer: β")
    )  # fmt: skip
    letter = random.choice(LETTERS)
    yield Pair(text.format(letter), letter, False)


def letters_after_thoughts(random: Random) -> Iterator[Pair]:
    letter, other = two_letters(random)
    statement, guess = (random.choice(STATEMENTS).format(one) for one in (letter, other))
    yield Pair(thinking(statement, guess, random), letter, True)
    yield Pair(thinking(statement, guess, random), other, False)
    yield Pair(thinking("I do not know", statement, random), letter, False)
    yield Pair(f"<think>{statement}", letter, False)


def texts_of_choices(random: Random) -> Iterator[Pair]:
    choices = random.sample(["Café Noir", "서울", "東京", "12 km/s", "Müller", "Ångström", "Paris", "x + y"], 4)
    at, other = random.sample(range(4), 2)
    form = random.choice(
        ("{}", "The answer is {}.", "“{}”.", "**{}**", "So it is in the list:\n{}.", "\\boxed{{\\text{{{}}}}}")
    )
    text = form.format(in_another_form(choices[at], random))
    yield Pair(text, "ABCD"[at], True, {"choices": choices})
    yield Pair(text, "ABCD"[other], False, {"choices": choices})


GPQA: list[Family] = [stated_letters, lower_case_letters, wide_letters, boxed_letters, several_letters, no_letters,
                      letters_after_thoughts, texts_of_choices]  # fmt: skip

# DAPO: a number or a word, in spellings that the published rule or a person holds equal.


def written(value: Fraction, random: Random) -> str:
    if value.denominator == 1:
        return random.choice((f"{value}", f"{value}.0", f"{int(value):,}"))
    forms = [f"{value}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"] if value > 0 else [f"{value}"]
    return random.choice(forms)


LINES = ["Answer: {}", "**Answer:** {}", "**Answer: {}**", "Answer: ${}$", "answer:\n{}", "Answer: {}.", "Answer: {}。",
         "Answer: “{}”", "Answer：{}", "Answer: 「{}」。", "Answer: {}<|im_end|>", "### Answer: {}\n",
         "Answer: \\boxed{{{}}}",
         "Answer: $x = {}$", "Answer: `{}`", "Answer: {}।"]  # fmt: skip


def dapo_numbers(random: Random) -> Iterator[Pair]:
    value = Fraction(random.choice((-1, 1, 1)) * random.randint(1, 5000), random.choice((1, 1, 1, 3, 7, 9)))
    line = "It follows.\n" + random.choice(LINES)
    yield Pair(line.format(written(value, random)), str(value), True)
    yield Pair(line.format(written(value + 1, random)), str(value), False)
    yield Pair(line.format(written(-value, random)), str(value), False)
    yield Pair(f"{line.format(value)}\nAnswer: {value + 1}", str(value), False)
    yield Pair(f"Answer: {value + 1}\n{line.format(value)}", str(value), True)


def dapo_words(random: Random) -> Iterator[Pair]:
    word, other = random.sample(["café", "naïve", "서울", "Zürich", "Paris", "señor", "東京", "Málaga"], 2)
    line = random.choice([line for line in LINES if "x =" not in line])
    yield Pair(line.format(in_another_form(word, random)), in_another_form(word, random), True)
    yield Pair(line.format(in_another_form(other, random)), word, False)


def dapo_thoughts(random: Random) -> Iterator[Pair]:
    number = random.randint(2, 999)
    right, wrong = f"Answer: {number}", f"Answer: {number + 1}"
    yield Pair(thinking(right, wrong, random), str(number), True)
    yield Pair(thinking(wrong, right, random), str(number), False)
    yield Pair(thinking("I do not know", right, random), str(number), False)
    yield Pair(f"<think>{right}", str(number), False)


DAPO: list[Family] = [dapo_numbers, dapo_words, dapo_thoughts]

# IFEval: a text that keeps one instruction by how it was made, and one that breaks it.

WORDS = ["river", "stone", "light", "green", "paper", "quiet", "window", "market", "garden", "silver", "winter",
         "bridge", "candle", "forest", "mirror"]  # fmt: skip


def instruction(name: str, kept: str, broken: str, random: Random, **arguments: Any) -> Iterator[Pair]:
    metadata = {"instruction_id_list": [name], "kwargs": [arguments]}
    yield Pair(kept, "", True, metadata)
    yield Pair(broken, "", False, metadata)
    yield Pair(thinking(kept, broken, random), "", True, metadata)
    yield Pair(thinking(broken, kept, random), "", False, metadata)
    yield Pair(f"<think>{kept}", "", False, metadata)


def counted_instructions(random: Random) -> Iterator[Pair]:
    count = random.randint(3, 9)
    words = random.choices(WORDS, k=count)
    less = {"relation": "less than"}
    kind = random.randrange(6)
    if kind == 0:
        name, arguments = "length_constraints:number_words", {"num_words": count, "relation": "at least"}
        yield from instruction(name, " ".join(words), " ".join(words[1:]), random, **arguments)
    elif kind == 1:
        kept, broken = (" ".join(f"{word.title()} is here." for word in some) for some in (words[1:], words))
        yield from instruction("length_constraints:number_sentences", kept, broken, random, num_sentences=count, **less)
    elif kind == 2:
        kept, broken = ("\n".join(f"* {word}" for word in some) for some in (words, words[1:]))
        yield from instruction("detectable_format:number_bullet_lists", kept, broken, random, num_bullets=count)
    elif kind == 3:
        kept, broken = (" ".join(f"[{word}]" for word in some) for some in (words, words[1:]))
        name = "detectable_content:number_placeholders"
        yield from instruction(name, kept, broken, random, num_placeholders=count)
    elif kind == 4:
        kept, broken = (" ".join(f"*{word}*" for word in some) for some in (words, words[1:]))
        name = "detectable_format:number_highlighted_sections"
        yield from instruction(name, kept, broken, random, num_highlights=count)
    else:
        kept, broken = ("\n***\n".join(some) for some in (words, words[1:]))
        yield from instruction("length_constraints:number_paragraphs", kept, broken, random, num_paragraphs=count)


def plain_instructions(random: Random) -> Iterator[Pair]:
    text = " ".join(random.sample(WORDS, 8))
    word, absent = text.split()[2], "zebra"
    some = random.choice(
        [
            ("punctuation:no_comma", text, f"{text}, {word}", {}),
            ("startend:quotation", f'"{text}"', f'"{text}', {}),
            ("detectable_format:title", f"<<{word}>>\n{text}", text, {}),
            ("detectable_format:json_format", json.dumps({word: text}), f"{{{word}: {text}}}", {}),
            (
                "startend:end_checker",
                f"{text} Any questions?",
                f"Any questions? {text}",
                {"end_phrase": "Any questions?"},
            ),
            ("keywords:existence", text, text.replace(word, absent), {"keywords": [word]}),
            ("keywords:forbidden_words", text, f"{text} {absent}", {"forbidden_words": [absent]}),
            ("detectable_content:postscript", f"{text}\nP.S. {word}", text, {"postscript_marker": "P.S."}),
            ("combination:two_responses", f"{text} ****** {word}", f"{text} ****** {text}", {}),
            ("change_case:english_lowercase", f"the {text} is on it", f"The {text} is on it", {}),
            ("change_case:english_capital", f"THE {text.upper()} IS ON IT", f"THE {text} IS ON IT", {}),
        ]
    )
    yield from instruction(some[0], some[1], some[2], random, **some[3])


IFEVAL: list[Family] = [counted_instructions, plain_instructions]

# Programs: where a response has its program, and which outputs are the same.


def program_in(random: Random) -> str:
    """A program that doubles a number, in one of its forms."""
    n = random.randint(2, 99)
    return random.choice(
        (f"x = int(input())\nprint(2 * x + {n} - {n})",
         f'def double(x):\n    """Doubles x.\n\n    ```python\n    double({n})\n    ```\n    """\n    return 2 * x\n\n'
         "print(double(int(input())))",
         f"# {n}: ends with ```\nprint(int(input()) * 2)", f"fence = '```'\nx, y = {n}, int(input())\nprint(y + y)")
    )  # fmt: skip


def fenced(program: str, random: Random, *, named: bool = True) -> str:
    language = random.choice(("python", "py", "Python", "python3", 'python title="a.py"', "{.python}")) if named else ""
    mark = random.choice(("```", "```", "~~~", "````"))
    closing = random.choice(("\n", "\n", "\n", "" if not program.endswith("`") else "\n"))
    return f"{mark}{language}\n{program}{closing}{mark}"


OTHER_BLOCKS = ["```\n4\n```", "```bash\npython a.py < in.txt\n```", "```text\nprint(3)\n```", "~~~\nResult: 4\n~~~",
                "```json\n{\"a\": 1}\n```", "```python\n>>> double(2)\n4\n```", "```\n$ python a.py\n```",
                "```cpp\nint main() {}\n```"]  # fmt: skip


def programs(random: Random) -> Iterator[Pair]:
    """Pairs whose label is the program that a person takes from the response."""
    program, earlier = program_in(random), "print('an earlier attempt')"
    named = random.random() < 0.7
    block, first = fenced(program, random, named=named), fenced(earlier, random, named=named)
    rest = "\n\n".join(random.sample(OTHER_BLOCKS, random.randint(0, 2)))
    yield Pair(f"First:\n{first}\nBetter:\n{block}\n{rest}", program, True)
    yield Pair(f"{block}\nNo:\n{first}\n{rest}", program, False)
    yield Pair(thinking(f"{block}\n{rest}", first, random), program, True)
    yield Pair(f"<think>\n{block}\n{rest}", program, False)
    yield Pair(f"```python\n{program}\n", program, False)


def outputs(random: Random) -> Iterator[Pair]:
    """Pairs of what a program printed and what was expected."""
    numbers = [random.randint(-999, 999) for _ in range(random.randint(1, 5))]
    lines = [" ".join(map(str, numbers)), random.choice(WORDS)]
    spaced = "  ".join(random.choice((f"{number}", f"{number}.0", f"{number}.00")) for number in numbers)
    yield Pair(f"{spaced}\n{lines[1]} \n\n", "\n".join(lines), True)
    yield Pair(f"\n{lines[0]}  \n{lines[1]}", "\n".join(lines) + "\n", True)
    yield Pair(f"{spaced}1\n{lines[1]}", "\n".join(lines), False)
    yield Pair(f"{spaced} {lines[1]}", "\n".join(lines), False)
    yield Pair("\n".join(reversed(lines)), "\n".join(lines), False)
    yield Pair(f"{lines[0]}\n{lines[1].upper()}", "\n".join(lines), False)
