"""Finds the letters of choices that a text states, in several languages and spellings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_lowercase, ascii_uppercase

from slimectl.rewards.base import Span
from slimectl.rewards.extraction import find_boxed

Found = Iterator[tuple[str, Span]]
"""(letter, its place). The letter is "" if there are several, which means no answer."""

_TABLE: dict[int, int | str | None] = {
    **{code + 0xFEE0: chr(code) for code in range(0x21, 0x7F)},  # full-width forms
    **{0x24B6 + at: letter for at, letter in enumerate(ascii_uppercase + ascii_lowercase)},  # in circles
    **str.maketrans("“”„«»「」『』‘’‚【】\u3000\xa0、，", '"""""""""\'\'\'[]  ,,'),
}
"""Replaces single characters by single characters, so that positions in the text stay the same."""

_WORD = r"[0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u052f\u1e00-\u1fff]"
"""Characters that form a word with a Latin letter: Latin, Greek and Cyrillic, but not Han, kana and Hangul."""

_START = rf"(?<!{_WORD})(?<!{_WORD}')(?<!_)"
_IN_FORMULA = (
    r"-[A-Za-z0-9]|#|\([A-Za-z0-9][,)]|"
    r"\s{0,3}(?:[=^>≤≥≈≠+×·±/∪∩∧∨⊕⊂⊆∈]|<(?!/)|\|\s?[A-Za-z]|_[0-9A-Za-z{\\]|\\(?!text|q?quad|math)[A-Za-z])"
)
_END = rf"(?!{_WORD}|'{_WORD}|{_IN_FORMULA})"
_FONT = r"\\(?:(?:text(?:bf|rm|sf|it)?|math(?:rm|bf|sf|it)|boldsymbol)\s?\{|(?:bf|rm|sf|it|[lL]arge|displaystyle)\s)"
_MARK = rf"(?:[*_$\s\"'`]|{_FONT}|\\[(\[]|<[a-z]{{1,8}}>){{0,8}}"
_PRONOUN = r"(?!I\s+[a-z])"
_BRACKETED = r"(?:\(\s?([A-Za-z])\s?\)|\[\s?([A-Za-z])\s?\])"
_LETTER = rf"(?:{_BRACKETED}|{_PRONOUN}([A-Z]){_END})"
_LOWER = rf"(?:([b-hj-z]){_END}|([ai]){_END}(?=\s*(?:$|[\n.,;:!?)\]*\"'])))"

_ASCII_NOUNS = ("answer", "option", "choice", "respuesta", "antwort", "risposta", "resposta", "antwoord", "jawaban",
                "svar", "cevap", "reponse", "opcion")  # fmt: skip
_NOUN = (
    rf"(?<!{_WORD})(?:{'|'.join(_ASCII_NOUNS)}|réponse|opción|ответ|đáp án|odpowiedź|उत्तर|الإجابة|الجواب)|"
    "答案|答え|解答|正解|正答|정답|답"
)
_ADJECTIVE = r"\s{1,3}(?:corre(?:ct[ae]?|t[ao]|tt[ao])|final[e]?|الصحيحة)"
_COPULA = (
    r"(?:is|(?:would|must|should|will|can only|has to|(?:appears|seems) to) be|es|est|ist|lautet|adalah|er|là|هي|هو)\b|"
    r"[:=|èé—–→-]|是|应为|應為|应该是|為|为|选|は|은|는|이"
)
_TO = r"\s(?:to|for|of|here|then)\b[^.\n:=]{0,40}?(?=\s)"
_ADVERB = r"\s(?:therefore|thus|then|indeed|clearly|definitely|actually|simply|just|likely|most likely|probably)"
_LEAD_IN = (
    rf"(?i:(?:{_NOUN})(?:{_ADJECTIVE}|{_TO})?[*_]{{0,3}}\s{{0,8}}(?:{_COPULA})(?:{_ADVERB})?[*_]{{0,3}}\s{{0,8}}:?)"
)
_CHOSEN = r"(?<![不别勿未])[故应應]?(?:选(?!项)择?|選(?!項)擇?)|(?:应该?|應該?)(?:是|为|為)"
_STATED = re.compile(
    rf"(?:{_LEAD_IN}|{_CHOSEN}){_MARK}(?:(?i:option|choice|选项|選項|opción){_MARK})?(?:{_LETTER}|{_LOWER})"
)
_IT_IS = re.compile(
    rf"\b[Ii]t(?:'s|\s(?:is|must\sbe|should\sbe|has\sto\sbe))\s{_MARK}(?:(?i:option|choice)\s)?{_LETTER}"
    r"(?=[)\]*_\"'$}\s]*(?:[.!。]|\n|$))"
)
_STATED_TEXT = re.compile(rf"{_LEAD_IN}{_MARK}([^\n]{{1,300}})")
_RIGHT = re.compile(
    rf"(?=[A-Z(\[]){_START}(?<!\b[Ii]f\s){_LETTER}{_MARK}(?:(?i:is|must\s+be|seems|looks)\s{{1,8}}(?i:the\s)?"
    r"(?i:right|correct|true|best|answer|closest|one|only)\b|[.:)]?\s?[✓✔✅☑]|"
    r"(?:选项|選項|[项項])?(?:是)?正[确確]|[がは]正し|[이가]\s?(?:맞|정답|옳))"
)
_BOLD = re.compile(rf"\*\*\s?(?:(?i:option|choice)\s)?{_LETTER}[^*\n]{{0,200}}\*\*")
_LINE = re.compile(
    rf"^(?:[-*+>]\s|\d{{1,2}}[.)]\s)?[*_ \t\"'`#]{{0,8}}(?:(?i:option|choice)\s)?"
    rf"(?:{_BRACKETED}(?!\?)|([A-Za-z])(?:[.):]|(?=[*_ \t\"'`]*$)))[*_ \t\"'`.]*(?:$|(?P<rest>.+)$)",
    re.MULTILINE,
)
_PARENTHESISED = re.compile(rf"(?<!{_WORD})\(([A-Z])\)")
_NAMERS = (
    "option|choice|letter|only|mak(?:es|ing)|opción|opção|opzione|réponse|variante|вариант|alternativa|letra|đúng|chọn|"
    + "|".join(_ASCII_NOUNS[3:])
)
"""Words after which a letter is always a choice."""

_LEADS = (
    r"is|are|was|were|(?:would|must|should|will|to) be|it's|and|or|but|not|than|with|for|as|by|so|thus|hence|therefore|"
    r"then|think|believe|guess|say|chose|remains|leaving|answer|(?:probab|definite|clear|like|sure|certain|simp)ly|course|"
    r"(?:correspond|lead|point)s?\sto|(?:choos|tak)(?:e|es|ing)|"
    r"(?:pick|select|leave|mean|give|indicate|yield|match|suggest|favou?r|prefer|support)(?:s|es|ing)?|"
    r"es|est|ist|è|é|la|donc|daher|also|somit|quindi|luego|portanto|adalah|là|er|är|án|[A-Z]"
)
"""Words after which a letter is a choice, unless the text after it makes it a name."""

_BEFORE = re.compile(
    rf"(?:^|[.,:;!?)\]\"'*>=•—–]|(?<![A-Z]\s)[→⇒]|(?<!{_WORD})(?<!\])[(\[]|\s-|[\u0590-\u1dff\u25a0-\U0010ffff]|"
    rf"(?<![\w\\])(?:(?P<named>(?i:{_NAMERS}))|(?i:{_LEADS})))"
    rf"(?:[\s*_$\"'`]|(?<!{_WORD})(?<!\])[(\[]|{_FONT}|\\[(\[]|\\boxed\{{)*$"
)
_AFTER = re.compile(
    r"[*_\"'$}`]*(?:\s*(?:$|[\n.,:;!?()\]—–]|\\[)\]]|-\s|</)|\s?[\u0590-\u1dff\u2600-\U0010ffff]|"
    r"\s(?:because|since|as|which|for|and|or|it\sis|here|with|due|are|were|seems|fits|works|remains|must|I)\b)"
)
_STANDALONE = re.compile(rf"(?=[A-Z]){_START}(?<![=+/^\\])(?<![=+/^\\<>]\s)(?<!\d\s){_PRONOUN}([A-Z]){_END}")
_IN_BOX = re.compile(
    rf"(?:{_FONT}|[\s{{$*]|(?i:option|choice|选项))*(?:{_BRACKETED}|([A-Za-z]){_END}"
    r"(?=[\s}$*]*(?:$|[.):,&;(~-]|\\(?:text|q?quad|[ ,;:!)])|and\b|or\b)))"
)

_NO = (
    r"(?:(?:not|never|unlikely)(?:\s+to)?(?:\s+be)?|nor|than|neither|except|cannot\s+be|anything\s+but|"
    r"rul(?:e|es|ed|ing)\s+out|(?:eliminat|exclud|reject|discard|dismiss)(?:e|es|ed|ing|s)?|"
    r"pas|nicht|no\s+es|non\s+è|não\s+é|не|nie|bukan|không\s+phải|değil|ليست?)"
)
_NEGATED = re.compile(
    rf"(?:\b{_NO}|n't(?:\s+be)?|不是|而非|并非|排除|[不别]选|[不別]選)\s*(?:l[ae]\s+)?(?:(?:options?|choices?)\s+|选项|選項)?"
    r"(?:[(*]{0,3}[A-Z][)*]{0,3}\s*[,、]\s*){0,4}(?:[(*]{0,3}[A-Z][)*]{0,3}\s*(?:[,、]\s*)?(?:or|and|nor)\s+)?"
    r"[(*]{0,3}\s?$",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"[)\]*_\"']{0,4}\s*(?:选项|選項|[项項])?(?:"
    r"(?:is|are|was|were|can\s+be)\s+(?:wrong|incorrect|false|not|(?:ruled\s+)?out|eliminated|excluded|rejected|"
    r"unlikely|impossible)\b|(?:(?:is|was|does|ca)n't|does\s+not|cannot|fails?)\b|[✗✘❌×]|невер|خطأ|गलत|नहीं|"
    r"错|錯|不|有[误誤]|被?排除|は(?:誤|間違|正しくな|不)|では(?:な|あり)|じゃな|[은는]\s?(?:틀|오답)|[이가은는]\s?아[니닙])"
)
_CLOSERS = r"[)\]*_\"'$}]{0,4}\s*"
_OPENERS = r"\s*(?:(?i:option|choice)\s)?(?:[(\[*_\"'${]|\\text\{){0,4}"
_AND = r"(?:\\text\s?\{\s*)?(?:\b(?i:and|or|y|et|und|oder|ou|e|o)\b|[&/+和或与與とや및와과])(?:\s*\})?"
_VERB = r"(?!\s+(?:is|are|was|were|has|have|can|cannot|could|would|does|must|may|seems|looks|fails|gives)\b)"
_MORE = re.compile(
    rf"{_CLOSERS}(?:(?:,\s*)?{_AND}{_OPENERS}[A-Z](?!{_WORD}|'{_WORD}){_VERB}|"
    rf",{_OPENERS}[A-Z](?!{_WORD}|'{_WORD})(?=[)\]*_\"'$}}\s]*(?:$|[\n.,;:!?。\u3040-\u30ff\uac00-\ud7af]|{_AND})))"
)
_MORE_BEFORE = re.compile(rf"(?<!{_WORD})[A-Z]{_CLOSERS}(?:,|(?:,\s*)?{_AND}){_OPENERS}$")


def plain(text: str) -> str:
    """Write full-width and circled letters, quotation marks and brackets in ASCII, at the same positions."""
    return text if text.isascii() else text.translate(_TABLE)


def stated(text: str) -> list[tuple[str, Span]]:
    """Letters in a statement or in the last box."""
    return [*_letters(_STATED, text, _first_noun(text)), *_letters(_IT_IS, text), *_boxed(text)]


def stated_texts(text: str) -> list[Span]:
    """Texts after "the answer is", up to the end of the line."""
    return [Span(match[1], match.start(1)) for match in _STATED_TEXT.finditer(text, _first_noun(text))]


def said_to_be_right(text: str) -> Found:
    """Letters that the text calls right."""
    return _letters(_RIGHT, text)


def bold(text: str) -> Found:
    """Letters with which a bold passage begins."""
    items = _items(text)
    last = text.rstrip().rfind("\n") + 1
    listed = [match for match in items if match.start() < last] or items
    return _without_items(_letters(_BOLD, text), listed)


def parenthesised(text: str) -> Found:
    """Capitals in parentheses."""
    return _without_items(_letters(_PARENTHESISED, text), _items(text))


def standalone(text: str) -> Found:
    """Capitals where a sentence can state its choice, without names (vitamin C), units and parts of a formula."""
    letters = _without_items(_letters(_STANDALONE, text), _items(text))
    return (pair for pair in letters if _is_choice(text, *pair[1].span))


def begins_line(text: str) -> Found:
    """A letter on its own line, else the letter of a line such as "b. 4". None if several letters start lines."""
    lines = [match for match in _LINE.finditer(text) if match["rest"] is None] or _items(text)
    if len(set(map(_begun_with, lines))) != 1:
        return
    match = lines[-1]
    start, end = match.span(_group(match))
    if not _PARENTHESISED.search(match["rest"] or "") and not _is_refused(text, start, end):
        yield _letter(text, match), Span(text[start:end], start)


def _items(text: str) -> list[re.Match[str]]:
    """The lines that start with a letter like an item of a list."""
    return [match for match in _LINE.finditer(text) if match["rest"] is not None]


def _begun_with(line: re.Match[str]) -> str:
    return line[_group(line)].upper()


def _without_items(letters: Found, items: list[re.Match[str]]) -> Found:
    """Drop the letters that start list items, because those are the choices and not an answer."""
    starts = {match.start(_group(match)) for match in items}
    several = len(set(map(_begun_with, items))) > 1
    return (pair for pair in letters if not several or pair[1].start not in starts)


def _is_choice(text: str, start: int, end: int) -> bool:
    """Whether the text around the letter at this place fits a choice, and not only a name."""
    before = _BEFORE.search(text, max(0, start - 40), start)
    return before is not None and (before["named"] is not None or _AFTER.match(text, end) is not None)


def _boxed(text: str) -> Found:
    """The letter in the last box, on its own or with the text of its choice."""
    boxed = find_boxed(text)
    match = _IN_BOX.match(boxed.text) if boxed else None
    if boxed and match:
        group = _group(match)
        yield _letter(boxed.text, match), Span(match[group], boxed.start + match.start(group))


def _first_noun(text: str) -> int:
    """Return the position of the first noun for an answer, or the end of the text, to start the search there."""
    if not text.isascii():
        return 0
    lower = text.lower()
    return min((at for noun in _ASCII_NOUNS if (at := lower.find(noun)) >= 0), default=len(text))


def _letters(pattern: re.Pattern[str], text: str, start: int = 0) -> Found:
    for match in pattern.finditer(text, start):
        group = _group(match)
        if not _is_refused(text, *match.span(group)):
            yield _letter(text, match), Span(match[group], match.start(group))


def _is_refused(text: str, start: int, end: int) -> bool:
    """Whether the text rejects the letter at this place."""
    return bool(_NEGATED.search(text, max(0, start - 40), start) or _WRONG.match(text, end))


def _group(match: re.Match[str]) -> int:
    """Return the group of a match with the letter: the first group that is not empty."""
    return next(number for number, text in enumerate(match.groups(), start=1) if text is not None)


def _letter(text: str, match: re.Match[str]) -> str:
    """The letter of a match in upper case, or "" if it is one of several, as in "A and C"."""
    group = _group(match)
    start, end = match.span(group)
    if _MORE.match(text, end) or _MORE_BEFORE.search(text, max(0, start - 24), start):
        return ""
    return match[group].upper()
