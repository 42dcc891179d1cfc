"""Rules that papers published, each as a table: label, response, what is extracted, reward."""

import pytest

from slimectl.errors import RecordError
from slimectl.rewards import verifier
from slimectl.types import Sample

DEEPSCALER = [
    ("5", r"<think>hm</think> \boxed{5}", "5", 1.0),
    ("5", r"<think>\boxed{4}</think> \boxed{5}", "5", 1.0),
    ("5", r"<think>\boxed{5}</think> It is five.", None, 0.0),  # boxed while thinking does not count
    ("5", r"<think>a</think> \boxed{4} </think> \boxed{5}", "5", 1.0),
    ("0.5", r"###Response \boxed{\frac12}", r"\frac12", 1.0),
    ("5", r"###Response \boxed{4} ###Response \boxed{5}", "5", 1.0),
    ("5", r"###Response \boxed{5} </think> none", None, 0.0),  # </think> goes before
    ("5", r"\boxed{5}", None, 0.0),  # no marker: still thinking
    ("5", r"</think>\boxed{6}", "6", 0.0),
    (r"so \boxed{5}", r"</think>\boxed{5}", "5", 1.0),
    ("5", "", None, 0.0),
    ("5", r"<think>a</think> \boxed{5} <think>b", None, 0.0),  # thinks again, and the published reward reads on
    ("5", r"<think>\boxed{5} ###Response \boxed{5}", None, 0.0),
]

DAPO = [
    ("42", "Answer: 42", "42", 1.0),
    ("42", "answer: 042", "042", 1.0),
    ("5", "Answer: 5.0", "5.0", 1.0),
    ("1", "Answer: 1.5", "1.5", -1.0),
    ("0.5", "Answer: 1/2", "1/2", 1.0),
    ("42", "**Answer:** 42", "42", 1.0),
    ("42", "**Answer: 42**", "42", 1.0),
    ("42", "*Answer*: `42`", "42", 1.0),
    ("42", "### ANSWER : 42", "42", 1.0),
    ("42", "Answer:\n42", "42", 1.0),
    ("42", "Answer: 41\nAnswer: 42", "42", 1.0),
    ("42", "Answer: 42\nAnswer: 41", "41", -1.0),
    ("42", "Answer: 42\nAnswer:", "42", 1.0),  # nothing follows the last one: the rule wants something after it
    ("42", "The final answer: is this Answer: 42", "42", 1.0),
    ("42", "It is 42.", None, -1.0),
    ("42", "", None, -1.0),
    ("42", "Answer: 42" + " " * 300, None, -1.0),  # beyond the last 300 characters
    ("42", "Answer: 42" + " " * 290, "42", 1.0),
    ("1200", "Answer: $1,200$ dollars", "$1,200$ dollars", 1.0),
    ("1200", r"Answer: 1{,}200", r"1{,}200", 1.0),
    ("5", r"Answer: $x = 5\text{ cm}$", r"$x = 5\text{ cm}$", 1.0),
    ("90", r"Answer: $90^\circ$", r"$90^\circ$", 1.0),
    ("50", r"Answer: 50\%", r"50\%", 1.0),
    (r"\frac{1}{2}", r"Answer: $\dfrac12$", r"$\dfrac12$", 1.0),
    (r"\frac{3}{4}", "Answer: 3/4", "3/4", 1.0),
    ("3/4", r"Answer: $-\frac34$", r"$-\frac34$", -1.0),
    (r"\frac{\pi}{4}", r"Answer: \pi/4", r"\pi/4", 1.0),
    ("1.5", "Answer: 1 1/2", "1 1/2", 1.0),
    ("5.5", "Answer: 1 1/2", "1 1/2", -1.0),
    (r"1\frac{1}{2}", "Answer: 1 1/2", "1 1/2", 1.0),
    ("12", "Answer: 1 2", "1 2", -1.0),
    ("2", "Answer: 2 million", "2 million", -1.0),
    ("2000000", "Answer: 2 million", "2 million", -1.0),  # the rule knows no words for numbers
    ("2 million", r"Answer: 2\text{ million}", r"2\text{ million}", 1.0),
    ("8", "Answer: 8 factorial", "8 factorial", -1.0),
    ("7", "Answer: 7 minus pi", "7 minus pi", -1.0),
    ("42", "Answer: 42.", "42.", 1.0),
    ("42", "Answer: 42...", "42...", -1.0),
    ("42", "Answer: 42…", "42…", -1.0),
    ("0.333", "Answer: $0.333...$", "$0.333...$", -1.0),
    ("42", r"Answer: $42\ldots$", r"$42\ldots$", 1.0),  # which the rule removes
    ("42", "Answer: 43 = 42", "43 = 42", 1.0),  # the rule takes what stands behind the last equals sign
    ("42", "Answer: 42_7", "42_7", -1.0),
    ("1010_2", "Answer: 1010_3", "1010_3", -1.0),
    ("1/10", "Answer: 3:30", "3:30", -1.0),
    ("BA", "Answer: AB", "AB", -1.0),
    ("42", "Answer: 42<|im_end|>", "42", 1.0),
    ("42", "Answer: 42 <|eot_id|>\n<|end_of_text|>", "42", 1.0),
    ("42", "Answer: 42</s>" + "</s>" * 20, "42", 1.0),
    ("42", "Answer: 42<｜end▁of▁sentence｜>", "42", 1.0),
    ("42", "Answer: $42$ or $43$", "$42$ or $43$", -1.0),  # two answers
    ("42", "Answer: $42$ is wrong", "$42$ is wrong", -1.0),
    ("42", "Answer: x = 5 or x = 42", "x = 5 or x = 42", -1.0),
    ("3", "Answer: $a=42, b=3$", "$a=42, b=3$", -1.0),
    ("42", "Answer: $x >= 42$", "$x >= 42$", -1.0),  # no equals sign
    ("42", "Answer: x != 42", "x != 42", -1.0),
    ("42", "Answer: The sum of 3 terms is $42$ cm.", "The sum of 3 terms is $42$ cm.", 1.0),
    ("50", r"Answer: $\$50$", r"$\$50$", 1.0),
    (r"\frac{1}{2}", "Answer: 0.5", "0.5", -1.0),  # no symbolic equality: text against a number
    (r"\sqrt{2}", r"Answer: \(\sqrt2\)", r"\(\sqrt2\)", 1.0),
    ("5", r"Answer: \boxed{5}", r"\boxed{5}", 1.0),
    (r"\text{an apple}", "Answer: apple", "apple", 1.0),
    ("Paris", "Answer: paris", "paris", -1.0),
    ("5", "Answer: 5。", "5。", 1.0),
    ("5", "Answer: 5।", "5।", 1.0),
    ("5", "Answer: “5”.", "“5”.", 1.0),
    ("Paris", "Answer: 「Paris」。", "「Paris」。", 1.0),
    ("Paris", "Answer: «Paris»", "«Paris»", 1.0),
    ("f'", "Answer: f'", "f'", 1.0),
    ("caf\u00e9", "Answer: cafe\u0301", "cafe\u0301", 1.0),
    ("e\u0301", "Answer: e", "e", -1.0),
    (5, "Answer: 5", "5", 1.0),
    (5.0, "Answer: 5", "5", 1.0),
]

F1 = [
    ("Eiffel Tower", "the eiffel tower!", 1.0),
    ("the Eiffel Tower", "Eiffel Tower in Paris", 2 * 2 / (2 + 4)),
    ("a b c d", "c d e f", 2 * 2 / (3 + 4)),  # the article is gone from the label
    ("x x y", "x y y", 2 * 2 / (3 + 3)),  # each word as often as both have it
    ("London", "Paris", 0.0),
    ("yes", "Yes.", 1.0),
    ("yes", "yes it is", 0.0),
    ("it is no joke", "no", 0.0),
    ("noanswer", "noanswer", 1.0),
    ("London", "", 0.0),
    ("the", "a", 1.0),  # nothing is left of either
    (1889, "In 1889", 2 * 1 / (1 + 2)),
    ("Eiffel Tower", "“Eiffel Tower”。", 1.0),
    ("Eiffel Tower", "«the Eiffel – Tower»", 1.0),
    ("東京", "「東京」．", 1.0),
    ("दिल्ली", "दिल्ली।", 1.0),
    ("caf\u00e9", "cafe\u0301", 1.0),
    ("\ud55c\uae00", "\u1112\u1161\u11ab\u1100\u1173\u11af", 1.0),
    ("$5", "5", 1.0),
    ("€5", "5", 0.0),  # a symbol, and ASCII's symbols only count as punctuation
]

GPQA = [
    ("B", {}, "The answer is (B).", "B", 1.0),
    ("B", {}, "The answer is B", "B", 1.0),
    ("B", {}, "the correct answer is (b)", "b", 1.0),
    ("B", {}, "The best option is: **B**", "B", 1.0),
    ("B", {}, "My choice is option B.", "B", 1.0),
    ("B", {}, "Final answer: B", "B", 1.0),
    ("B", {}, "**Final Answer:** B", "B", 1.0),
    ("B", {}, "**Answer: (B) the second**", "B", 1.0),
    ("B", {}, r"so \boxed{B}", "B", 1.0),
    ("B", {}, r"so $\boxed{\text{(B)}}$", "B", 1.0),
    ("B", {}, r"so \boxed{b}", "b", 1.0),
    ("B", {}, "The answer is A. No: the answer is B. Not (C).", "B", 1.0),
    ("B", {}, "(A) is wrong. I choose **B**, not (C)", "B", 1.0),
    ("B", {}, "**B. the second** then", "B", 1.0),
    ("B", {}, "(A)? Rather (B), says C.", "B", 1.0),
    ("B", {}, "not A but B", "B", 1.0),
    ("B", {}, "B it is. A large one, I think", "B", 1.0),  # an article and a pronoun
    ("A", {}, "So A is right", "A", 1.0),
    ("B", {}, "<think>the answer is (A)</think> (B)", "B", 1.0),
    ("B", {}, "the answer is B</think> hm", None, 0.0),
    ("B", {}, "The answer is Because", None, 0.0),
    ("B", {}, "the second", None, 0.0),
    ("B", {}, "", None, 0.0),
    ("C", {"valid_letters": ["A", "B", "C"]}, "C, said D", "C", 1.0),
    ("C", {"valid_letters": "ABC"}, "The answer is (D). C.", "C", 1.0),
    ("C", {"choices": ["x", "y", "z"]}, "Z D C", "C", 1.0),
    ("K", {}, "K", None, None),
    (1, {}, "The answer is B", "B", 1.0),
    (0, {"valid_letters": ["P", "Q"]}, "P", "P", 1.0),
    (2.0, {"choices": ["x", "y", "z"]}, "(C)", "C", 1.0),
    ("Rome", {"choices": ["Paris", "Rome"]}, "The answer is (B)", "B", 1.0),
    ("rome.", {"choices": {"A": "Paris", "B": "Rome"}}, "The answer is Rome.", "Rome.", 1.0),
    ("B", {"choices": ["Paris", "Rome"]}, r"\boxed{Rome}", "Rome", 1.0),
    ("B", {"choices": ["Paris", "Rome"]}, "The answer is Paris", "Paris", 0.0),
    ("B", {"choices": ["Paris", "Rome"]}, "Rome", "Rome", 1.0),
    ("B", {"choices": ["Paris", "Rome"]}, "It is in Italy.\n**Rome.**", "**Rome.**", 1.0),
    ("B", {"choices": ["Paris", "Rome"]}, "Paris", "Paris", 0.0),
    (None, {"correct_letter": "B"}, "The answer is B", "B", 1.0),
    ("Rome", {"correct_letter": "A"}, "The answer is B", "B", 0.0),
    ("A", {}, "A is right, not B", "A", 1.0),
    ("A", {}, "A is the correct answer, not B.", "A", 1.0),
    ("A", {}, "Choose (A), not (B)", "A", 1.0),
    ("B", {}, "The answer is not A but B", "B", 1.0),
    (7, {"choices": ["x", "y"]}, "A", None, None),
    (0.5, {}, "A", None, None),
    ("nowhere", {"choices": ["x", "y"]}, "A", None, None),
    ("A", {"valid_letters": 7}, "A", None, None),
    ("A", {"valid_letters": ["AB"]}, "A", None, None),
]
"""A reward of None: the record is refused."""


LETTERS = [
    ("答案是B。", "B"), ("正确答案为A。", "A"), ("选择D选项", "D"), ("정답은 B입니다", "B"), ("答えはBです", "B"),
    ("**Answer: D**\n\nbecause \\boxed{E = mc^2}", "D"), (r"Answer: B. Check: \boxed{C = 2\pi r}", "B"),
    (r"\boxed{A, C}", None), ("The answer is b.", "B"), ("b. 4", "B"), ("The answer is 'B'", "B"),
    (r"\boxed{\text{B}}", "B"), (r"\boxed{B. 42 m}", "B"), (r"\boxed{B) 42}", "B"),
    (r"\boxed{\text{(B) the second}}", "B"), (r"\boxed{\mathbf{B}}", "B"), (r"\boxed{\textbf{B.}}", "B"),
    (r"\boxed{Option B}", "B"), (r"\boxed{C \text{ (2 m)}}", "C"), (r"\boxed{A \text{ and } C}", None),
    (r"\boxed{A and C}", None), (r"\boxed{AC}", None), (r"\boxed{Because}", None), (r"\boxed{a+b}", None),
    (r"\boxed{F = ma}", None), (r"\boxed{A/C}", None), (r"\boxed{\text{A, B}}", None), (r"\boxed{(A), (C)}", None),
    (r"$$\boxed{B}$$", "B"), (r"\boxed{\boxed{B}}", "B"), (r"\boxed{ B }", "B"), (r"\boxed{B: 12 kg}", "B"),
    (r"\boxed{\text{Option (C)}}", "C"), (r"\boxed{\text{C: the third}}", "C"), ("Option (C)", "C"), ("(b)", "B"),
    ("b", "B"), ("**b**", "B"), ("b)", "B"), ("Ｂ", "B"), ("答案：Ｂ", "B"), ("答案是（B）", "B"), ("答案【C】", "C"),
    ("Ⓑ", "B"),
    ("Answer: В", None), ("Ответ: B", "B"), ("Правильный ответ — B.", "B"), ("Answer: A, C", None),
    ("Answer: A and C", None), ("The answer is A or B.", None), ("Answer: A/B", None), ("Answer: (A) and (C)", None),
    ("The answer is A & C", None), ("Both A and C", None), ("A, C", None), ("A、C", None), ("答案是A和C。", None),
    ("答案是A、C", None), ("正解はAとCです", None), ("The answer is A, not C.", "A"),
    ("The answer is A and B is wrong.", "A"),
    ("The answer is B, because C is too large.", "B"), ("Answer: B, I think.", "B"),
    ("The answer is A. Not B or C.", "A"), ("Not A or C, so B", "B"), ("La respuesta correcta es B, no A.", "B"),
    ("La bonne réponse est B", "B"), ("La réponse est C.", "C"), ("Die richtige Antwort ist B.", "B"),
    ("La risposta corretta è B.", "B"), ("A resposta correta é B.", "B"), ("Đáp án là B", "B"), ("Cevap: B", "B"),
    ("सही उत्तर B है", "B"), ("الإجابة الصحيحة هي B", "B"), ("คำตอบคือB", "B"), ("故选B。", "B"), ("应选C", "C"),
    ("A错误，B正确，C错误", "B"), ("选项A错误，答案是B，因为C不对", "B"), ("A는 틀렸고 B가 정답입니다", "B"),
    ("Aは間違い、Bが正しい", "B"),
    ("The answer is E = mc^2.", None), ("Since E = mc^2, the answer is D", "D"), ("E = mc^2", None),
    ("F = ma so B", "B"), ("T is 300 K. C", "C"), ("It is 42 C", None), ("The answer is a matter of taste.", None),
    ("The answer is a.", "A"), ("the answer is (a)", "A"), ("The answer is a", "A"), ("answer is **B**", "B"),
    ("**Answer**: B", "B"), ("**Answer:** **B**", "B"), ("__Answer: B__", "B"), ("_B_", "B"), ("*B*", "B"),
    ("`B`", "B"), ('"B"', "B"), ("“B”", "B"), ("「B」", "B"), ("Answer: “B”.", "B"), ("Answer: `B`", "B"),
    ("Answer: $B$", "B"), (r"Answer: \text{B}", "B"), (r"Answer: \(B\)", "B"), (r"Answer: $\mathbf{B}$", "B"),
    ("Answer: [B]", "B"), ("Answer: B) 42", "B"), ("Answer:\nB", "B"), ("Answer - B", "B"),
    ("Final Answer: Option B", "B"), ("My final choice is (D)", "D"), ("The correct option is C", "C"),
    ("The correct answer is option C: 42", "C"), ("the answer is option b", "B"), ("ANSWER IS B", "B"),
    ("answer is: B", "B"), ("Answer = B", "B"), ("a. 1\nb. 2\nc. 3", None), ("A. 1\nB. 2\n\nThe answer is B.", "B"),
    ("(A) 1 (B) 2. So (B).", "B"), ("The answer is not B.", None), ("It isn't B.", None), ("Neither A nor B.", None),
    ("C is wrong, B is right", "B"), ("B is wrong", None), ("I choose B because A is wrong", "B"),
    ("A cat. I think B", "B"), ("I think so.", None), ("B", "B"), ("B.", "B"), ("(B)", "B"), ("[B]", "B"),
    ("Answer: B\n\nI hope this helps.", "B"), ("Answer: (B)\nExplanation: A and C are wrong.", "B"),
    ("The answer is B (not A).", "B"), ("The answer is C – the third.", "C"), ("答案：b", "B"), ("답: C", "C"),
    ("답은 C", "C"), ("解答：D", "D"), ("正解：B", "B"), ("<answer>B</answer>", "B"), ("The answer is <b>B</b>", "B"),
    ("Answer: B\u200b", "B"), ("Answer: Ć", None), ("Answer: É", None), ("Answer: Bé", None), ("β", None),
    ("Answer: β", None), ("Answer: A\nWait, Answer: B", "B"), ("Answer: B!", "B"), ("Answer: B?", "B"),
    ("answer:B", "B"), ("Answer B", "B"), ("The answer: B", "B"), ("The answer is:\n\n**B**", "B"),
    ("### Answer\nB", "B"), ("### Answer: B", "B"), ("|Answer|B|", "B"), (r"The answer is \boxed{B}.", "B"),
    (r"\fbox{B}", "B"), (r"$\boxed{\mathrm{(B)}}$", "B"), (r"\boxed{B\ 42}", "B"), (r"\boxed{B,\ 42}", "B"),
]  # fmt: skip
"""(response, the letter that a person reads in it, or None)."""

LETTERS_AMONG_OTHERS = [
    ("Answer: D-glucose", {}, None), ("Answer: B cells", {"choices": ["B cells", "T cells", "mast cells"]}, "A"),
    ("The answer is B cells.", {"choices": ["T cells", "B cells"]}, "B"),
    ("The answer is E = mc^2", {"choices": ["F = ma", "E = mc^2"]}, "B"),
    ("Answer: B", {"choices": {"A": "B", "B": "A"}}, "B"), ("Answer: A", {"choices": ["A", "B"]}, "A"),
    ("The answer to question 3 is B.", {}, "B"), ("The answer to this question is therefore (C).", {}, "C"),
    ("The answer appears to be B", {}, "B"), ("So the answer is clearly D.", {}, "D"),
    ("The answer has to be option B.", {}, "B"), ("B\n\nExplanation: Vitamin C helps.", {}, "B"),
    ("B. 42\n\nExplanation: A is too small and C too large.", {}, "B"), ("B) 42\n\nBecause C fails.", {}, "B"),
    ("**A) 1**: wrong.\n**B) 2**: fits.\n**C) 3**: wrong.\n\nSo I pick B.", {}, "B"),
    ("(A) 1\n(B) 2\n(C) 3\n\nI choose B", {}, "B"), ("A. 1\nB. 2\nC. 3\n\nI choose B", {}, "B"),
    ("- A: 1\n- B: 2\n- C: 3\n\nB", {}, "B"), ("a. 1\nb. 2\nc. 3", {}, None), ("A. 1\nB. 2\nC. 3", {}, None),
    ("Option A: no.\nOption B: yes.\n\nAnswer: B", {}, "B"), ("The correct answer is D, as C and A fail.", {}, "D"),
    ("The answer is B and C is the runner-up.", {}, "B"), ("Answer: C (NaOH)", {}, "C"),
    ("Answer: B - because", {}, "B"), ("Option A is correct, Option B is incorrect.", {}, "A"),
    ("The answer is (B) 3.2 × 10^5", {}, "B"), ("Answer: X-ray", {}, None),
    ("The options are A, B, C and D. The answer is C.", {}, "C"), ("I would choose C.", {}, "C"),
    ("C is the correct option because A and B do not conserve energy.", {}, "C"),
    ("Among A, B and C, only B conserves it.", {}, "B"), ("So D.", {}, "D"),
    ("**Answer: C**\n\n**Why not A:** ...\n**Why not B:** ...", {}, "C"),
    ("The answer:\n\n$$\\boxed{\\textbf{(C)}}$$", {}, "C"), ("Antwort: C", {}, "C"), ("Réponse : C", {}, "C"),
    ("Respuesta: C", {}, "C"), ("Risposta: (c)", {}, "C"), ("Ответ: (C)", {}, "C"), ("答：C", {}, "C"),
    ("选C。因为A和B都错误", {}, "C"), ("本题选B", {}, "B"), ("因此，答案是 **C**。", {}, "C"),
    ("答案是：C、因为", {}, "C"), ("したがって、答えは「C」です。", {}, "C"), ("따라서 정답은 (C)입니다.", {}, "C"),
    ("คำตอบคือ C", {}, "C"), ("Jawaban: C", {}, "C"), (r"The final answer is $\boxed{\text{C. 12 m}}$", {}, "C"),
    ("C.", {}, "C"), ("c)", {}, "C"), ("Answer: C", {}, "C"),
    # A letter in a sentence is a name unless the sentence chooses it.
    ("Vitamin C is important.", {}, None), ("The answer is vitamin C.", {}, None), ("Point B lies on it.", {}, None),
    ("Let A be a matrix and B its inverse.", {}, None), ("It is 25 °C.", {}, None), ("C is the speed.", {}, None),
    ("2A + B → C", {}, None), ("rate = k[A][B]", {}, None), ("Let P(A) = 0.5.", {}, None), ("from A to B", {}, None),
    (r"\boxed{\frac{A}{B}}", {}, None), (r"\boxed{|A|}", {}, None), (r"\boxed{A \to B}", {}, None),
    ("The answer is C-14.", {}, None), ("The answer is C#.", {}, None), ("The answer is A∪B.", {}, None),
    ("I'd go with C.", {}, "C"), ("Definitely C.", {}, "C"), ("which makes C correct", {}, "C"), ("⇒ C", {}, "C"),
    ("This leaves us with option C.", {}, "C"), ("x = 20, i.e. C", {}, "C"), ("Option C best fits.", {}, "C"),
    (r"\boxed{\bf C}", {}, "C"), (r"\boxed{\mathsf{C}}", {}, "C"), (r"\(\text{C}\)", {}, "C"), ("✅ C) 4", {}, "C"),
    # What is ruled out is no answer, and a correction is one.
    ("We can rule out A.", {}, None), ("Option A is ruled out.", {}, None), ("不选A", {}, None),
    ("排除选项A。", {}, None), ("B ✗", {}, None),
    ("正解はAではない。", {}, None), ("답은 A가 아니다.", {}, None), ("Die Antwort ist nicht A.", {}, None),
    ("La réponse n'est pas A.", {}, None), ("It is unlikely to be A.", {}, None), ("정답은 A와 C입니다.", {}, None),
    ("A项错误；B项错误；C项正确；D项错误。", {}, "C"), ("答案是A。等等，不对，应该是C。", {}, "C"),
    ("The answer is A. Wait, no. It's C.", {}, "C"), ("After eliminating A, B and D, we are left with C.", {}, "C"),
    ("A ❌\nB ❌\nC ✅", {}, "C"), ("(A) 1\n(B) 2\n(C) 3\n\n**(C) 3**", {}, "C"),
    ("The answer is $20\\,\\text{m}$.", {"choices": ["10 m", "5 m", "20 m"]}, "C"),
]  # fmt: skip
"""(response, metadata, the letter that a person reads in it, or None)."""


def checked(rm_type, sample, extracted, reward):
    made = verifier(rm_type)
    verdict = made.explain(sample)
    assert (made.extract(sample), verdict.extracted, verdict.reward) == (extracted, extracted, reward)
    assert extracted is None or sample.response[slice(*verdict.span)] == extracted
    assert made(sample) == reward


@pytest.mark.parametrize(("label", "response", "extracted", "reward"), DEEPSCALER)
def test_deepscaler(label, response, extracted, reward):
    checked("deepscaler", Sample(response=response, label=label), extracted, reward)
    checked("boxed_deepscaler", Sample(response=response, label=label), extracted, reward)


@pytest.mark.parametrize(("label", "response", "extracted", "score"), DAPO)
def test_dapo(label, response, extracted, score):
    sample = Sample(response=response, label=label)
    verdict = verifier("dapo").explain(sample)
    assert isinstance(verdict.reward, dict)
    assert (verdict.reward["score"], verdict.reward["acc"]) == (score, float(score > 0))
    assert verdict.extracted == extracted
    assert extracted is None or response[slice(*verdict.span)] == extracted


def test_dapo_says_what_it_compared_and_keeps_its_keys_without_an_answer():
    assert verifier("dapo")(Sample(response="Answer: x = 1,200 cm", label="7"))["pred"] == "1200"
    assert verifier("dapo")(Sample(response="hm", label="7")) == {"score": -1.0, "acc": 0.0, "pred": ""}
    for response, score in ((r"\boxed{42.0}", 1.0), ("Answer: 42", -1.0), (r"\boxed{4", -1.0)):
        assert verifier("boxed_dapo")(Sample(response=response, label="42"))["score"] == score


@pytest.mark.parametrize(("label", "response", "reward"), F1)
def test_f1(label, response, reward):
    checked("f1", Sample(response=response, label=label), response, pytest.approx(reward))


@pytest.mark.parametrize(("label", "metadata", "response", "extracted", "reward"), GPQA)
def test_gpqa(label, metadata, response, extracted, reward):
    sample = Sample(index=3, response=response, label=label, metadata=metadata)
    if reward is None:
        with pytest.raises(RecordError, match=r"sample 3: (label|metadata)"):
            verifier("gpqa")(sample)
    else:
        checked("gpqa", sample, extracted, reward)


@pytest.mark.parametrize(("response", "letter"), LETTERS)
def test_the_letter_of_a_choice(response, letter):
    verdict = verifier("gpqa").explain(Sample(response=response, label=letter or "A"))
    assert (verdict.reward, verdict.extracted is None) == (float(letter is not None), letter is None)
    assert letter is None or verifier("gpqa").explain(Sample(response=response, label="J")).reward == 0.0
    assert letter is None or response[slice(*verdict.span)] == verdict.extracted


@pytest.mark.parametrize(("response", "metadata", "letter"), LETTERS_AMONG_OTHERS)
def test_the_letter_that_is_meant_among_others(response, metadata, letter):
    verdict = verifier("gpqa").explain(Sample(response=response, label=letter or "A", metadata=metadata))
    assert (verdict.reward, verdict.extracted is None) == (float(letter is not None), letter is None)


def test_the_text_of_a_choice_in_other_spellings():
    metadata = {"choices": ["Caf\u00e9", "\ud55c\uae00", "東京"]}
    for response, label in [("Cafe\u0301", "A"), ("“Café”.", "A"), (r"\boxed{\text{Café}}", "A"), ("「東京」。", "C"),
                            ("\u1112\u1161\u11ab\u1100\u1173\u11af", "B"),
                            ("The answer is “東京”。", "C")]:  # fmt: skip
        assert verifier("gpqa")(Sample(response=response, label=label, metadata=metadata)) == 1.0, response


@pytest.mark.parametrize("rm_type", ["deepscaler", "dapo", "f1", "gpqa"])
def test_a_missing_label_is_a_record_error(rm_type):
    with pytest.raises(RecordError, match="sample 3: label: missing"):
        verifier(rm_type)(Sample(index=3, response="B"))
