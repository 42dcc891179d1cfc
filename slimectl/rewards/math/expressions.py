"""Parses an unambiguous mathematical expression into a tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from slimectl.rewards.math.tokens import BIG, SCALES, Token, UnreadableError, tokenize, word_set

Tree = tuple[Any, ...]
"""("num", value) · ("sym", name) · ("const", name) · (operator, operand, ...), operands being trees ·
("big", operator, bound names, key, low, high, body): a sum, product, integral or limit, with `key` for other bounds."""

MAX_NODES = 300
MAX_DEPTH = 24

_CLOSING = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil"}
_TRIGONOMETRIC = word_set("sin cos tan cot sec csc sinh cosh tanh")
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_FACTOR_NAMES = frozenset("abckmnrxyz")
"""Letters that form a product with a parenthesis after them, also within a sum. mu(k) is a value of mu."""

_LINEAR = re.compile(r"(?:\d*[A-Za-z]|\d+)(?:[-+](?:\d*[A-Za-z]|\d+))*")
"""A subscript that is an index. x_{ij} has two."""

_FACTORS = frozenset(("frac", "sqrt", "binom", "lfloor", "lceil")) | BIG
_APPLIED = frozenset("fgFG")
"""Letters that before a parenthesis are functions: f(x) + f(y) is not f(x + y)."""


@lru_cache(maxsize=8192)
def parse_expression(text: str) -> Tree | None:
    r"""Return the tree of an expression, or None if the text is not one or is ambiguous.

    >>> parse_expression("1 1/2") == ("add", ("num", Fraction(1)), ("num", Fraction(1, 2)))
    True
    >>> [parse_expression(text) for text in ("1 2", "42...", "1010_3", "5 half")]
    [None, None, None, None]
    """
    try:
        parser = _Parser(tokenize(text))
        tree = parser.expression()
        parser.expect("end")
    except (UnreadableError, RecursionError):
        return None
    return tree


class _Parser:
    """Recursive descent: sums, products, juxtaposition, postfixes, atoms. Raises UnreadableError."""

    def __init__(self, tokens: list[Token], bound: Sequence[str] = ()) -> None:
        self._tokens, self._at, self._nodes, self._depth, self._bars = tokens, 0, 0, 0, 0
        self._bound = list(bound)  # indices of the enclosing sums and integrals
        self._integrals = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _peek(self, offset: int = 1) -> Token:
        return self._tokens[min(self._at + offset, len(self._tokens) - 1)]

    def _take(self) -> Token:
        token = self._next
        self._at += token.kind != "end"
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise UnreadableError
        return token

    def _takes(self, *texts: str) -> str | None:
        if self._next.kind in ("sign", "command") and self._next.text in texts:
            return self._take().text
        return None

    def expect(self, text: str) -> None:
        token = self._take()
        if text not in (token.text, token.kind) or token.kind not in ("sign", "command", "end"):
            raise UnreadableError

    def expression(self) -> Tree:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError
        sign = self._takes("+", "-")
        tree = self._product()
        if sign == "-":
            tree = ("neg", tree)
        while sign := self._takes("+", "-"):
            negative = self._takes("-")
            term = self._product()
            tree = ("sub" if (sign == "-") != bool(negative) else "add", tree, term)
        self._depth -= 1
        return tree

    def _product(self) -> Tree:
        tree = self._juxtaposition()
        while sign := self._takes("*", "/", "bmod", "mod"):
            negative = self._takes("-")
            factor = self._juxtaposition(is_divisor=sign == "/")
            tree = ({"*": "mul", "/": "div"}.get(sign, "mod"), tree, ("neg", factor) if negative else factor)
            # 1/2 x is half of x, 1/2x and 1/xy divide by the product.
            while sign == "/" and self._begins_factor(self._next):
                if self._next.kind == "number":
                    raise UnreadableError
                tree = ("mul", tree, self._power())
        return tree

    def _juxtaposition(self, *, is_divisor: bool = False, is_argument: bool = False) -> Tree:
        first = self._next
        tree = self._mixed_number() or self._power()
        while True:
            token = self._next
            if token.kind == "scale" and first.kind == "number":
                tree = ("mul", tree, ("num", SCALES[self._take().text]))
                continue
            if not self._begins_factor(token) or (is_divisor and token.is_spaced):
                return tree
            if is_argument and (token.kind == "function" or token.text in "(["):
                return tree
            if token.kind == "number" and (is_argument or not self._is_power_factor(tree)):
                raise UnreadableError  # 1 2, x2, (3)4
            tree = ("mul", tree, self._power())

    def _is_power_factor(self, before: Tree) -> bool:
        """Whether a number after a factor is a factor too, as in a_k 2^k."""
        is_apart = self._next.is_spaced or self._peek(-1).text in ("}", ")", "]")
        return is_apart and self._peek().text == "^" and before[0] != "num"

    def _mixed_number(self) -> Tree | None:
        r"""1\frac12 and 1 1/2, a whole number and a fraction of whole numbers, or None."""
        integer = self._next
        if not _is_whole(integer):
            return None
        start = self._at
        if self._is_fraction(self._peek()):
            tokens = list(self._tokens)
            self._take()
            fraction = self._power()
            if _is_plain_fraction(fraction):
                return ("add", ("num", integer.value), fraction)
            if _is_plain_fraction(fraction[1]):
                raise UnreadableError  # 2\frac12^2: what is squared?
            self._tokens = tokens
        elif (
            _is_whole(self._peek(1))
            and self._peek(1).is_spaced
            and self._peek(2).text == "/"
            and _is_whole(self._peek(3))
        ):
            above, below = self._peek(1).value, self._peek(3).value
            self._at += 4
            if above and below and above < below and self._next.text not in ("^", "!", "_"):
                return ("add", ("num", integer.value), ("num", Fraction(above, below)))
            raise UnreadableError
        self._at = start
        return None

    def _is_fraction(self, token: Token) -> bool:
        return token.kind == "command" and token.text == "frac"

    def _begins_factor(self, token: Token) -> bool:
        if self._is_differential():
            return False
        if token.kind in ("number", "symbol", "constant", "function", "matrix"):
            return True
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self._bars)
        return token.kind == "command" and token.text in _FACTORS

    def _power(self) -> Tree:
        """An atom with its powers, factorials and degrees."""
        tree = self._atom()
        while True:
            if self._takes("^"):
                tree = ("pow", tree, self._exponent())
            elif self._takes("!"):
                tree = ("factorial2" if self._takes("!") else "factorial", tree)
            elif self._takes("degree"):
                tree = ("degree", tree)
            else:
                return tree

    def _exponent(self) -> Tree:
        negative = self._takes("-")
        if self._next.kind == "function":
            raise UnreadableError
        tree = self._atom()
        if self._takes("^"):
            tree = ("pow", tree, self._exponent())
        return ("neg", tree) if negative else tree

    def _atom(self) -> Tree:
        token = self._take()
        if token.kind == "number":
            if self._next.text == "_":
                raise UnreadableError  # a numeral of another base
            return ("num", token.value)
        if token.kind == "symbol" or (token.kind == "constant" and self._next.text in ("_", "'")):
            return self._symbol(token.text)
        if token.kind == "constant":
            return ("sym" if token.text in self._bound else "const", token.text)  # i, if it is an index
        if token.kind == "matrix":
            return ("sym", f"matrix {token.text}")
        if token.kind == "command" and token.text in BIG:
            return self._big(token.text)
        if token.kind == "function":
            return self._function(_ALIASES.get(token.text, token.text))
        if token.text in _CLOSING:
            bars, self._bars = self._bars, 0
            tree = self.expression()
            self._bars = bars
            self.expect(_CLOSING[token.text])
            return (token.text[1:], tree) if token.kind == "command" else tree
        if token.text == "|":
            self._bars += 1
            tree = self.expression()
            self._bars -= 1
            self.expect("|")
            return ("abs", tree)
        if token.kind == "command" and token.text in ("frac", "binom"):
            return ("div" if token.text == "frac" else "binom", self._argument(), self._argument(is_last=True))
        if token.kind == "command" and token.text == "sqrt":
            return self._root()
        raise UnreadableError

    def _argument(self, *, is_last: bool = False) -> Tree:
        r"""Read an argument of \frac or \binom: a group, or a single digit or letter, as in TeX."""
        token = self._next
        if token.kind == "number" and not token.text.isdigit():
            raise UnreadableError
        if token.kind == "number" and len(token.text) > 1:
            if is_last or len(token.text) > 2:
                raise UnreadableError  # \frac123
            digits = token.text
            self._tokens[self._at] = Token("number", digits[1], False, Fraction(digits[1]))
            return ("num", Fraction(digits[0]))
        tree = self._atom()
        if token.kind == "number" and is_last and self._next.kind == "number":
            raise UnreadableError
        return tree

    def _root(self) -> Tree:
        index: Tree = ("num", Fraction(2))
        if self._takes("["):
            index = self.expression()
            self.expect("]")
        return ("root", self._atom(), index)

    def _symbol(self, name: str) -> Tree:
        if self._takes("_"):
            name += "_" + self._subscript()
        while self._takes("'", "prime"):
            name += "'"
        if self._next.text != "(" or self._next.kind != "sign":
            return ("sym", name)
        is_function = name[0] in _APPLIED and (len(name) == 1 or name[1] in "'_")
        base = name.partition("_")[0]
        if self._bound and base not in self._bound and (base != name or not is_function):
            is_function = base not in _FACTOR_NAMES and not self._next.is_spaced
        if not is_function and name != "Gamma":
            return ("sym", name)
        self._take()
        arguments = self._arguments(")")
        if name == "Gamma" and len(arguments) == 1:
            return ("factorial", ("sub", arguments[0], ("num", Fraction(1))))
        return ("apply", name, *arguments)

    def _big(self, operator: str) -> Tree:
        """A sum, product, integral or limit with its bounds and its body, which for integrals ends at dx."""
        names, key, low, high = "", "", None, None
        for _ in range(2):
            if self._takes("_"):
                names, key, low = self._lower_bound()
            elif self._takes("^"):
                high = self._bound_end()
        if operator in ("sum", "prod") and not key and not names and low and low[0] == "sym" and len(low[1]) == 1:
            names, low = low[1], None
        is_integral = operator.endswith("int")
        bound = [*names.split(), *(self._differentials() if is_integral else [])]
        self._bound += bound or ["?"]
        self._integrals += is_integral
        body = self._body() if is_integral else self._product()
        if is_integral:
            names = " ".join(self._taken_differentials(operator))
        self._integrals -= is_integral
        del self._bound[-len(bound or ["?"]) :]
        return ("big", operator, names, key, low, high, indexed(body, tuple(names.split())))

    def _lower_bound(self) -> tuple[str, str, Tree | None]:
        if self._next.text != "{":
            return "", "", self._bound_end()
        self._take()
        if self._next.kind == "where":
            key, *names = self._take().text.split()
            self.expect("}")
            return " ".join(names), key, None
        name = ""
        if self._peek().text == "from" and len(self._next.text) == 1:
            name = self._take().text
            self._take()
        low = self.expression()
        self.expect("}")
        return name, "", low

    def _bound_end(self) -> Tree:
        token = self._next
        if token.kind == "number" and len(token.text) > 1:
            raise UnreadableError  # \int_0^12x: is it 12 or 1?
        if token.kind not in ("number", "symbol"):
            return self._atom()
        self._take()
        return ("num", token.value) if token.kind == "number" else ("sym", token.text)

    def _is_differential(self) -> bool:
        first, second = self._peek(0), self._peek(1)
        is_name = second.kind == "symbol" and not second.is_spaced
        return self._integrals > 0 and first.kind == "symbol" and first.text == "d" and is_name

    def _differentials(self) -> list[str]:
        """The names after every later d: the variables of the integral and of the enclosing ones."""
        pairs = zip(self._tokens[self._at :], self._tokens[self._at + 1 :], strict=False)
        return [second.text for first, second in pairs if first.text == "d" and second.kind == "symbol"]

    def _taken_differentials(self, operator: str) -> list[str]:
        names: list[str] = []
        while self._is_differential() and (not names or operator in ("iint", "iiint")):
            self._take()
            names.append(self._take().text)
        if not names or any(len(name) > 1 and not name.isalpha() for name in names):
            raise UnreadableError
        return [*names, *"xyz"] if names[0].isupper() else names  # dA

    def _body(self) -> Tree:
        return ("num", Fraction(1)) if self._is_differential() else self.expression()

    def _subscript(self) -> str:
        token = self._take()
        if token.text != "{":
            if token.kind in ("number", "symbol", "constant"):
                return token.text
            raise UnreadableError
        parts: list[str] = []
        while self._next.text != "}":
            if self._next.kind == "end" or len(parts) > 12:
                raise UnreadableError
            parts.append(self._take().text)
        self._take()
        return "".join(parts)

    def _arguments(self, closing: str) -> list[Tree]:
        arguments = [self.expression()]
        while self._takes(","):
            arguments.append(self.expression())
        self.expect(closing)
        return arguments

    def _function(self, name: str) -> Tree:
        if name in ("max", "min", "gcd", "lcm"):
            self.expect("(")
            return (name, *self._arguments(")"))
        base: Tree | None = None
        if name in ("log", "lg") and self._takes("_"):
            base = self._base()
        power = self._exponent() if self._takes("^") else None
        if self._next.text in ("(", "[", "{", "|") and self._next.kind == "sign":
            argument = self._atom()
        else:
            negative = self._takes("-")
            argument = self._juxtaposition(is_argument=True)
            argument = ("neg", argument) if negative else argument
        return _applied(name, argument, base, power)

    def _base(self) -> Tree:
        """Read the base of a logarithm. Of ungrouped digits before an argument it is only the first, as in TeX."""
        token = self._next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            follows = self._peek()
            if not self._begins_factor(follows) and follows.text != "-":
                self._tokens[self._at] = Token("number", token.text[1:], True, Fraction(token.text[1:]))
                return ("num", Fraction(token.text[0]))
        return self._atom()


def indexed(body: Tree, names: tuple[str, ...]) -> Tree:
    """Write a_k as a function of k for every bound name k. So a_{k+1} is a_{1+k}, and a_k is not constant."""
    if body[0] == "sym":
        base, _, script = body[1].partition("_")
        bound = [name for name in names if name in script]
        if not bound:
            return body
        if not _LINEAR.fullmatch(script):
            return ("apply", body[1], *(("sym", name) for name in bound))
        return ("apply", base + "_", _Parser(tokenize(script), bound).expression())
    return tuple(indexed(part, names) if isinstance(part, tuple) else part for part in body)


def _is_plain_fraction(tree: Any) -> bool:
    is_quotient = isinstance(tree, tuple) and tree[0] == "div"
    return is_quotient and all(part[0] == "num" and part[1].denominator == 1 for part in tree[1:])


def _is_whole(token: Token) -> bool:
    return token.kind == "number" and token.text.replace(",", "").isdigit()


def _applied(name: str, argument: Tree, base: Tree | None, power: Tree | None) -> Tree:
    if name == "sqrt":
        tree: Tree = ("root", argument, ("num", Fraction(2)))
    elif name == "exp":
        tree = ("pow", ("const", "e"), argument)
    elif name in ("floor", "ceil", "abs"):
        tree = (name, argument)
    elif name == "ln":
        tree = ("ln", argument)
    elif name in ("log", "lg"):
        tree = ("log", argument, base or ("num", Fraction(10)))
    elif name in _TRIGONOMETRIC and power == ("neg", ("num", Fraction(1))):
        return ("arc" + name, argument)
    else:
        tree = (name, argument)
    return tree if power is None else ("pow", tree, power)
