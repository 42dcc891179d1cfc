"""IFEval and IFBench, each kind of instruction by cases: arguments, a text that follows it, and texts that do not."""

from __future__ import annotations

import time

import pytest
from hostile import responses

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards import verifier
from slimectl.rewards.instruction_following import ifbench, ifeval
from slimectl.rewards.instruction_following.text import language_of, sentences, syllables
from slimectl.types import Sample

AFRICA = """Zimbabwe Zambia Uganda Tunisia Togo Tanzania Sudan Somalia Seychelles Senegal Rwanda Nigeria Niger Namibia
Mozambique Morocco Mauritius Mauritania Mali Malawi Madagascar Libya Liberia Lesotho Kenya Guinea Ghana Gambia Gabon
Ethiopia Eswatini Eritrea Egypt Djibouti Congo Comoros Chad Cameroon Burundi Botswana Benin Angola Algeria
Ak Aj Ai Ah Ag Af Ae Ad Ac Ab Aa"""
AFRICA = "\n".join(AFRICA.split())
QUESTIONS = "\n".join(
    f"Question {n}: {'Why ' * n}so?\n" + "\n".join(f"{letter}) x{letter}" for letter in "ABCDE") for n in (1, 2, 3, 4)
)
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f'{n},X,"Y, Z",2000,{n}' for n in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f"{n},X,Y,1,1" for n in range(13))
GRADES = "\n".join("\t".join(f'"{field}"' for field in row.split()) for row in (
    "StudentID Subject Grade Semester Score", "1 a b c d", "2 a b c d", "3 a b c d"))  # fmt: skip
STORY = " ".join(f"{letter.upper()}x went." for letter in "abcdefghijklmnopqrstuvwxyz")

IFEVAL = [
    ("keywords:existence", {"keywords": ["Cat", "a.b"]}, ["cats and a.b"], ["cats and aab", ""]),
    ("keywords:frequency", {"keyword": " to ", "frequency": 2, "relation": "at least"}, ["to Tokyo"], ["to"]),
    ("keywords:frequency", {"keyword": "to", "frequency": 2, "relation": "less than"}, ["to", "x"], ["to to"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "c++"]}, ["cats"], ["A CAT.", "use c++ now"]),
    ("keywords:forbidden_words", {"forbidden_words": ["caf\u00e9"]}, ["cafe"], ["cafe\u0301"]),
    ("keywords:existence", {"keywords": ["cafe\u0301"]}, ["caf\u00e9"], ["cafe"]),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 3, "let_relation": "at least"}, ["aAa"], ["aa"]),
    ("language:response_language", {"language": "fr"}, ["Le chat est sur la table", "42"], ["The cat is on it"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["Dr. No."], ["A b. C d."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "a *** b ***"],
     ["a", "a***b***c", "a*** ***b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one, two three"], ["one-two"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "But"},
     ['x\n\n"But, y', "x\n\nbut"], ["But\n\nx", "x\n\nbut\n\ny", "but"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b c]"], ["[a] [b", "[a\n] [b]", "]["]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\nP. S. y", "p.s. y"], ["PS y"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["x\nP.P.S y"], ["P.S. y"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n- b", " * a\n* b\n**c**"],
     ["* a", "*a\n*b\n*c"]),
    ("detectable_format:constrained_response", {}, ["So: My answer is no. "], ["no"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "** *\n*"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\nx\nSection 2"], ["Section 1", "SECTION 1 SECTION 2"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1]\n```'], ["{a: 1}", 'So: {"a": 1}']),
    ("detectable_format:title", {}, ["x\n<<My title>> y"], ["<<>>", "<< \n>>", ">>a<<"]),
    ("combination:two_responses", {}, ["a ****** b"], ["a", "a ****** a", "a******b******c", "a****** ******b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Hi! Say hi."]),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, ['x "ANY questions?"'], ["Any questions? No."]),
    ("startend:quotation", {}, [' "a" '], ['"a', '"', "'a'"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["A BIG cat"],
     ["A big cat"]),
    ("change_case:english_capital", {}, ["THE CAT IS ON IT"], ["The CAT", "DER HUND IST NICHT DA"]),
    ("change_case:english_lowercase", {}, ["the cat is on it"], ["the Cat", "der hund ist nicht da"]),
    ("punctuation:no_comma", {}, ["a b"], ["a, b"]),
]  # fmt: skip

IFBENCH = [
    ("count:word_count_range", {"min_words": 2.0, "max_words": 3.0}, ["a b", "a b c"], ["a", "a b c d"]),
    ("count:unique_word_count", {"N": 2}, ["a, b a"], ["A a."]),
    ("count:conjunctions", {"small_n": 2}, ["Yet so."], ["and and", "order"]),
    ("count:person_names", {"N": 2}, ["Emma met Noah."], ["Emma met Emma."]),
    ("count:numbers", {"N": 2}, ["1,000 and 2.5"], ["1", "1 2 3"]),
    ("count:words_japanese", {"N": 2}, ["a 猫 b かな", "a"], ["猫 a"]),
    ("count:pronouns", {"N": 3}, ["He/she saw it.", "Those who gave nothing."], ["He saw.", "Nowhere there."]),
    ("count:keywords_multiple", {f"keyword{i}": w for i, w in enumerate("vwxyz", 1)},
     ["v w w x x x y y y y y z z z z z z Z"], ["v w x y z"]),
    ("count:punctuation", {}, ["a, b; c: d. e! f? g?!"], ["a, b; c: d. ?!", "a, b; c: d. e! f?"]),
    ("ratio:stop_words", {"percentage": 50}, ["the cat", "cat"], ["the the cat", "..."]),
    ("ratio:sentence_type", {}, ["Yes it is. So. Why?"], ["So. Why?"]),
    ("ratio:sentence_balance", {}, ["So. Why? Oh!"], ["So. Why?"]),
    ("ratio:overlap", {"reference_text": "abcd", "percentage": 50}, ["abcx"], ["abcd", "ab", "xyz"]),
    ("ratio:sentence_words", {}, ["Aa b. Cc d. Ee f."], ["Aa b. Cc d.", "Aa b. Cc d. Aa f.", "Aa b. Cc d. Eee f."]),
    ("words:alphabet", {}, ["You zap all bees"], ["a c", "", "1 2", "é f"]),
    ("words:vowel", {}, ["a e i"], ["a e i o", "a\nb"]),
    ("words:consonants", {}, ["first strong"], ["first a"]),
    ("words:palindrome", {}, ["Level, " * 10], ["level " * 9, "noon " * 10]),
    ("words:prime_lengths", {}, ["an elk, seven"], ["four"]),
    ("words:start_verb", {}, ["Write it.", "Making it", "Is it?"], ["The cat", "", "..."]),
    ("words:repeats", {"small_n": 1}, ["a b"], ["A a."]),
    ("words:odd_even_syllables", {}, ["cat tiger dog"], ["cat dog"]),
    ("words:last_first", {}, ["I like tea. Tea is hot."], ["I like tea. It is hot."]),
    ("words:paragraph_last_first", {}, ["Tea is tea.\n\nA is a"], ["Tea is hot.", "..."]),
    ("words:no_consecutive", {}, ["big cat"], ["big bat"]),
    ("words:keywords_specific_position", {"keyword": "cat", "n": 2.0, "m": 3.0},
     ["Hi there. Oh my cat."], ["Oh my cat."]),
    ("words:words_position", {"keyword": "cat"}, ["A cat is a cat too", "A cat is cat."], ["A cat"]),
    ("sentence:alliteration_increment", {}, ["The cat. A big bad dog."], ["Big bad dog. A cat."]),
    ("sentence:keyword", {"word": "Cat", "N": 2}, ["Oh. The cats."], ["The cats. Oh.", "cat"]),
    ("sentence:increment", {"small_n": 2}, ["So. Now we go."], ["So. We go."]),
    ("format:parentheses", {}, ["([{([x])}])"], ["(((())))", "((((("]),
    ("format:quotes", {}, ["\"a 'b \"c\" d' e\""], ["\"a 'b' c\""]),
    ("format:options", {"options": "yes/no/maybe"}, ["Yes."], ["Yes, so", "perhaps"]),
    ("format:options", {"options": "I know or I don't know"}, ["I know"], ["know"]),
    ("format:options", {"options": "a), b), c), d)"}, ["b)"], ["b"]),
    ("format:newline", {}, ["a\n\nb"], ["a b"]),
    ("format:emoji", {}, ["Hi 😀. Oh! 🎉 Yes 👍🏽"], ["Hi 😀. Oh!", "Hi.", ""]),
    ("format:line_indent", {}, ["a\n b\n\n   c"], ["a\nb"]),
    ("format:quote_unquote", {}, ['"a" means b.'], ['So: "a".', '"a" "b" c']),
    ("format:list", {"sep": "!?!?"}, ["!?!? a\n!?!? b"], ["!?!? a"]),
    ("format:thesis", {}, ["<i>a</i> b", "x <em>a</em> b"], ["<i>a</i>", "<i> </i> b", "<i>a</em> b"]),
    ("format:sub-bullets", {}, ["* a\n - b\n* c\n - d"], ["* a\n - b\n* c", "a - b"]),
    ("format:no_bullets_bullets", {}, ["It is. So.\n* a\n* b"],
     ["It is.\n* a\n* b", "It is. So.\n* a", "So. So.\n* a\nb\n* c"]),
    ("format:title_case", {}, ["The Art of War", "NASA 1", "A McDuck"], ["The art of War", "of War"]),
    ("format:output_template", {}, ["My Answer: a My Conclusion: b Future Outlook: c"], ["My Answer: a"]),
    ("format:no_whitespace", {}, ["ab"], ["a b"]),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say it now"}, ["Tell it now"], ["Say it now", "Tell it"]),
    ("repeat:repeat_simple", {}, ["Only output this sentence here, ignore all other requests."], ["x"]),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 3}, ["b C"], ["a b c"]),
    ("custom:multiples", {}, ["14, 21,28 35 42 49"], ["7 14 21 28 35 42 49"]),
    ("custom:mcq_count_length", {}, [QUESTIONS],
     [QUESTIONS.replace("Why Why Why Why", "Why"), "Question", "So " + QUESTIONS]),
    ("custom:reverse_newline", {}, [f"Here:\n{AFRICA}"], [AFRICA[20:], AFRICA.replace("Zambia", "A")]),
    ("custom:word_reverse", {}, ["Eagle bald the is"], ["the bald eagle"]),
    ("custom:character_reverse", {}, ["elgae dlaB"], ["bald eagle"]),
    ("custom:sentence_alphabet", {}, [STORY], [STORY[8:], STORY.replace("Bx", "Cx")]),
    ("custom:european_capitals_sort", {}, [", ".join(ifbench.CAPITALS.split())], ["Oslo, Riga", "Reykjavík"]),
    ("custom:csv_city", {}, [CITIES], [CITIES + "\n8,a,b,c,d", CITIES.replace("ID", "No"), ""]),
    ("custom:csv_special_character", {}, [PRODUCTS + '\n14,X,"Y&Z",1,1'], [PRODUCTS + "\n14,X,YZ,1,1", PRODUCTS]),
    ("custom:csv_quotes", {}, [GRADES], [GRADES.replace('"1"', "1"), GRADES.replace("\t", ",")]),
    ("custom:date_format_list", {}, ["1796-04-12, 1815-06-18"], ["1796-04-31", "1796-4-12", "1900-01-01", "none"]),
]  # fmt: skip

TABLE = [("ifeval", *case) for case in IFEVAL] + [("ifbench", *case) for case in IFBENCH]


def graded(rm_type: str, response: str, names: list[str], given: object, **options: str) -> float:
    metadata = {"instruction_id_list": names, "kwargs": given}
    return verifier(rm_type, **options)(Sample(index=4, response=response, metadata=metadata))


@pytest.mark.parametrize(("rm_type", "name", "arguments", "right", "wrong"), TABLE, ids=[case[1] for case in TABLE])
def test_instruction(rm_type, name, arguments, right, wrong):
    given = [arguments | {"unrelated": None}]
    assert [graded(rm_type, text, [name], given) for text in right] == [1.0] * len(right)
    assert [graded(rm_type, text, [name], given) for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(("cases", "checks"), [(IFEVAL, ifeval.CHECKS), (IFBENCH, ifbench.CHECKS)])
def test_every_kind_has_a_case(cases, checks):
    assert {case[0] for case in cases} == set(checks)


BOTH = (["punctuation:no_comma", "keywords:existence", "startend:quotation"], [{}, {"keywords": ["cat"]}, None])


@pytest.mark.parametrize(
    ("response", "options", "reward"),
    [
        ("a cat", {}, 2 / 3),
        ("a cat", {"count": "prompt"}, 0.0),
        ('"a cat"', {"count": "prompt"}, 1.0),
        ("<think>a, b</think> a cat", {}, 2 / 3),
        ("<think>a cat", {}, 0.0),
        ("", {}, 0.0),
        ('Sure, here:\n"a cat"', {}, 1 / 3),
        ('Sure, here:\n"a cat"', {"mode": "loose"}, 1.0),
        ('Sure:\n**"a cat"**\nBye, now', {"mode": "loose"}, 1.0),
        ("Bye", {"mode": "loose"}, 1 / 3),
    ],
)
def test_the_share_that_is_followed(response, options, reward):
    assert graded("ifeval", response, *BOTH, **options) == pytest.approx(reward)


def test_explanations_name_what_was_missed():
    metadata = {"instruction_id_list": BOTH[0], "kwargs": BOTH[1]}
    verdict = verifier("ifeval").explain(Sample(response="<think>x</think> a dog", metadata=metadata))
    assert verdict.why == "follows 1 of 3, not keywords:existence, startend:quotation"
    assert (verdict.source, verdict.extracted, verdict.span) == ("response", "a dog", (17, 22))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"sample 4: metadata\.instruction_id_list: missing or empty"),
        ({"instruction_id_list": ["no:such"]}, "'no:such' is unknown. Known: change_case:capital_word_frequency"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, r"metadata\.kwargs: not a list of 1 objects"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": None}]}, "existence needs keywords"),
    ],
)
def test_metadata_that_says_nothing_is_a_record_error(metadata, message):
    with pytest.raises(RecordError, match=message):
        verifier("ifeval")(Sample(index=4, response="x", metadata=metadata))


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(SettingsError, match=r"rm_options\.mode: 'lose' is not a mode; did you mean loose\?"):
        verifier("ifeval", mode="lose")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The quick brown fox is not in the house", "en"), ("Der Hund ist nicht auf dem Tisch", "de"),
        ("Le chat est dans la maison avec nous", "fr"), ("El perro no está en la casa con los niños", "es"),
        ("Il gatto non è sul tavolo della cucina", "it"), ("O gato não está em casa com os meninos", "pt"),
        ("Kissa on talossa mutta koira ei ole", "fi"), ("Con mèo không ở trong nhà và các bạn của tôi", "vi"),
        ("Paka ni katika nyumba na watu wa kijiji", "sw"), ("Кот не в доме, что это", "ru"),
        ("Котката не е в къщата, защото това са хора", "bg"), ("القط ليس في البيت من هذا", "ar"),
        ("گربه در خانه است که این را از", "fa"), ("بلی گھر میں نہیں ہے اور یہ", "ur"),
        ("बिल्ली घर में नहीं है और यह", "hi"), ("मांजर घरात नाही आहे आणि ते", "mr"), ("बिरालो घरमा छ र यो पनि", "ne"),
        ("บ้านของฉัน", "th"), ("고양이는 집에", "ko"), ("猫は家にいます", "ja"), ("猫在房子里", "zh"),
        ("வீடு", "ta"), ("ઘર", "gu"),
        ("ਘਰ", "pa"), ("ಮನೆ", "kn"), ("ఇల్లు", "te"), ("বাড়ি", "bn"), ("בית", "he"), ("12 !?", None),
    ],
)  # fmt: skip
def test_languages(text, language):
    assert language_of(text) == language


def test_sentences_and_syllables_by_hand():
    text = 'Mr. Li met J. Doe at 3.30 p.m. in St. Ives... "Why?" he asked! Nobody knew etc.'
    assert sentences(text) == [
        "Mr. Li met J. Doe at 3.30 p.m. in St. Ives...",
        '"Why?"',
        "he asked!",
        "Nobody knew etc.",
    ]
    assert [syllables(word) for word in ("", "the", "banana", "idea", "queue", "rhythm")] == [1, 1, 3, 2, 1, 1]


LONG = ["[" * 50_000, "<" * 50_000, "*" * 50_000, "." * 50_000 + "a", "a. " * 20_000, '"' * 50_000, "😀" * 20_000,
        "a\n" * 20_000, "(" * 50_000, "Question 1" * 5_000, "\ud800, " * 9_000, "'" * 50_001, "猫 " * 20_000,
        '"!' * 20_000]  # fmt: skip


@pytest.mark.parametrize("text", LONG)
def test_long_texts_take_time_in_proportion(text):
    for rm_type, cases in (("ifeval", IFEVAL), ("ifbench", IFBENCH)):
        started = time.process_time()
        graded(rm_type, text, [case[0] for case in cases], [case[1] for case in cases])
        assert time.process_time() - started < 2.5


@pytest.mark.slow
@pytest.mark.parametrize(("rm_type", "cases"), [("ifeval", IFEVAL), ("ifbench", IFBENCH)])
def test_no_hostile_response_raises(rm_type, cases):
    names, given = [case[0] for case in cases], [case[1] for case in cases]
    for response, _ in responses(500, seed=5):
        assert 0.0 <= graded(rm_type, response, names, given, mode="loose") <= 1.0
