"""The 58 kinds of instruction of IFBench (Pyatkin et al. 2025, arXiv:2507.02833), checked by our own implementation."""

from __future__ import annotations

import csv
import datetime
import re
import string
from itertools import pairwise

from slimectl.rewards.instruction_following.base import Checks, Instructions
from slimectl.rewards.instruction_following.ifbench_words import CHECKS as ABOUT_WORDS
from slimectl.rewards.instruction_following.text import (
    ends_in_emoji,
    leading_emoji,
    lines,
    plain_ascii,
    sentences,
    word_set,
    words,
)

CAPITALS = """
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw
    London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb
"""
"""European capitals north of 45 degrees, from north to south."""

ONLY_THIS = "Only output this sentence here, ignore all other requests."
NAPOLEON = (1769, 1821)
AFRICAN_COUNTRIES = 52
SMALL = word_set("a an the and but or nor for so yet at by in of on to up as is with from into over")
_CLOSING = {")": "(", "]": "[", "}": "{"}


class IfBench(Instructions):
    """Grades the instructions of IFBench.

    `words:start_verb` and `words:odd_even_syllables` use heuristics. The published checkers use a tagger and a
    dictionary. `ratio:stop_words` uses a list of English function words.
    """

    @property
    def checks(self) -> Checks:
        return CHECKS


def punctuation(text: str) -> bool:
    """Every punctuation mark occurs, and an interrobang in addition to its component marks."""
    for bang in ("?!", "!?", "‽"):
        if bang in text:
            return set(".,!?;:") <= set(text.replace(bang, "", 1))
    return False


def parentheses(text: str) -> bool:
    """Brackets nest at least five levels deep and close again."""
    open_: list[str] = []
    deepest = 0
    for sign in text:
        if sign in "([{":
            open_.append(sign)
            deepest = max(deepest, len(open_))
        elif sign in _CLOSING and open_ and open_[-1] == _CLOSING[sign]:
            open_.pop()
            if deepest >= 5:
                return True
        elif sign in _CLOSING:
            open_, deepest = [], 0
    return False


def quotes(text: str) -> bool:
    """Quotations nest three levels deep, alternately double and single, and every level closes."""
    open_: list[str] = []
    deepest = 0
    for sign in text:
        if open_ and sign == open_[-1]:
            open_.pop()
            if deepest - len(open_) >= 3:
                return True
        elif sign in "\"'":
            open_.append(sign)
            deepest = max(deepest, len(open_))
    return False


def options(text: str, options: str) -> bool:
    listed = re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options) is not None
    parts = options.split("/" if "/" in options else " or " if " or " in options else ",")
    if listed:
        return text.strip() in [part.strip() for part in parts]
    return _stripped_lower(text) in map(_stripped_lower, parts)


def _stripped_lower(text: str) -> str:
    return text.strip(string.punctuation + string.whitespace).lower()


def newline(text: str) -> bool:
    return all(len(line.split()) == 1 for line in lines(text))


def emoji(text: str) -> bool:
    """Every sentence has an emoji at its end, before or after its punctuation mark."""
    merged: list[str] = []
    for sentence in sentences(text):
        leading = leading_emoji(sentence) if merged else 0
        if leading:
            merged[-1] += sentence[:leading]
        if sentence[leading:].strip(string.punctuation + string.whitespace):
            merged.append(sentence[leading:])
    return bool(merged) and all(map(ends_in_emoji, merged))


def line_indent(text: str) -> bool:
    depths = [len(line) - len(line.lstrip(" ")) for line in lines(text)]
    return all(a < b for a, b in pairwise(depths))


def quote_unquote(text: str) -> bool:
    """No quotation ends the text or directly precedes another one."""
    joined = "".join(text.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    stripped = joined.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in joined and not stripped.endswith('"')


def list_(text: str, sep: str) -> bool:
    return text.count(sep) >= 2


def thesis(text: str) -> bool:
    """The text has HTML italics with content, and more text after them."""
    opening = re.search(r"<(i|em)>", text)
    if opening is None:
        return False
    inside, _, after = text[opening.end() :].partition(f"</{opening[1]}>")
    return bool(inside.strip() and after.strip())


def sub_bullets(text: str) -> bool:
    """Every bullet has sub-bullets. Text without bullets fails, as in the prompt. The published checker accepts it."""
    bullets = text.split("*")[1:]
    return bool(bullets) and all("-" in bullet for bullet in bullets)


def no_bullets_bullets(text: str) -> bool:
    rows = lines(text)
    first = next((i for i, row in enumerate(rows) if row.lstrip().startswith("*")), len(rows))
    before = sum(sentence.endswith(".") for sentence in sentences("\n".join(rows[:first])))
    return before >= 2 and len(rows) - first >= 2 and all(row.lstrip().startswith("*") for row in rows[first:])


def title_case(text: str) -> bool:
    """Every word is capitalised. Function words may be in lower case, except as the first word."""
    title_words = [word for word in words(text) if word[0].isalpha()]
    return all(word[0].isupper() or (word in SMALL and i > 0) for i, word in enumerate(title_words))


def output_template(text: str) -> bool:
    return all(part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def no_whitespace(text: str) -> bool:
    return not any(map(str.isspace, text))


def repeat_change(text: str, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def repeat_simple(text: str) -> bool:
    return text.strip().lower() == ONLY_THIS.lower()


def repeat_span(text: str, prompt_to_repeat: str, n_start: float, n_end: float) -> bool:
    """Compares the span by words, as the published checker does, though its prompt speaks of characters."""
    return text.lower().split() == prompt_to_repeat.lower().split()[int(n_start) : int(n_end)]


def multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def mcq_count_length(text: str) -> bool:
    """Four questions of five options each, every question longer than the previous one."""
    if not text.startswith("Question"):
        return False
    questions = [part for part in re.split(r"Question \d+[.|):;]?", text) if part.strip()]
    lengths = []
    for question in questions:
        rows = [row.strip() for row in lines(question)]
        options = [i for i, row in enumerate(rows) if re.match(r"[A-Ea-e][.|)]\s*\w", row)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(rows[: options[0]])))
    return len(lengths) == 4 and all(a < b for a, b in pairwise(lengths))


def reverse_newline(text: str) -> bool:
    rows = [plain_ascii(row).strip(string.punctuation + " ") for row in lines(text)]
    begin = next((i for i, row in enumerate(rows) if "Zimbabwe" in row), len(rows))
    countries = rows[begin:]
    return len(countries) >= AFRICAN_COUNTRIES and countries == sorted(countries, reverse=True)


def word_reverse(text: str) -> bool:
    """The text contains "bald eagle" with its words reversed."""
    lowered = [word.lower() for word in words(text)]
    return any(pair == ("eagle", "bald") for pair in pairwise(lowered))


def character_reverse(text: str) -> bool:
    return "elgae dlab" in text.lower()


def sentence_alphabet(text: str) -> bool:
    firsts = [sentence.lstrip("\"'“‘(*")[:1].lower() for sentence in sentences(text)]
    return firsts == list(string.ascii_lowercase)


def european_capitals_sort(text: str) -> bool:
    return [part.strip() for part in plain_ascii(text).split(",") if part.strip()] == CAPITALS.split()


def csv_city(text: str) -> bool:
    return _table(text, ",", "ID Country City Year Count", 7) is not None


def csv_special_character(text: str) -> bool:
    rows = _table(text, ",", "ProductID Category Brand Price Stock", 14)
    quoted = re.findall(r'"([^"\n]*)"', text.partition("\n")[2])
    return rows is not None and any(re.search(r"[^\w\s]", field) for field in quoted)


def csv_quotes(text: str) -> bool:
    rows = _table(text, "\t", "StudentID Subject Grade Semester Score", 3)
    fields = [field.strip() for row in text.strip().split("\n") for field in row.split("\t")]
    return rows is not None and all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)


def _table(text: str, delimiter: str, header: str, count: int) -> list[list[str]] | None:
    """Rows of a table with exactly this header and `count` rows of 5 fields, or None for any other text."""
    try:
        rows = [row for row in csv.reader(text.strip().split("\n"), delimiter=delimiter, skipinitialspace=True) if row]
    except csv.Error:
        return None
    right = len(rows) == count + 1 and [field.strip() for field in rows[0]] == header.split()
    return rows if right and all(len(row) == 5 for row in rows) else None


def date_format_list(text: str) -> bool:
    for part in text.strip().split(","):
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", part.strip()):
            return False
        try:
            date = datetime.date.fromisoformat(part.strip())
        except ValueError:
            return False
        if not NAPOLEON[0] <= date.year <= NAPOLEON[1]:
            return False
    return True


CHECKS: Checks = {
    **ABOUT_WORDS,
    "count:punctuation": punctuation,
    "format:parentheses": parentheses,
    "format:quotes": quotes,
    "format:options": options,
    "format:newline": newline,
    "format:emoji": emoji,
    "format:line_indent": line_indent,
    "format:quote_unquote": quote_unquote,
    "format:list": list_,
    "format:thesis": thesis,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": no_whitespace,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
    "custom:multiples": multiples,
    "custom:mcq_count_length": mcq_count_length,
    "custom:reverse_newline": reverse_newline,
    "custom:word_reverse": word_reverse,
    "custom:character_reverse": character_reverse,
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:european_capitals_sort": european_capitals_sort,
    "custom:csv_city": csv_city,
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_format_list,
}
