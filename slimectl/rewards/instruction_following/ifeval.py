"""The 25 kinds of instruction of IFEval (Zhou et al. 2023, arXiv:2311.07911), checked by our own implementation."""

from __future__ import annotations

import json
import re

from slimectl.rewards.instruction_following.base import Checks, Instructions, compared
from slimectl.rewards.instruction_following.text import language_of, sentences, words

_FENCE = re.compile(r"^```(?:json)?|```$", re.IGNORECASE)
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE), "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE)}


class IfEval(Instructions):
    """Grades the instructions of IFEval. Keywords are text, not patterns, and also match inside words, as published.

    The language is detected by letters and common words, not by a model (text.py).
    """

    @property
    def checks(self) -> Checks:
        return CHECKS


def existence(text: str, keywords: list[str]) -> bool:
    return all(str(keyword).casefold() in text.casefold() for keyword in keywords)


def frequency(text: str, keyword: str, frequency: float, relation: str = "at least") -> bool:
    return compared(text.casefold().count(keyword.strip().casefold()), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text, re.I) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: float, let_relation: str = "at least") -> bool:
    return compared(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    detected = language_of(text)
    return detected is None or detected == language


def number_sentences(text: str, num_sentences: float, relation: str = "at least") -> bool:
    return compared(len(sentences(text)), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: float) -> bool:
    """Paragraphs are separated by ***. Only the first and last may be empty, and then they do not count."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def number_words(text: str, num_words: float, relation: str = "at least") -> bool:
    return compared(len(words(text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    parts = text.split("\n\n")
    if sum(1 for part in parts if part.strip()) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = re.match(r"\s*[\"']*([^\s.,?!'\"]*)", parts[int(nth_paragraph) - 1])
    return first is not None and first[1].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: float) -> bool:
    return sum(_pairs(line, "[", "]") for line in text.split("\n")) >= num_placeholders


def _pairs(line: str, opening: str, closing: str) -> int:
    """Number of `opening` brackets that are closed later in the line."""
    count, at = 0, line.find(opening)
    while at >= 0 and (end := line.find(closing, at)) >= 0:
        count, at = count + 1, line.find(opening, end)
    return count


def postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker)
    return pattern.search(text) is not None if pattern else marker.casefold() in text.casefold()


def number_bullet_lists(text: str, num_bullets: float) -> bool:
    rows = [line.strip() for line in text.split("\n")]
    stars = sum(1 for row in rows if row.startswith("*") and len(row) > 1 and row[1] != "*")
    return stars + sum(row.startswith("-") for row in rows) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in _CONSTRAINED)


def number_highlighted_sections(text: str, num_highlights: float) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(1 for part in (*single, *double) if part.strip()) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: float) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    inside = text.strip()
    try:
        json.loads(_FENCE.sub("", inside).strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return True
    return False


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: float, capital_relation: str = "at least") -> bool:
    return compared(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and response_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and response_language(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: Checks = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
