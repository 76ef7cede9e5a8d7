"""A small filter language over table rows: ``kind = sensor and intensity >= 3 and variant in (0, 1)``.

Grammar (no code is ever evaluated)::

    expression = conjunction { "or" conjunction }
    conjunction = condition { "and" condition }
    condition = "not" condition | "(" expression ")" | comparison
    comparison = column operator value | column [ "not" ] "in" "(" value { "," value } ")"
    operator = "=" | "==" | "!=" | "<" | "<=" | ">" | ">="

Columns are ``kind`` (text), ``intensity``, ``variant`` and every parameter (numbers).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agentpipe.environments.csvio import parse_number
from agentpipe.environments.parameters import KINDS, PARAMETER_INDEX, PARAMETER_NAMES
from agentpipe.environments.table import TableRow
from agentpipe.errors import TableError

Condition = Callable[[TableRow], bool]
Value = float | str

_TOKEN = re.compile(
    r"\s*(?:(?P<symbol><=|>=|==|!=|[=<>(),])|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<word>[A-Za-z_]\w*))"
)
_OPERATORS: dict[str, Callable[[Value, Value], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NUMBERS = ("intensity", "variant", *PARAMETER_NAMES)
_EXAMPLE = "write for example: kind = sensor and intensity >= 3"
_MAX_DEPTH = 40


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


def parse_where(text: str) -> Condition:
    """A predicate over rows.

    Raises:
        TableError: the expression is empty or malformed, or names an unknown column; says where.
    """
    parser = _Parser(text)
    condition = parser.expression(0)
    if parser.token.kind != "end":
        raise parser.fail(f"unexpected {parser.token.text!r}")
    return condition


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            at = position + len(text[position:]) - len(text[position:].lstrip())
            raise _error(text, at, f"unexpected {text[at]!r}")
        kind = str(match.lastgroup)
        tokens.append(_Token(kind, match.group(kind), match.start(kind)))
        position = match.end()
    return [*tokens, _Token("end", "the end", len(text))]


def _error(text: str, position: int, message: str) -> TableError:
    return TableError(f"in the filter: {message}", filter=repr(text), character=position + 1, remedy=_EXAMPLE)


def _column(row: TableRow, name: str) -> Value:
    if name in PARAMETER_INDEX:
        return row.values[PARAMETER_INDEX[name]]
    values: dict[str, Value] = {"kind": row.kind, "intensity": row.intensity, "variant": row.variant}
    return values[name]


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.index = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.index]

    def fail(self, message: str) -> TableError:
        return _error(self.text, self.token.position, message)

    def take(self, *words: str) -> str | None:
        """The next token when it is one of ``words`` (case does not matter), consumed."""
        token = self.token
        if token.kind in ("word", "symbol") and token.text.lower() in words:
            self.index += 1
            return token.text.lower()
        return None

    def need(self, word: str) -> None:
        if self.take(word) is None:
            raise self.fail(f"{word!r} expected, found {self.token.text!r}")

    def expression(self, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            raise self.fail("nested too deeply")
        terms = [self.conjunction(depth)]
        while self.take("or"):
            terms.append(self.conjunction(depth))
        return terms[0] if len(terms) == 1 else lambda row: any(term(row) for term in terms)

    def conjunction(self, depth: int) -> Condition:
        terms = [self.condition(depth)]
        while self.take("and"):
            terms.append(self.condition(depth))
        return terms[0] if len(terms) == 1 else lambda row: all(term(row) for term in terms)

    def condition(self, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            raise self.fail("nested too deeply")
        if self.take("not"):
            inner = self.condition(depth + 1)
            return lambda row: not inner(row)
        if self.take("("):
            inner = self.expression(depth + 1)
            self.need(")")
            return inner
        return self.comparison()

    def comparison(self) -> Condition:
        name = self.token.text
        if self.token.kind != "word" or (name != "kind" and name not in _NUMBERS):
            raise self.fail(f"column expected, found {name!r}; columns are kind, {', '.join(_NUMBERS)}")
        self.index += 1
        negated = self.take("not") is not None
        if self.take("in"):
            values = self.value_list(name)
            return lambda row: (_column(row, name) in values) != negated
        sign = None if negated else self.take(*_OPERATORS)
        if sign is None or (name == "kind" and sign not in ("=", "==", "!=")):
            signs = "=, != or in" if name == "kind" else "=, !=, <, <=, >, >= or in"
            raise self.fail(f"{signs} expected after {name}")
        value, compare = self.value(name), _OPERATORS[sign]
        return lambda row: compare(_column(row, name), value)

    def value_list(self, name: str) -> Sequence[Value]:
        self.need("(")
        values = [self.value(name)]
        while self.take(","):
            values.append(self.value(name))
        self.need(")")
        return values

    def value(self, name: str) -> Value:
        token = self.token
        if name == "kind":
            text = token.text.strip("'\"")
            if token.kind not in ("word", "text") or text not in KINDS:
                raise self.fail(f"one of {', '.join(KINDS)} expected, found {token.text!r}")
            self.index += 1
            return text
        number = parse_number(token.text) if token.kind == "number" else None
        if number is None:
            raise self.fail(f"number expected for {name}, found {token.text!r}")
        self.index += 1
        return number
