"""Responses that try to break, stall or trick a verifier: a corpus, and endless compositions of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

MOST = 250_000
"""Characters of the longest answers that models write."""

EXPLOSIVE = [
    "9^{9^{9^9}}", r"\binom{1000000}{500000}", r"\binom{\binom{999}{500}}{\binom{999}{400}}", "(10^{10})!",
    "((5!)!)!",
    "2^{1000000000}", "1^{9^9}", "10^{-10^{10}}", r"\int_0^1 x^x dx", r"\sum_{i=1}^{10000000} i^i",
    r"\prod_{n=1}^{\infty} n", r"\lim_{x\to 0} \frac{\sin x}{x}", "1e999999999", "x^{x^{x^{x^x}}}", "(x+y+z)^{1000}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}", r"\exp(\exp(\exp(\exp(9))))", r"\gcd(9^{9^9}, 3)",
    r"\lcm(9^{9^9}, 3)", r"\lfloor 9^{9^{9^9}} \rfloor", r"9^{9^9} \bmod 7", r"\Gamma(10^9)", r"\cosh(10^9)",
    "(10^3)!^{1000}", "((10^{300})^{300})^{300}", r"\zeta(10^{50})", r"\sqrt[10^9]{x^{10^9}}", r"\log_{1}{1}",
    r"\frac{1}{0}",
    r"\frac{0}{0}", r"\tan(\frac{\pi}{2})", r"\infty - \infty", r"\sin(10^{40})",
    r"\det\begin{vmatrix}1\end{vmatrix}",
    "x = y = z = x", "1 < 2 < 3 < x < 4", r"\left\{ x \mid x > 1 \right.", r"|x| \cdot ||y||| ", r"a_{b_{c_{d}}}",
    r"\left[((10^{300})^{300})^{300}1,234.5\right)", "[9^{9^{9}},5)",
    r"\sum_{a=1}^{n}" * 20 + "a", r"\sum_{a=1}^{90}\sum_{b=1}^{90}\sum_{c=1}^{90} abc", r"\sum_{k=1}^{99} \sin(k)^{k}",
    r"\int_0^a " * 30 + "a" + "da" * 30, r"\prod_{k=1}^{50}\prod_{j=1}^{50} (x+k+j)", "100000!",
    r"\binom{10^{50}}{200}",
    r"\begin{pmatrix}a&b\\c&d\end{pmatrix}^{64}", r"\begin{pmatrix}a&b\\c&d\end{pmatrix}" * 8, "(2^{100000})!",
    r"\Gamma(" * 40 + "n" + ")" * 40, "1e-999999", "(1,2)+" * 60 + "(1,2)", "1e1000" * 40, r"7^{10^{4000}}",
    r"(-1)^{\frac{1}{10^{30}}}", r"x^{0.1234567890123456789}", "0.1e-300^{300}", r"\cos^{-1}(2)^{i}", "i^{i^{i^i}}",
]  # fmt: skip
BROKEN = [
    r"\frac{", r"\frac{1}", r"\frac12345", r"\sqrt[", r"\left(", r"\right]", "{" * 40, "}" * 40, "(" * 60,
    "[" * 60 + ")" * 60,
    r"\text{" * 20, r"\begin{cases}", r"\end{matrix}", "^" * 30, "_" * 30, "^_^", r"\\" * 30, "$" * 31, "&" * 30,
    "%", "#",
    "||||", r"\{\{\}", "{,}", ",,,;;;", "...", "1,2,,3", "1,234,56", "--5", "+-+-3", "5e", "e5", ".", "-", r"\boxed",
    r"\boxed{", r"\boxed{\boxed{", r"\fbox{}", "</think>", "<think>", "<answer>", "</answer>", "###Response",
    "Answer:", "```",
    "```python", "answer is (", "Answer: Answer: Answer:", "**", "****(A)****", "(((A)))", r"\def\x{\x\x}\x",
    r"\input{/etc/passwd}",
    r"\write18{touch x}", "__import__('os').system('true')", "eval(input())",
    "().__class__.__bases__[0].__subclasses__()",
    "'; DROP TABLE", '{"score": 1}', "NaN", "nan", "inf", "-Infinity", "None", "True", "1_000", "0x10", "1j", "٣",
    "½", "Ⅷ", "²³",
    "\x00", "\x1b[31m", "\u202e", "\u200b" * 5, "\ufeff", "\ud800", "\U0001f600", "é", "ﬁ", "İ", "ß", "\r\n",
    "\u2028", "\x85", "\t" * 9,
]  # fmt: skip
MARKUP = [
    "# " * 40, "| a | b |\n|---|", "* a\n" * 30, "> " * 50, "[x](y" * 20, "![", "[" * 40 + "x](y)" * 40,
    "- [ ] " * 20, "1. " * 30, "***b***", "__x__", "~~~\n", "`" * 50, "````python\n```", "```json\n{",
    "<div " * 30, "<" * 40, "<!--", "-->", "<script>1</script>", "&lt;&#x10FFFF;&#0;", "<b>" * 30, "</answer",
    "<answer>" * 20, "<ANSWER>5</ANSWER>", "<think>" * 20, "</think>" * 20, "<|im_end|>", "[/INST]", "$$",
    r"\[", r"\]", r"\(", r"$\boxed{5}$ $", "<<>>", "<em></em>", "****** ******", "P.S.", '{"a": [{"b": ',
    '{"score": 1e999}', "[[Rating: 5]]", "Score: 10/0", "score=٧", "Score: -0",
]  # fmt: skip
SIGNS = [
    "a" + "\u0301" * 40, "\u2066\u202e" * 9, "𝟝", "５", "٤٢", "¼", "㊷", "\ufdfa" * 9, "ẞ", "ŉ", "İ" * 9,
    "\U000e0041", "−5", "1⁄2", "٫", "１，２３４", "\x1c", "\x0b", "\x0c", "\udfff\ud800", "½½",
    "👨‍👩‍👧‍👦" * 9, "🇩" * 9, "\u0600", "\ufffe", "੧੨", "〇", "𒐕", "\u2028\u2029", "\u00ad", "ￊ",
    "\U0010ffff", "五", "Ⅻ", "⁵", "₅", "五十", "∞", "≠", "√2", "π²", "×10⁵", "\u3000", "ﷺ",
]  # fmt: skip
LONG = [
    "a" * 5000 + "!", "1" * 4400, "1," * 3000, " " * 20000 + "x", "\n" * 5000, "the answer is " * 900,
    "Answer: " * 900, "**" * 3000, "option " * 900, "9" * 20000, "0." + "0" * 5000 + "1", "1e" + "9" * 400,
    "Score: " * 900 + "7", "1.2." * 3000, "- " * 4000, r"\boxed{" * 2000, r"\text{" * 900, r"\frac" * 900,
    "{{}" * 1500, r"\left" * 900, "=" * 4000, "word-" * 3000, "'" * 3000, "a'b" * 3000, '"' + "a " * 5000,
    "\t " * 5000 + "\n", "A) " * 3000, "(A" * 3000, "A. B. C. " * 2000, "Dr. " * 4000, "?!" * 4000, "1/" * 3000,
    "+" * 3000, "-" * 3000 + "5", "x^" * 2000, "x_" * 2000, "5%" * 3000, "$5" * 3000,
    r"\frac{" * 400 + "1" + "}{2}" * 400, "(" * 400 + "1" + ")" * 400, r"\sqrt{" * 400 + "2" + "}" * 400,
    "[" * 3000 + "]" * 3000, '{"a":' * 3000, "(" * 99 + "1" + ")" * 99, r"\boxed{" * 99 + "5" + "}" * 99,
    "-(" * 99 + "5" + ")" * 99, "|" * 999, r"\begin{pmatrix}" + "1&" * 2000 + r"\end{pmatrix}",
    r"\{" + "1," * 900 + r"2\}", "(1,2)" + r"\cup(3,4)" * 400, "```\n" * 2000, "<a>" * 3000, "</" * 3000,
    "😀" * 5000, "é" * 9000, "\u0301" * 9000, "\ud800" * 3000, "猫" * 9000, "lambda: " * 400 + "1",
    "not " * 900 + "1", "[1 for _ in " * 40, "1 if 1 else " * 400 + "1", "**2" * 900, "~" * 900 + "1",
    r"\boxed{" + "option " * 40 + "x}", "**A** and " * 2000, "A, " * 3000, "A. x\n" * 3000, "Score (" * 500,
    "答案是" * 2000, "x" + "`" * 20000 + "x", "<think>" * 900 + "</think>" * 899,
    "'</think>'" * 2000, "```python\n'''\n" * 900, "x```\n" * 2000,
]  # fmt: skip
BODIES = [
    "", "NaN", "[NaN, 1, 2]", "-Infinity", "1e999", "1" * 5000, "1" * 400, "[" * 100_000, '{"a":' * 2000,
    "<html>", "\ud7ff", '{"score": 1e999}', '{"score": NaN}', "[1, 2, 3", "null", "0.5 0.5", "'0.5'", "0x10",
    "\ufeff0.5", '{"score": 1, "score": 2}',
]  # fmt: skip
ANSWERS = [
    None, True, 0.5, -1e308, 10**400, "0.5", "NaN", [], [0.5], [0.5] * 3, [None] * 3, [[0.5]] * 3,
    [10**400] * 3, {}, "choices", {"score": None}, {"score": 10**400}, {"score": "x"}, {"score": [1]},
    {"choices": []}, {"choices": {}}, {"choices": [{}]}, {"choices": [{"message": None}]},
    {"choices": [{"message": {"content": None}}]}, {"choices": [{"message": {"content": [1]}}]},
    {"choices": "x"}, {"error": {"message": {"error": []}}}, {"detail": [{"msg": 1}]},
]  # fmt: skip
PLAIN = ["5", "42", r"\frac{1}{2}", "x", "x^2+1", "(1,2)", "[3,4)", r"\{1,2\}", "A", "B", "yes", r"\pi", "1,234.5",
"50\\%",
         r"5\text{ cm}", "y=2x+1", r"x \ge 3", r"1 \pm 2", r"(-\infty,2]\cup[3,\infty)", "Tuesday", "print(1)",
         "1/3"]  # fmt: skip
LABELS = ["5", "42", r"\frac{1}{2}", "x^2+1", "(1,2)", r"\{1,2\}", "y=2x+1", r"\sqrt{2}", r"x \ge 3", "1000",
          r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "yes"]  # fmt: skip
AROUND = [
    "{}", r"\boxed{{{}}}", r"so $\boxed{{{}}}$.", r"\fbox {{{}", "Answer: {}", "**Answer:** ${}$",
    "<answer>{}</answer>",
    "</think>{}", "The answer is ({})", "Final answer: {}", "```python\n{}\n```", "```\n{}", "#### {}", "{}\n\n{}",
    r"<think>{}</think> Answer: {} \boxed{{{}}} <answer>{}</answer>", "{}" * 20,
]  # fmt: skip
INSIDE = [r"\frac{{{}}}{{{}}}", r"\sqrt{{{}}}", "({})^{{{}}}", "({}, {})", r"\{{{}, {}\}}", r"\text{{{}}}", "{}+{}",
"{} = {}",
          "{}!", r"\left[{}\right)", "|{}|", "{}{}", r"\log_{{{}}}{{{}}}", r"{} \cdot {}", "-{}", "{} cm", "{}, {}",
          r"{} \cup {}", r"\binom{{{}}}{{{}}}", r"\sin^{{{}}}({})"]  # fmt: skip


def responses(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(response, label) pairs; the same for the same seed, whatever the count."""
    random = Random(seed)
    for _ in range(count):
        yield response(random), random.choice(LABELS)


def drawn(count: int) -> list[str]:
    """As many texts of hypothesis, of all signs, half surrogates among them; the same every time."""
    made: list[str] = []

    @settings(max_examples=count, database=None, derandomize=True, deadline=None, phases=[Phase.generate])
    @given(st.text(st.characters(codec=None), max_size=200))
    def keep(text: str) -> None:
        made.append(text)

    keep()
    return made


def replies(count: int, seed: int) -> Iterator[tuple[int, str]]:
    """(status, body) of servers that answer something other than what was asked for."""
    random = Random(seed)
    for _ in range(count):
        body = random.choice((*BODIES, *map(json.dumps, ANSWERS), *[json.dumps(says(response(random))) for _ in "123"]))
        if random.random() < 0.1:
            at = random.randrange(len(body) + 1)
            body = body[:at] + random.choice(("", "{", '"', "[", "9", "\x00", ",")) + body[at + 1 :]
        yield random.choices((200, 201, 204, 302, 400, 404, 500), (20, 1, 1, 1, 1, 1, 1))[0], body


def says(content: object) -> dict[str, object]:
    """A chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def response(random: Random) -> str:
    text = _filled(random.choice(AROUND), random)
    for _ in range(random.choice((0, 0, 0, 1, 3))):  # a slip of the pen
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice(("", "{", "}", "\\", "^", "\n", " ", "9", "\x00"))
            + text[at + random.randint(0, 2) :]
        )
    return (text * random.choice((100, 300)))[:MOST] if random.random() < 0.005 else text[:MOST]


def _filled(form: str, random: Random) -> str:
    parts = [_formula(random, 0) for _ in range(form.count("{}"))]
    return form.format(*parts)


def _formula(random: Random, depth: int) -> str:
    if depth < 4 and random.random() < 0.6 - 0.1 * depth:
        form = random.choice(INSIDE)
        return form.format(*(_formula(random, depth + 1) for _ in range(form.count("{}"))))
    kind = random.random()
    if kind < 0.06:
        return random.choice(("9", "1+", "x", "(", "-", r"\ ", "a ", "1,", "𝒜", r"\pi", "{}", "A) ")) * random.randint(
            1, 400
        )
    if kind < 0.12:
        return "".join(random.choices("0123456789xyzπ+-*/^_=<>(){}[]\\.,|&!%$ \n\x00\ud800é", k=random.randint(0, 60)))
    if kind > 0.99:
        return random.choice(LONG)
    return random.choice(random.choice((EXPLOSIVE, BROKEN, PLAIN, MARKUP, SIGNS)))
