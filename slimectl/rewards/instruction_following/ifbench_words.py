"""IFBench's instructions about words, sentences and counts."""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import pairwise

from slimectl.rewards.instruction_following.base import Checks
from slimectl.rewards.instruction_following.text import (
    BARE,
    STOP_WORDS,
    lines,
    sentences,
    stripped_words,
    syllables,
    word_set,
    words,
    words_without_punctuation,
)

CONJUNCTIONS = word_set("and but for nor or so yet")
NAMES = word_set(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)
"""The names that the benchmark's prompts list."""

PRONOUNS = word_set(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves this that these those who whom whose which what whoever "
    "whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing somebody someone "
    "something each either neither both all some any none"
)
"""Personal, possessive, reflexive, demonstrative, interrogative, relative, indefinite: IFBench's current list."""

VERBS = word_set(
    """accept add adjust allow answer apply arrange ask avoid be become begin believe bring build buy calculate call
    change check choose clean close collect combine come compare complete consider continue convert cook create cut
    define describe design determine develop discover discuss do draw drive eat embrace enjoy ensure enter evaluate
    examine explain explore fill find finish focus follow gather get give go grow have hear help hold identify imagine
    implement improve include increase install introduce keep know learn leave let listen live look make manage measure
    meet mix move note notice open organize pay plan play prepare press provide pull push put read recall remember
    remove repeat replace run say search see select send serve set share show sit solve speak start stay stop study
    submit summarize take talk teach tell test think travel treat try turn understand update use visit wait walk watch
    work write"""
)
_IRREGULAR = word_set("am is are was were been has had does did done went gone made took taken saw seen knew known")
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_CLUSTER = re.compile("[bcdfghjklmnpqrstvwxyz]{2}")


def word_count_range(text: str, min_words: float, max_words: float) -> bool:
    return min_words <= len(words(text)) <= max_words


def unique_word_count(text: str, N: float) -> bool:
    return len({word.lower() for word in stripped_words(text)}) >= N


def stop_words(text: str, percentage: float) -> bool:
    tokens = words(text)
    return bool(tokens) and sum(word.lower() in STOP_WORDS for word in tokens) * 100 <= percentage * len(tokens)


def sentence_type(text: str) -> bool:
    statements, questions, _ = _counts_by_mark(text)
    return statements == 2 * questions


def sentence_balance(text: str) -> bool:
    return len(set(_counts_by_mark(text))) == 1


def _counts_by_mark(text: str) -> tuple[int, int, int]:
    """Return the numbers of sentences with a period, a question mark and an exclamation mark at the end."""
    ends = Counter(sentence.rstrip("\"'”’)]* ")[-1:] for sentence in sentences(text))
    return ends["."], ends["?"], ends["!"]


def conjunctions(text: str, small_n: float) -> bool:
    return len(CONJUNCTIONS & {word.lower() for word in stripped_words(text)}) >= small_n


def person_names(text: str, N: float) -> bool:
    return sum(name in text for name in NAMES) >= N


def overlap(text: str, reference_text: str, percentage: float) -> bool:
    """`percentage` of the text's character trigrams occur in the reference, within 2 points."""
    trigrams, reference_trigrams = ({side[i : i + 3] for i in range(len(side) - 2)} for side in (text, reference_text))
    return bool(trigrams) and abs(100 * len(trigrams & reference_trigrams) / len(trigrams) - percentage) <= 2


def numbers(text: str, N: float) -> bool:
    return len(re.findall(r"\d+", text.translate(BARE))) == N


def alphabet(text: str) -> bool:
    firsts = [word[0].lower() for word in words_without_punctuation(text)]
    if not firsts or not all(letter in string.ascii_lowercase for letter in firsts):
        return False
    return all((ord(b) - ord(a)) % 26 == 1 for a, b in pairwise(firsts))


def vowel(text: str) -> bool:
    return "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3


def consonants(text: str) -> bool:
    return all(_CLUSTER.search(word) for word in text.lower().split())


def alliteration_increment(text: str) -> bool:
    """The number of alliterating words grows from sentence to sentence."""
    counts = []
    for sentence in sentences(text):
        firsts = [word[0].lower() for word in stripped_words(sentence)]
        same = [a == b for a, b in pairwise(firsts)]
        counts.append(sum(1 + (i == 0 or not same[i - 1]) for i, is_same in enumerate(same) if is_same))
    return all(a < b for a, b in pairwise(counts))


def palindrome(text: str) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in words_without_punctuation(text.lower())) >= 10


def prime_lengths(text: str) -> bool:
    return all(_is_prime(len(word)) for word in words_without_punctuation(text))


def _is_prime(number: int) -> bool:
    return 1 < number < 1000 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def words_japanese(text: str, N: float) -> bool:
    selected = [word.strip(string.punctuation) for word in text.split()[int(N) - 1 :: int(N)]] if N >= 1 else []
    return all(_JAPANESE.search(word) for word in selected if word and not word.isdigit())


def start_verb(text: str) -> bool:
    """The text starts with a verb, by a list of common verbs and endings. The published checker uses a tagger."""
    first = next(iter(words(text.lower())), "")
    stems = {
        first,
        first.removesuffix("s"),
        first.removesuffix("es"),
        first.removesuffix("ed"),
        first.removesuffix("d"),
    }
    stems |= {first.removesuffix("ing"), first.removesuffix("ing") + "e"} if first.endswith("ing") else set()
    return bool(stems & VERBS) or first in _IRREGULAR or first.endswith(("ize", "ise", "ify"))


def repeats(text: str, small_n: float) -> bool:
    return all(count <= small_n for count in Counter(words_without_punctuation(text.lower())).values())


def keyword(text: str, word: str, N: float) -> bool:
    text_sentences = sentences(text)
    return 1 <= N <= len(text_sentences) and word.lower() in text_sentences[int(N) - 1].lower()


def pronouns(text: str, N: float) -> bool:
    return sum(word in PRONOUNS for word in words_without_punctuation(text.lower().replace("/", " "))) >= N


def odd_even_syllables(text: str) -> bool:
    """Odd and even syllable counts alternate, estimated by vowel groups. The published checker uses a dictionary."""
    odd = [syllables(word) % 2 for word in words_without_punctuation(text.lower())]
    return all(a != b for a, b in pairwise(odd))


def last_first(text: str) -> bool:
    sequences = [tokens for tokens in (stripped_words(sentence.lower()) for sentence in sentences(text)) if tokens]
    return all(a[-1] == b[0] for a, b in pairwise(sequences))


def paragraph_last_first(text: str) -> bool:
    sequences = [stripped_words(line.lower()) for line in lines(text)]
    return all(tokens and tokens[0] == tokens[-1] for tokens in sequences)


def increment(text: str, small_n: float) -> bool:
    counts = [len(words_without_punctuation(sentence)) for sentence in sentences(text)]
    return all(b == a + small_n for a, b in pairwise(counts))


def no_consecutive(text: str) -> bool:
    text_words = words_without_punctuation(text.lower())
    return all(a[0] != b[0] for a, b in pairwise(text_words))


def keywords_multiple(text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    required = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(text.lower().count(word.lower()) == times for word, times in required)


def keywords_specific_position(text: str, keyword: str, n: float, m: float) -> bool:
    text_sentences = sentences(text)
    tokens = _tokens(text_sentences[int(n) - 1]) if 1 <= n <= len(text_sentences) else []
    return 1 <= m <= len(tokens) and tokens[int(m) - 1] == keyword


def words_position(text: str, keyword: str) -> bool:
    """The second and second-to-last words are the keyword. A final mark may count as a word, as published, or not."""
    with_marks = _tokens(text)
    return any(
        len(sequence) > 1 and sequence[1] == sequence[-2] == keyword for sequence in (with_marks, stripped_words(text))
    )


def _tokens(text: str) -> list[str]:
    """Words, and each punctuation mark as a separate token."""
    return re.findall(r"\w+(?:['’-]\w+)*|[^\w\s]", text)


def sentence_words(text: str) -> bool:
    """Three sentences of equal length without a repeated word."""
    parts = sentences(text)
    tokens = words_without_punctuation(text.lower())
    return len(parts) == 3 and len({len(part) for part in parts}) == 1 and len(tokens) == len(set(tokens))


CHECKS: Checks = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_word_count,
    "count:conjunctions": conjunctions,
    "count:person_names": person_names,
    "count:numbers": numbers,
    "count:words_japanese": words_japanese,
    "count:pronouns": pronouns,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:overlap": overlap,
    "ratio:sentence_words": sentence_words,
    "words:alphabet": alphabet,
    "words:vowel": vowel,
    "words:consonants": consonants,
    "words:palindrome": palindrome,
    "words:prime_lengths": prime_lengths,
    "words:start_verb": start_verb,
    "words:repeats": repeats,
    "words:odd_even_syllables": odd_even_syllables,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": no_consecutive,
    "words:keywords_specific_position": keywords_specific_position,
    "words:words_position": words_position,
    "sentence:alliteration_increment": alliteration_increment,
    "sentence:keyword": keyword,
    "sentence:increment": increment,
}
