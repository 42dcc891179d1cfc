"""Splits text into words, sentences, paragraphs and lines for instruction checkers, in linear time."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

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


def words_without_punctuation(text: str) -> list[str]:
    """Words between white space, with all punctuation removed. Words of only punctuation are dropped."""
    return text.translate(BARE).split()


def stripped_words(text: str) -> list[str]:
    """Words between white space, with surrounding punctuation removed."""
    return [word for word in (part.strip(EDGES) for part in text.split()) if word]


def sentences(text: str) -> list[str]:
    """Sentences with their final marks. Line ends count as blanks. Text without a final mark is also a sentence.

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


def lines(text: str) -> list[str]:
    """Lines that are not blank."""
    return [line for line in text.split("\n") if line.strip()]


def syllables(word: str) -> int:
    """Estimate the number of syllables of an English word by its vowel groups. At least 1.

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
    """Number of leading characters that are emoji or blanks, or 0 without an emoji."""
    at = 0
    while at < len(text) and (is_emoji(text[at]) or text[at] in _WITH_EMOJI + " "):
        at += 1
    return at if text[:at].strip() else 0


def ends_in_emoji(text: str) -> bool:
    """Whether the last character that is neither punctuation nor blank is an emoji."""
    stripped = text.rstrip(string.punctuation + string.whitespace + _WITH_EMOJI)
    return bool(stripped) and is_emoji(stripped[-1])


def plain_ascii(text: str) -> str:
    """Remove the accents of letters, and drop characters without an ASCII form."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


SCRIPTS = {
    "HANGUL": ("ko",), "HIRAGANA": ("ja",), "KATAKANA": ("ja",), "CJK": ("zh", "ja"), "THAI": ("th",),
    "HEBREW": ("he",), "GREEK": ("el",), "BENGALI": ("bn",), "GUJARATI": ("gu",), "GURMUKHI": ("pa",),
    "KANNADA": ("kn",), "TAMIL": ("ta",), "TELUGU": ("te",), "MALAYALAM": ("ml",), "DEVANAGARI": ("hi", "mr", "ne"),
    "ARABIC": ("ar", "fa", "ur"), "CYRILLIC": ("ru", "uk", "bg"),
    "LATIN": ("en", "de", "fr", "es", "it", "pt", "nl", "fi", "sv", "da", "pl", "tr", "vi", "sw", "id", "ro", "cs"),
}  # fmt: skip
"""Languages of a script, most likely first."""

COMMON = {
    "en": "the and of to in is that it for you with as was on are be this have from or by not but what all we an they",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für im dem es wie auch sie ich wir oder aber",
    "fr": "le la les et est des une un que pour dans qui pas sur avec ce il elle nous vous du au ne sont mais ou",
    "es": "el la los las y es de que en un una por para con no se del al lo como más pero su sus esta este o",
    "it": "il lo la gli e è di che un una per con non si del della sono come più ma anche questo nel alla le",
    "pt": "o a os as e é de que um uma por para com não se do da em no na mais mas como são você ao dos das",
    "nl": "de het een en is van dat niet op te met voor zijn aan er ook maar naar om ik je we als bij",
    "fi": "ja on ei se että oli ovat mutta kun niin hän tai myös kuin joka ne voi minä sinä me ole tämä",
    "sv": "och att det är en ett som på för med av inte den till har om var jag du vi men eller så",
    "da": "og at det er en et som på for med af ikke den til har om var jeg du vi men eller så der",
    "pl": "i w na nie się jest to że z do co jak ale po od dla czy tak jego tylko są by ja ty",
    "tr": "ve bir bu da de için ile çok ne daha ama gibi ben sen o var yok olan olarak kadar en mi",
    "vi": "và của là có không được cho một các trong người với này đã những để khi tôi bạn đó cũng như",
    "sw": "na ya wa ni kwa katika za la kuwa hii si yake hiyo watu kama lakini cha vya pia mimi wewe yangu",
    "id": "dan yang di ini itu dengan untuk tidak dari dalam akan pada juga adalah ke karena saya kamu kami atau",
    "ro": "și de la în nu un o este cu pe că mai din care pentru sunt ce a fi dar sau eu",
    "cs": "a je se na to že v ne s z do jsem jako ale za pro by jak tak si o jsou nebo i",
    "hi": "है हैं के की का में और से को पर नहीं यह एक था ने भी कि हो",
    "mr": "आहे आहेत आणि च्या मध्ये नाही हे ते एक या होते मी तो ही करून आपण",
    "ne": "छ छन् र को मा हो लाई गर्न भएको पनि यो एक हुन् गरेको तपाईं",
    "ar": "في من على أن إلى هذا هذه التي الذي مع عن هو هي كان لا ما أو و",
    "fa": "و در به از که این را با است برای آن یک می هم تا شما های ها",
    "ur": "اور کے کی کا میں ہے سے کو پر نے ہیں یہ وہ ایک کہ نہیں تھا",
    "ru": "и в не на что я с он как это по но из у за так же от для был мы вы или",
    "uk": "і в не на що я з він як це по але із у за так та від для був ми ви є",
    "bg": "и на в се да не от за с по че е са като това но или си към ще аз ние",
}
_COMMON = {language: frozenset(common.split()) for language, common in COMMON.items()}

MOST_LETTERS = 20_000
"""Characters at the start of a text that are examined. Far fewer identify a language."""


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of the text's dominant language, or None if it has no letters.

    >>> language_of("Das ist nicht der Weg"), language_of("これは何ですか"), language_of("42")
    ('de', 'ja', None)
    """
    text = text[:MOST_LETTERS].lower()
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts["CJK"] > 0:
        return "ja"
    candidates = SCRIPTS.get(scripts.most_common(1)[0][0])
    if candidates is None or len(candidates) == 1:
        return candidates and candidates[0]
    # Not \w+: the vowel signs of Indian scripts are marks, not letters.
    counts = Counter(re.findall(r"[^\s\d.,;:!?\"'()\[\]{}*#।؟،“”«»-]+", text))
    scores = {language: sum(counts[word] for word in _COMMON.get(language, ())) for language in candidates}
    return max(candidates, key=lambda language: scores[language])


def _script(letter: str) -> str:
    return "LATIN" if letter < "\u024f" else unicodedata.name(letter, "").partition(" ")[0]
