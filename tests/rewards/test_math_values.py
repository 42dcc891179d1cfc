r"""Answers of one value in many spellings, and look-alikes of another value: (label, what the model boxed)."""

import time

import pytest
import sympy
from math_pairs import FAMILIES, pairs
from notation_pairs import FAMILIES as NOTATIONS
from notation_pairs import drawn as drawn_notation

from slimectl.rewards import verifier
from slimectl.rewards.math.modular import PRIME
from slimectl.types import Sample

MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
EQUAL = {
    "matrices": [(MATRIX, r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
                 (MATRIX, r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
                 (MATRIX, r"A = \begin{pmatrix}1&2\\ 3&4\\ \end{pmatrix}"),
                 (MATRIX, r"\begin{pmatrix}1&2\\[4pt] 3&4\end{pmatrix}"),
                 (r"\begin{pmatrix} \frac12 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}"),
                 (MATRIX, r"\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]"), (MATRIX, "[[1, 2], [3, 4]]"),
                 (r"\begin{pmatrix} 1 & \frac12 \\ 0 & -1 \end{pmatrix}",
                  r"\frac12 \begin{pmatrix} 2 & 1 \\ 0 & -2 \end{pmatrix}"),
                 (r"\begin{pmatrix} -7 \\ 16 \end{pmatrix}", r"\begin{pmatrix}-7\\16\end{pmatrix}")],
    "mixed numbers": [("3/2", "1 1/2"), ("1.5", r"1\ 1/2"), (r"-\frac32", "-1 1/2"), ("3/2", "1 1/2 cups"),
                      (r"\frac{11}{4}", r"2 \frac{3}{4}"), ("2.5", "2½")],
    "words after numbers": [("2000000", "2 million"), ("2000000", r"2\text{ million}"), ("24", "2 dozen"),
                            ("40320", "8 factorial"),
                            (r"7-\pi", "7 minus pi"), (r"\frac{1}{x}", "1 over x"), ("2.5", "5 halves"),
                            ("9", "3 squared"),
                            ("2000000", "2 million dollars"), ("9.8", r"9.8\text{ m/s}^2"), ("12", "12 square feet")],
    "lists": [("1,2,3", r"1, 2, \text{ and } 3"), ("1,2,3", "1, 2, and 3"), ("(1,2)", "(x,y)=(1,2)"),
              ("x=1, y=2", "(x,y)=(1,2)"),
              ("(1,2)", "x=1, y=2")],
    "numbers": [("602000000000000000000000", "6.02e23"), ("2/3", r"0.\overline{6}"), ("2/3", r"0.\bar{6}"),
                ("2/3", "0.(6)"),
                ("1/6", r"0.1\dot{6}"), (r"2\sqrt{3}", "2√3"), (r"\sqrt[3]{2}", r"\sqrt[3]2"), (r"\ln 2", r"\log_e 2"),
                ("1/2", r"\sin 30^\circ"), ("-2", r"\sqrt[3]{-8}"), (r"\sqrt{2}", r"\sqrt{2} \approx 1.414")],
    "sets of reals": [("[1,2)", "x ∈ [1,2)"), (r"[2,\infty)", "x>=2"), (r"(-\infty,1)\cup(2,\infty)", "x<1 or x>2"),
                      ("x>2", "2x-1 > 3"),
                      (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\mathbb{R}", "all real numbers"),
                      (r"(-793,10)", "-793<a<10"),
                      (r"x \ne 0", r"(-\infty,0)\cup(0,\infty)"), (r"x \ne 0", r"\mathbb{R} \setminus \{0\}"),
                      (r"\emptyset", r"\varnothing"), (r"\emptyset", "∅"), (r"\emptyset", r"\{\}"),
                      (r"\emptyset", r"\{ \}"),
                      (r"\{x \mid x > 2\}", r"(2,\infty)")],
    "names": [("1", "|AB|=1"), ("11:21", "V_1:V_2=11:21"), ("2:3", "4:6"), ("2:3", r"\frac23"), ("5", "5 = x"),
              ("60", r"\angle ABC = 60^\circ")],
    "two sets": [(r"(2,3)", r"(1,3) \cap (2,4)"), (r"\{2\} \cup [3,\infty)", r"x=2 \text{ or } x\ge 3"),
                 (r"\{a,b\} \cap \{b,c\}", r"\{b,c\} \cap \{a,b\}")],
    "formulas": [(r"\int_0^1 x\,dx", r"\int_{0}^{1} x dx"), (r"\sum_{i=1}^n i", r"\sum^n_{i=1} i"),
                 (r"\lim_{x\to 0} f(x)", r"\lim\limits_{x \rightarrow 0} f\left(x\right)"),
                 (r"\sum_{k=0}^\infty \frac{1}{k!}", r"\sum_{k=0}^{\infty}\frac1{k!}"), ("x_n^2", "x^{2}_{n}"),
                 (r"\mathrm{Re}(z)", r"\Re(z)"), (r"\binom{n}{k}", r"{n \choose k}"), ("{}_5C_2", "_5C_2"),
                 ("x_1'", "x'_{1}"), (r"A^{\top}", r"A^\top"), (r"\|x\|_2", r"\left\|x\right\|_{2}")],
    "units and money": [("1234", r"1,234\text{ miles}"), ("1000.99", "1,000.99 m²"), ("5", "5 cm³"), ("5", "5m²"),
                        ("9.8", r"9.8\ \frac{\text{m}}{\text{s}^2}"), ("5", r"5\,\mathrm{m\,s^{-2}}"),
                        ("3e8", r"3\times 10^8\text{ m/s}"), ("5", r"5\text{ N}\cdot\text{m}"), ("50", "₹50"),
                        (r"9\pi", "9π cm²"), ("3/4", r"\frac34\text{ of a mile}"),
                        ("1234", r"\$1,234\text{ per month}"),
                        (r"7+\Omega", "Ω+7")],
    "tuples with thousands": [("(1000, 2)", "(1,000, 2)"), ("1000, 2500", "1,000, 2,500"),
                              ("(12345, 6)", "(12,345, 6)"), ("(1, 200)", "(1,200)"),
                              (r"(1, \frac{400}{2})", "(1,200)"), ("200", r"\max(1,200)")],
    "matrices and vectors": [(r"\begin{pmatrix}6&8\\10&12\end{pmatrix}",
                              MATRIX + r"+\begin{pmatrix}5&6\\7&8\end{pmatrix}"),
                             (r"\begin{pmatrix}7&10\\15&22\end{pmatrix}", MATRIX + "^2"), ("-2", r"\det" + MATRIX),
                             ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"), ("(1+3t, 2+4t)", "(1,2)+t(3,4)"),
                             (r"\begin{pmatrix}-4&2\\3&-1\end{pmatrix}", "2" + MATRIX + "^{-1}"),
                             (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1, 2)^T")],
    "factors under a sum": [(r"F_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}", r"F_n = \sum_{k=0}^{n-1} F_{n-k-1} F_k"),
                            (r"\sum_{i=1}^n a_i", r"\sum_{j=1}^n a_j"), ("6", r"\sum_{k=0}^{3} k"),
                            (r"\sum_{d \mid n} d\mu(d)", r"\sum_{d|n} \mu(d) d"), ("60", r"\prod_{k=3}^5 k"),
                            (r"\sum_{n \ge 0} \frac{x^n}{n!}", r"\sum_{k=0}^\infty \frac{x^k}{k!}"),
                            (r"\frac1n \sum_{i=1}^n x_i", r"\sum_{i=1}^{n} \frac{x_i}{n}")],
    "times": [("2:30", "2:30 PM"), ("2:30 PM", r"2{:}30\text{ p.m.}"), ("14:30", "2:30 pm"), ("2 PM", "2:00 p.m."),
              ("12:00 PM", "noon"), ("12:30 AM", "0:30"), ("9:05", "09:05")],
    "emphasis": [("73", "**73**"), ("73", "_73_"), ("73", r"\color{red}{73}"), ("(1,2)", "**(1, 2)**"),
                 ("yes", "“Yes”。")],
    "Unicode": [("-5", "‑5"), ("x^{10}", "x¹⁰"), (r"\alpha_{10}", "α₁₀"), ("17/8", "2⅛"), ("x+5", "𝑥＋𝟓"), ("5", "5。"),
                ("José", "Jose\u0301"), ("1.5", "１．５"), ("-5", "⁻5")],
    "factorials and large numbers": [("n!", r"\Gamma(n+1)"), ("1e400", "10^{400}"), ("2^{200000}", "4^{100000}"),
                                     (r"\sqrt{\pi}", r"\Gamma(\tfrac12)"), ("1000!", r"1000 \cdot 999!")],
    "numerals": [("1010_2", "1010_{2}"), ("1010_2", r"1010_{\text{two}}"), ("42", "42_{10}")],
}  # fmt: skip
UNEQUAL = {
    "matrices": [(MATRIX, r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
                 (MATRIX, r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}"),
                 (MATRIX, r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}")],
    "mixed numbers": [("11/2", "1 1/2"), ("5.5", "1 1/2"), ("12", "1 2"), ("11/2", r"1\ 1/2"), ("1/2", "1 1/2")],
    "words after numbers": [("2", "2 million"), ("2", r"2\text{ million}"), ("2", "2 dozen"), ("8", "8 factorial"),
                            ("7", "7 minus pi"),
                            ("1", "1 over x"), ("5", "5 half"), ("3", "3 squared"), ("5", "5 mod 7"),
                            ("6", "6 choose 2"),
                            ("3", "3 tens"), ("1", "1 lakh"), ("5", "5 to 7"), ("5", r"5 \text{ or more}")],
    "formulas": [(r"\int_0^1 x dx", r"\int_1^0 x dx"), (r"\int_0^1 2 dx", r"\int_0^{12} dx"), (r"\frac12", r"\frac21"),
                 ("x_{12}", "x_{1}2"), ("x_{12}", r"x_1 2"), ("x_n^2", "x_2^n"), ("x_{n^2}", "x_n^2"),
                 ("a_n b", "a_{nb}"), (r"\lim_{x\to0^+} f", r"\lim_{x\to0^-} f"),
                 (r"\int_0^1 x^2 dx", r"\int_0^1 x^{2 dx}"),
                 ("f'(x)", "f''(x)"), (r"\int_0^1 12 dx", r"\int_0^1 1 2 dx"), (r"\max_x f", r"\min_x f")],
    "numerals": [("1010_2", "1010_3"), ("42", "42_7"), ("42_7", "42"), ("1010_2", "10")],
    "units": [("5", "5K"), ("5", r"5\text{A}"), ("2", r"2\text{ pairs}"), ("3/4", r"\frac34\text{ of a dozen}"),
              ("5", "5 of 7"), ("50", r"\$50\text{ million}"), ("7", r"7 \tau^2 \Omega"), ("7", r"7\Omega")],
    "commas": [("1200", "(1,200)"), ("12345", "1,234,5"), ("(1,2)", "(1,200)"), ("1000", "1,00")],
    "operators": [(r"\sum_{k=1}^n k a_k", r"k\sum_{k=1}^n a_k"), (r"\prod_{k=1}^n 2a_k", r"2\prod_{k=1}^n a_k"),
                  (r"\sum_i x_{ij} y_i", r"x_{ij} \sum_i y_i"), (r"\int_{-1}^1 |x|dx", r"\int_{-1}^1 x\,dx"),
                  (r"\sum_{i=1}^n x_{ij}", r"\sum_{i=1}^n x_{ji}"), (r"\int_0^1 x\,dx", r"\int_0^1 x\,dy"),
                  (r"\sum_{k=1}^\infty \frac{1}{k^2}", "1.645"), (r"\sum x_i y_i", r"x_i\sum y_i"),
                  (r"\sum_{i<j} x_i x_j", r"\sum_{i\le j} x_i x_j"), ("5", r"\sum_{k=0}^{3} k")],
    "times": [("2:30 PM", "2:30 AM"), ("2:30", "14:30"), ("1:15", "2:30 PM"), ("1/12", "2:30 PM"), ("5", "5am")],
    "characters": [("-2", "3—5"), ("x^{23}", "x²3"), ("21/8", "2⅛"), ("v", "ν"), ("6", "2**3"), ("5", "⁻5")],
    "large numbers": [("2^{100000}", "2^{100521}"), ("2^{100000}", "2^{100000}+1"), ("1e400", "1e401"),
                      ("n!", r"\Gamma(n)")],
    "what does not end": [("42", "42..."), ("42", r"42\ldots"), ("1/3", "0.333...")],
    "untrue chains": [("42", "43 = 42"), ("42", "x = 43 = 42")],
    "times and names": [("1/10", "3:30"), ("1:10", "3:30"), ("5", "5:1"), ("BA", "AB")],
    "sets of reals": [("x>2", "x>=2"), ("x>2", "y>2"), ("x>2", "2x>3"), ("x<1 or x>2", "1<x<2"),
                      (r"\emptyset", r"\{\emptyset\}"),
                      (r"\mathbb{R}", r"(-\infty,0)\cup(0,\infty)"), (r"\{0\}", r"\emptyset")],
    "derivatives": [(r"\frac{d}{dx} x^2", "x"), (r"\frac{dy}{dx}", r"\frac{y}{x}")],
    "functions": [("f(x+y)", "f(x)+f(y)"), (r"\sqrt{x^2}", "x"), (r"\log 2", r"\ln 2")],
}  # fmt: skip


def cases(table):
    return [pytest.param(*case, id=f"{name}: {case[0]} | {case[1]}") for name, part in table.items() for case in part]


def reward(label, answer):
    return verifier("math")(Sample(response=f"So it is $\\boxed{{{answer}}}$.", label=label))


@pytest.mark.parametrize(("label", "answer"), cases(EQUAL))
def test_one_value_is_accepted_in_any_spelling(label, answer):
    assert reward(label, answer) == reward(answer, label) == 1.0


@pytest.mark.parametrize(("label", "answer"), cases(UNEQUAL))
def test_another_value_is_not_accepted(label, answer):
    assert reward(label, answer) == reward(answer, label) == 0.0


def test_of_2_400_pairs_all_but_one_in_a_hundred_are_right_and_none_of_another_value_is_accepted():
    drawn = pairs(2400, seed=1)
    started = time.process_time()
    wrong = [(family, label, answer) for family, (label, answer, same) in drawn if reward(label, answer) != same]
    accepted = [pair for pair in wrong if reward(*pair[1:]) == 1.0]
    assert len({family for family, _ in drawn}) == len(FAMILIES)
    assert accepted == []
    assert len(wrong) <= len(drawn) // 100, wrong
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize("family", NOTATIONS, ids=lambda family: family.__name__)
def test_of_150_pairs_of_a_notation_all_but_one_in_a_hundred_are_right_and_no_wrong_one_is_accepted(family):
    made = drawn_notation(family, 150, seed=1)
    right, wrong = ([pair for pair in made if pair[2] is same] for same in (True, False))
    assert [pair for pair in wrong if reward(*pair[:2]) == 1.0] == []
    missed = [pair for pair in right if reward(*pair[:2]) == 0.0]
    assert len(missed) <= len(right) // 100, missed


def test_powers_of_no_base_repeat_early_by_the_prime_for_large_numbers():
    assert sympy.isprime(PRIME)
    assert sympy.isprime((PRIME - 1) // 2)  # so the order of every base but 1 and -1 is at least this
