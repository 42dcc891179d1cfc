"""Splits text into words, sentences, paragraphs and lines for instruction checkers, in linear time."""

from __future__ import annotations

import re
import string
import unicodedata

BARE = str.maketrans("", "", string.punctuation)
EDGES = string.punctuation + " “”‘’…"


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


ABBREVIATIONS = word_set(
    "mr mrs ms dr prof st jr sr inc ltd co corp vs etc e.g i.e ph.d no fig al capt gen sen rep u.s a.m p.m"
)
STOP_WORDS = word_set(
    """a about above after again against ain all am an and any are aren as at be because been before being below between
    both but by can couldn d did didn do does doesn doing don down during each few for from further had hadn has hasn
    have haven having he her here hers herself him himself his how i if in into is isn it its itself just ll m ma me
    mightn more most mustn my myself needn no nor not now o of off on once only or other our ours ourselves out over own
    re s same shan she should shouldn so some such t than that the their theirs them themselves then there these they
    this those through to too under until up ve very was wasn we were weren what when where which while who whom why
    will with won wouldn y you your yours yourself yourselves"""
)

_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]*]*+(?=\s|$)")
_SYLLABLE = re.compile(r"[aeiouy]+")
_EMOJI = re.compile("[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u2300-\u23ff\u203c\u2049]")
_WITH_EMOJI = "\ufe0f\u200d\u20e3"


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def bare_words(text: str) -> list[str]:
    """Words between white space, with all punctuation removed; a word of punctuation only is dropped."""
    return text.translate(BARE).split()


def edged_words(text: str) -> list[str]:
    """Words between white space, with surrounding punctuation removed."""
    return [word for word in (part.strip(EDGES) for part in text.split()) if word]


def sentences(text: str) -> list[str]:
    """Sentences with their final marks; line ends count as blanks, and text without a final mark is a sentence too.

    >>> sentences('Dr. Li paid 3.5 dollars. "Why?" Nobody knows')
    ['Dr. Li paid 3.5 dollars.', '"Why?"', 'Nobody knows']
    """
    parts, begin, last = [], 0, len(text.rstrip())
    for end in _END.finditer(text):
        if end[0] == "." and _is_abbreviation(text, end.start()) and end.end() < last:
            continue
        parts.append(text[begin : end.end()])
        begin = end.end()
    parts.append(text[begin:])
    return [" ".join(part.split()) for part in parts if part.strip()]


def _is_abbreviation(text: str, dot: int) -> bool:
    word = text[max(0, dot - 12) : dot].split()
    last = word[-1].lstrip("(\"'“‘") if word and not text[dot - 1].isspace() else ""
    return last.lower() in ABBREVIATIONS or (len(last) == 1 and last.isupper() and last != "I")


def paragraphs(text: str) -> list[str]:
    """Paragraphs, separated by blank lines."""
    return [part.strip() for part in re.split(r"\n[ \t]*\n", text) if part.strip()]


def lines(text: str) -> list[str]:
    """Lines that are not blank."""
    return [line for line in text.split("\n") if line.strip()]


def syllables(word: str) -> int:
    """Estimated number of syllables of an English word, by its vowel groups; at least 1.

    >>> [syllables(word) for word in ("cat", "table", "make", "reading", "beautiful")]
    [1, 2, 1, 2, 3]
    """
    word = word.lower()
    count = len(_SYLLABLE.findall(word))
    silent = word.endswith("e") and not word.endswith(("le", "ee", "ye")) and count > 1
    return max(1, count - silent)


def is_emoji(text: str) -> bool:
    return _EMOJI.match(text) is not None


def leading_emoji(text: str) -> int:
    """Number of leading characters that are emoji or blanks; 0 without an emoji."""
    at = 0
    while at < len(text) and (is_emoji(text[at]) or text[at] in _WITH_EMOJI + " "):
        at += 1
    return at if text[:at].strip() else 0


def ends_in_emoji(text: str) -> bool:
    """Whether the last character that is neither punctuation nor blank is an emoji."""
    stripped = text.rstrip(string.punctuation + string.whitespace + _WITH_EMOJI)
    return bool(stripped) and is_emoji(stripped[-1])


def plain_ascii(text: str) -> str:
    """Letters without their accents; characters without an ASCII form are dropped."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
