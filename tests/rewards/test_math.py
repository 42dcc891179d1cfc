"""What the math verifier takes for the same answer, and what not: (label, what the model boxed)."""

import pickle
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.errors import RecordError
from slimectl.rewards import verifier
from slimectl.rewards.math.verifier import equal
from slimectl.types import Sample

EQUAL = {
    "numbers": [("8", "2^3"), ("2", r"\sqrt{4}"), ("0.5", r"\frac{2}{4}"), (r"\frac{1}{2}", r"\frac24"), ("1/2", ".5"),
                ("72", "72.0"), ("-5", "−5"), (r"\frac52", r"2\frac12"), ("6.25", r"6\frac14"), ("1000", "1e3"),
                ("0.001", "10^{-3}"), ("1500", r"1.5\times 10^3"), ("1/3", r"0.\overline{3}"), ("120", "5!"),
                ("10", r"\binom{5}{2}"), ("10", r"\log_2 1024"), ("12", r"4 \cdot 3"), (r"-\frac12", r"\frac{-1}{2}")],
    "expressions": [("x^2+2x+1", "(x+1)^2"), (r"\frac{\sqrt{3}}{2}", r"\frac{3}{2\sqrt{3}}"), (r"\frac{\pi}{4}", "π/4"),
                    (r"3\sqrt{13}", r"\sqrt{117}"), ("2^{0.5}", r"\sqrt2"), ("2k+2", "2(k+1)"), ("p - q", "-q+p"),
                    (r"\tan x", r"\frac{\sin x}{\cos x}"), ("y=2x+1", "y-2x=1"), ("2x-y+1=0", "4x+2=2y"),
                    ("x^2=4", "x^2-4=0"),
                    ("1", r"\sin^2 x + \cos^2 x"), ("x<3", "3>x")],
    "units": [("5", r"5\text{ cm}"), ("5", "5 cm"), ("5", "5cm"), ("5", r"5\,\text{m/s}^2"), (r"36\text{ ft}", "36"),
              ("30", r"30\mathrm{~cm}^{2}"), ("60", r"60 \frac{\text{km}}{\text{h}}"), ("18", r"18\text{ eggs}"),
              ("72", "72 apples"), ("5", "5 m"), ("90", r"90^\circ"), ("90", r"90^{\circ}"), ("50", r"50\%"),
              ("72", r"\$72"), ("72", "$72$"), (r"\frac34\text{ cup}", "3/4"),
              ("5 km/h", r"5\text{ km}\cdot\text{h}^{-1}"), ("5 kph", "5 kilometers per hour"), ("5 mL", "5 cm^3"),
              (r"5\text{ N}", r"5\text{ kg m/s}^2"), (r"5\text{ g/mL}", r"5\text{ kg/L}"), ("3 hours", "3 hrs"),
              ("9 square feet", r"9\text{ ft}^2"), ("5 lbs", r"5\text{ pounds}"), ("5 apples", "5 pears"),
              (r"5\ \mu\text{m}", r"5\text{ micrometers}"), ("5 in.", "5 inches"), (r"0.08\text{ L atm}", "0.08")],
    "thousands": [("1234", "1,234"), ("1234", "1{,}234"), ("1234567", "1,234,567"), ("1000", r"1\,000"),
                  ("1234.5", r"\$1,234.50")],
    "prefixes": [("5", "x=5"), ("5", "x = 5"), ("2x+1", "y = 2x+1"), ("f(x)=x^2", "x^2"), ("[1,2]", r"x \in [1,2]"),
                 ("5", "2+3=5"), ("5", "x = 2 + 3 = 5"), ("5", r"\text{Area} = 5")],
    "binomials": [(r"{5 \choose 2}", "10"), (r"\binom{n}{2}", r"{n \choose 2}"), (r"\binom{n}{k}", r"n \choose k"),
                  (r"{n \choose k_{1}}", r"\binom{n}{k_1}")],
    "sets and lists": [(r"\{1,2\}", r"\{2,1\}"), ("1,2", "2, 1"), (r"\{1,2\}", "1,2"), ("1,2", r"1\text{ and }2"),
                       ("1,2", "1 or 2"), ("1,-1", r"\pm 1"), (r"1+\sqrt2, 1-\sqrt2", r"1 \pm \sqrt{2}"),
                       ("5", r"\{5\}"), ("x=1, x=2", "2, 1"), ("x=1, y=2", "y=2, x=1"),
                       (r"\{\frac12, 3\}", r"\left\{3, 0.5\right\}")],
    "tuples and intervals": [("(1,2)", r"\left( 1, 2 \right)"), (r"(3, \frac{\pi}{2})", r"(3,\pi/2)"),
                             (r"(-\infty,2]\cup[3,\infty)", r"[3,\infty) \cup (-\infty, 2]"), ("(1,2)", "1<x<2"),
                             (r"x \ge 3", r"[3,\infty)"), ("(1,2)", r"\langle 1, 2 \rangle")],
    "matrices": [(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix}")],
    "words": [("yes", r"\text{Yes}"), ("Tuesday", r"\textbf{Tuesday}."), ("A", r"\text{(A)}"), ("B", "(B)"),
              ("no", "No")],
}  # fmt: skip
UNEQUAL = {
    "approximations": [("1/3", "0.333333"), (r"\pi", "3.14159"), (r"\pi", "3.14159265358979323846"),
                       (r"\sqrt{2}", "1.41421356"), ("1.5", "1")],
    "values": [("8", "2^4"), ("5", "-5"), ("72", "27"), ("x+1", "x+2"), ("x", "y"), ("3", "3x"), ("4", "x^2=4"),
               ("y=2x+1", "y=2x+2"), ("x^2+y^2=1", r"x^{17}\sin x + y^3 e^{x} = 3")],
    "brackets": [("(1,2)", "[1,2]"), ("[1,2)", "[1,2]"), ("(1,2)", "1,2"), ("(1,2)", r"\{1,2\}")],
    "order and number": [("(1,2)", "(2,1)"), ("1,2", "1,2,3"), (r"\{1,1,2\}", r"\{1,2,2\}"), ("x=1,y=2", "x=2,y=1")],
    "symbols that look like units": [("2", "2mg"), ("2", "2s^2"), ("5", "5m"), ("3m+5", "3 m + 5 s"),
                                     ("2", r"2\mathbf{v}")],
    "units of another quantity": [("5 m", "5 km"), ("3 days", "3 hours"), ("5 dollars", "5 cents"), ("5 cm^2", "5 cm"),
                                  (r"60\text{ km/h}", r"60\text{ m/s}"), ("5 kg", r"5\text{ g}"), ("2 ft", "2 in"),
                                  ("5 km", "5000 m"), (r"5\text{ J}", r"5\text{ kJ}"), ("5 mL", "5 L")],
    "anagrams": [("no", "on"), ("Paris", "pairs"), ("yes", "no"), ("A", "B")],
    "nothing": [("5", ""), ("5", r"\text{}"), ("5", "{}"), ("5", "?")],
}  # fmt: skip
EXPLOSIVE = [
    "9^{9^{9^9}}", r"\binom{1000000}{500000}", r"\binom{\binom{999}{500}}{\binom{999}{400}}", "(10^{10})!", "((5!)!)!",
    "2^{1000000000}", "1^{9^9}", "10^{-10^{10}}", r"\int_0^1 x^x dx", r"\sum_{i=1}^{10000000} i^i", "9" * 5000,
    "1e999999999", "x^{x^{x^{x^x}}}", "(x+y+z)^{1000}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}",
    r"\exp(\exp(\exp(\exp(9))))", r"\gcd(9^{9^9}, 3)", r"\lcm(9^{9^9}, 3)", r"\lfloor 9^{9^{9^9}} \rfloor",
    r"9^{9^9} \bmod 7", r"\Gamma(10^9)", r"\cosh(10^9)", "(10^3)!^{1000}", "((10^{300})^{300})^{300}",
    "{" * 1900, "(" * 1900, "(" * 60 + "1,2" + ")" * 60, "|" * 150, r"\frac" * 30, r"\sqrt{" * 30,
    "x" + " " * 1990 + "y", r"\ " * 900, "1," * 900, "-" * 199, "x" * 199, "1+" * 99, r"\left(" * 300, "^" * 190,
    r"\text{" * 300,
]  # fmt: skip


def boxed(answer, label="1"):
    return Sample(response=f"So it is $\\boxed{{{answer}}}$.", label=label)


def cases(table):
    return [pytest.param(*case, id=f"{name}: {case[0]} | {case[1]}") for name, part in table.items() for case in part]


@pytest.mark.parametrize(("label", "answer"), cases(EQUAL))
def test_the_same_answer_is_accepted(label, answer):
    assert verifier("math")(boxed(answer, label)) == 1.0


@pytest.mark.parametrize(("label", "answer"), cases(UNEQUAL))
def test_another_answer_is_not(label, answer):
    assert verifier("math")(boxed(answer, label)) == 0.0


@pytest.mark.parametrize(
    ("response", "extracted", "reward"),
    [
        (r"\boxed{5}", "5", 1.0),
        (r"\fbox{5}", "5", 1.0),
        (r"\boxed {5}", "5", 1.0),
        (r"\boxed{4}, no, \boxed{5}", "5", 1.0),
        (r"\boxed{5}, no, \boxed{4}", "4", 0.0),
        (r"\boxed{\frac{10}{2}}", r"\frac{10}{2}", 1.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\boxed{5}. As asked, I used \boxed.", "5", 1.0),
        (r"\boxed{5} and then \boxed{5", None, 0.0),  # cut off: it had not finished answering
        ("The answer is 5.", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_only_the_last_closed_box_counts(response, extracted, reward):
    sample = Sample(response=response, label="5")
    assert verifier("math").extract(sample) == extracted
    assert verifier("math")(sample) == reward


def test_labels_may_be_numbers_or_boxed_themselves():
    assert verifier("math")(boxed("72", label=72)) == 1.0
    assert verifier("math")(boxed("72", label=72.0)) == 1.0
    assert verifier("math")(boxed("72", label=r"thus \boxed{72}")) == 1.0
    with pytest.raises(RecordError, match="label: missing"):
        verifier("math")(boxed("72", label=None))


verifier("math")(boxed("2^x", label="x"))  # the import of mpmath is not on the clock


@pytest.mark.parametrize("answer", EXPLOSIVE, ids=lambda answer: answer[:30])
def test_no_answer_takes_two_seconds(answer):
    start = time.process_time()
    assert verifier("math")(boxed(answer)) == 0.0
    assert verifier("math")(boxed("1", label=answer)) == 0.0
    assert time.process_time() - start < 2.0


def test_a_very_long_response_is_searched_quickly():
    start = time.process_time()
    assert verifier("math")(Sample(response=r"\boxed{" * 300_000, label="1")) == 0.0
    assert verifier("math")(Sample(response="{" * 2_000_000 + r"\boxed{1}", label="1")) == 1.0
    assert time.process_time() - start < 2.0


def test_threads_may_grade():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(verifier("math")(boxed(r"\frac{2}{4}", label="1/2"))))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_nothing_is_written_to_stdout_or_stderr(capfd):
    for answer in (r"\sqrt{4}", r"\frac{1}{", "x = ", "9^{9^{9^9}}"):
        verifier("math")(boxed(answer))
    assert capfd.readouterr() == ("", "")


def test_text_is_never_executed(tmp_path):
    for code in (f"open('{tmp_path}/x', 'w')", f"__import__('os').mkdir('{tmp_path}/x')"):
        verifier("math")(boxed(code))
        verifier("math")(boxed("\\text{" + code + "}"))
    assert list(tmp_path.iterdir()) == []


def test_verifiers_travel_to_worker_processes():
    assert pickle.loads(pickle.dumps(verifier("math"))) == verifier("math")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="0123456789xy+-*/^_=<>(){}[]\\., fracsqtpibodl%$&|!", max_size=40), st.text(max_size=20))
def test_no_text_raises(answer, label):
    assert verifier("math")(Sample(response="\\boxed{" + answer + "}", label=label)) in (0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(st.fractions(max_denominator=50), st.integers(1, 9))
def test_a_fraction_equals_its_expansions_and_no_other(value, factor):
    expanded = rf"\frac{{{value.numerator * factor}}}{{{value.denominator * factor}}}"
    assert equal(str(value), expanded)
    assert not equal(str(value + 1), expanded)
