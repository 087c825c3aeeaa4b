"""The SQL of conditions and SQL columns: one parser, and one rule for names of columns.

A text is parsed by sqlparser, which is DataFusion's own parser. Names of columns are found in the
tree and replaced in the text at their positions; all else is handed on as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import pyarrow as pa

from geneva.errors import ColumnNotFoundError, UserInputError
from geneva.render.text import did_you_mean, listed, shorten, shown_columns

MAX_TOKENS = 5_000
"""Names, keywords and operators in one text; values and commas don't count: lists may be long."""
MAX_CHARACTERS = 4_000_000
MAX_NESTING = 500
"""Levels of the tree. A chain of ANDs or ORs has one for each: DataFusion's planner recurses, and
overflows its stack, which ends the process, at 2,000 and more."""

ROW_META = {
    "_rowid": pa.uint64(),
    "_rowaddr": pa.uint64(),
    "_rowoffset": pa.uint64(),
    "_row_created_at_version": pa.uint64(),
    "_row_last_updated_at_version": pa.uint64(),
}
"""What Lance knows of every row: names that are there without being columns."""

_VOLATILE = frozenset(
    {"now", "today", "current_date", "current_time", "current_timestamp"}
    | {"localtime", "localtimestamp", "rand", "random", "version"}
    | {"uuid", "uuidv4", "uuidv7", "gen_random_uuid"}
)
_AGGREGATES = frozenset(
    {"any_value", "approx_distinct", "approx_median", "approx_percentile_cont", "array_agg"}
    | {"avg", "bit_and", "bit_or", "bit_xor", "bool_and", "bool_or", "corr", "count", "covar"}
    | {"covar_pop", "covar_samp", "first_value", "grouping", "last_value", "max", "mean"}
    | {"median", "min", "nth_value", "percentile_cont", "stddev", "stddev_pop", "stddev_samp"}
    | {"string_agg", "sum", "var", "var_pop", "var_samp"}
)
"""To name them early; any other is found in the plan."""
_SUBQUERIES = frozenset({"Subquery", "InSubquery", "Exists", "AnyOpSubquery", "AllOpSubquery"})
_COMPARISONS = frozenset({"Eq", "NotEq", "Lt", "LtEq", "Gt", "GtEq", "Spaceship"})
_COMPARING_FUNCTIONS = frozenset({"greatest", "least", "nullif"})
_NOT_COLUMNS = frozenset({"name", "data_type", "field", "uses_odbc_syntax"})
"""Parts of nodes whose names are those of functions, types and units."""

Path: TypeAlias = tuple[str, ...]
"""The exact name of a column, then those of fields in structs."""
Node: TypeAlias = Any
"""A part of the parse tree: dicts of one key, lists and scalars, as sqloxide gives them."""


@dataclass(frozen=True, slots=True)
class Name:
    """One name as it was written."""

    value: str
    quote: str | None
    """The character that it is quoted with; such a name is exact."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A column, or a field in one, at its place in a text."""

    start: int
    end: int
    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Parsed:
    """An SQL expression, as it was written and as it was understood."""

    text: str
    references: tuple[Reference, ...]
    functions: tuple[str, ...]
    """The names of the functions that it calls, as they were written."""
    intervals: tuple[tuple[int, int], ...]
    """Where the intervals are that something is compared with."""
    computed_intervals: tuple[Node, ...]
    """What is compared, has an interval in it, and is more than one."""

    def volatile_part(self) -> str | None:
        """What has another value at another time or place; None for nothing."""
        for name in self.functions:
            if name.lower() in _VOLATILE:
                return name
        meta = (r.names[0].value for r in self.references if len(r.names) == 1)
        return next((name for name in meta if name.lower() in ROW_META), None)


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """An SQL expression whose names were found in a table."""

    parsed: Parsed
    paths: tuple[Path, ...]
    """The path of each reference, in the order of `parsed.references`."""

    def distinct_paths(self) -> tuple[Path, ...]:
        """Every path once, in order of appearance."""
        return tuple(dict.fromkeys(self.paths))

    def written(self, name: Callable[[Path], str], interval: Callable[[str], str] = str) -> str:
        """The text with other words for its columns, and for intervals that are compared."""
        edits = [
            (r.start, r.end, name(path))
            for r, path in zip(self.parsed.references, self.paths, strict=True)
        ]
        text = self.parsed.text
        edits += [(start, end, interval(text[start:end])) for start, end in self.parsed.intervals]
        for start, end, words in sorted(edits, reverse=True):
            text = text[:start] + words + text[end:]
        return text

    def exact(self) -> str:
        """The text with every column under its exact name, which no later column can change.

        In backticks, unless it was written in lower case as it is: that is exact to all.
        """
        text, plain = self.parsed.text, set()
        for reference, path in zip(self.parsed.references, self.paths, strict=True):
            if all(map(_is_exact, reference.names, path)):
                plain.add((path, text[reference.start : reference.end]))
        as_written = dict(plain)
        return self.written(lambda path: as_written.get(path) or quoted_path(path))


def quoted_path(path: Path) -> str:
    """A path as DataFusion reads it, whatever else has these names."""
    head, *fields = path
    # Not with dots: `t`.`x` is a column of the table `t` first of all.
    return quoted_name(head) + "".join("['" + f.replace("'", "''") + "']" for f in fields)


def quoted_name(name: str) -> str:
    """A name in backticks."""
    return "`" + name.replace("`", "``") + "`"


def shown(sql: str) -> str:
    """An expression as messages show it."""
    return repr(shorten(sql, 300))


def refusal(sql: str, reason: str) -> UserInputError:
    """The error for an expression that can't be used, and why."""
    return UserInputError(f"The SQL expression {shown(sql)} can't be used: {reason}")


# -- parsing


@lru_cache(maxsize=16)
def parse_sql(sql: str) -> Parsed:
    """Parse one expression over the columns of one row; refuse all else."""
    _check_size(sql)
    root = _parse_tree(sql)
    found = _Findings(sql)
    found.walk(root)
    return Parsed(
        sql,
        tuple(sorted(found.references, key=lambda r: r.start)),
        tuple(found.functions),
        tuple(found.intervals),
        tuple(found.computed_intervals),
    )


_TOKEN = re.compile(
    r"""(?P<value> [eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | --[^\n]* | \d[\w.]*(?:[eE][-+]?\d+)?
                 | [,(\[]\s*[-+](?=[\d.]) | \s+ | ,)
      | (?P<comment> /\*(?:.*?\*/|.*)) | (?P<dollar> \$)
      | `(?:[^`]|``)*` | "(?:[^"]|"")*" | \w+ | .""",
    re.VERBOSE | re.DOTALL,
)
"""Strings, quoted names and comments end where the parser ends them: what it knows beyond these
(comments in comments, $$strings$$) is refused, so that nothing can hide from being counted."""


def _check_size(sql: str) -> None:
    """Refuse what would overflow the stack of a parser or a planner, before one sees it."""
    advice = "Compare with a list (x IN (1, 2, 3)), or add a column that says which rows."
    if len(sql) > MAX_CHARACTERS:
        raise refusal(sql, f"it has more than {MAX_CHARACTERS:,} characters. {advice}")
    tokens = 0
    for found in _TOKEN.finditer(sql):
        if found.lastgroup is None:
            tokens += 1
            if tokens > MAX_TOKENS:
                reason = f"it has more than {MAX_TOKENS:,} names, keywords and operators. {advice}"
                raise refusal(sql, reason)
        elif found.lastgroup == "dollar":
            raise refusal(sql, "'$' stands for a value that nobody gives.")
        elif found.lastgroup == "comment" and "/*" in found.group()[2:]:
            raise refusal(sql, "it has a comment in a comment.")


def _sqloxide() -> Any:
    """The parser, imported where there is SQL to parse: most workers never have any."""
    import sqloxide  # type: ignore[import-untyped]

    return sqloxide


def _parse_tree(sql: str) -> Node:
    """The tree of an expression in parentheses of ours, which it can't close."""
    try:
        text = f"{_BEFORE}{_LONG_LIST.sub(_shortened, sql)}{_AFTER}"
        statements = _sqloxide().parse_sql(sql=text, dialect="generic")
    except ValueError as error:
        raise refusal(sql, _parser_message(str(error))) from None
    select = statements[0]["Query"]["body"].get("Select", {}) if len(statements) == 1 else {}
    columns = select.get("projection", [])
    inner = columns[0].get("UnnamedExpr", {}) if len(columns) == 1 else {}
    if "Subquery" in inner:
        raise refusal(sql, _NO_SUBQUERY)
    if "Nested" not in inner or select["from"]:
        raise refusal(sql, "it is not one expression: look at its parentheses and commas.")
    return inner["Nested"]


_BEFORE, _AFTER = "SELECT (", "\n)"
_LONG_LIST = re.compile(r"(?<=\()([-+]?[\d.]+)((?:\s*,\s*[-+]?[\d.]+){50,})(?=\s*\))")
"""Numbers in parentheses: a tree of 100,000 takes seconds, and says no more than one of two."""
_NO_SUBQUERY = "a condition or column is made from one row, and can't ask a query of its own."


def _shortened(numbers: re.Match[str]) -> str:
    """The first two numbers of a list, and blanks, so that all else stays where it is."""
    first, rest = numbers.group(1), numbers.group(2)
    second = re.match(r"\s*,\s*[-+]?[\d.]+", rest)
    assert second is not None
    return first + second.group() + re.sub(r"[^\n]", " ", rest[second.end() :])


_LITERAL = r"(?:[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|'(?:[^']|'')*'|NULL)"
_IN_LIST = re.compile(
    rf"""[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | `(?:[^`]|``)*` | "(?:[^"]|"")*" | --[^\n]*
       | (\bIN\s*\() \s* ((?:{_LITERAL}\s*,\s*){{50,}}{_LITERAL}) (?=\s*\))""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
"""Long lists that something is looked up in; strings, names and comments are stepped over."""


def with_short_lists(sql: str) -> str:
    """The text with one literal of each kind in long lists: all that its type depends on.

    DataFusion takes a tenth of a millisecond for each literal, every time it plans.
    """
    return _IN_LIST.sub(lambda found: found[1] + _kinds(found[2]) if found[1] else found[0], sql)


def _kinds(literals: str) -> str:
    """The longest literal of each kind in a list."""
    longest: dict[str, str] = {}
    for literal in re.findall(_LITERAL, literals, re.IGNORECASE):
        sign = literal[0] if literal[0] in "-'nN" else ""
        kind = sign if sign == "'" or not set(literal) & set(".eE") else f"{sign}."
        if len(literal) > len(longest.get(kind, "")):
            longest[kind] = literal
    return ", ".join(longest.values())


def _parser_message(message: str) -> str:
    reason = message.split("sql parser error: ")[-1].strip().rstrip(".")
    if "recursion limit" in reason:
        return "it is nested too deeply (parentheses, calls, CASE in CASE)."
    reason = re.sub(r" at Line: \d+, Column: (\d+)", "", reason)
    reason = reason.replace("found: )", "found: its end").replace("found: EOF", "found: its end")
    return f"{reason}. Look at its parentheses, quotes and keywords."


class _Findings:
    """What a walk through the tree of an expression found."""

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._lines = [0, *accumulate(len(line) + 1 for line in sql.split("\n"))]
        self.references: list[Reference] = []
        self.functions: list[str] = []
        self.intervals: list[tuple[int, int]] = []
        self.computed_intervals: list[Node] = []

    def walk(self, root: Node) -> None:
        """Look at every node; not by recursion, which trees are too deep for."""
        waiting: list[tuple[Node, int]] = [(root, 0)]
        while waiting:
            node, depth = waiting.pop()
            if depth > 2 * MAX_NESTING:
                raise refusal(
                    self._sql,
                    f"it is nested more than {MAX_NESTING} levels deep, each AND and OR in a row "
                    "being one. Compare with a list (x IN (1, 2, 3)).",
                )
            if isinstance(node, list | tuple):
                waiting += [(each, depth) for each in node]
            elif isinstance(node, dict):
                for kind, content in node.items():
                    waiting += [(each, depth + 1) for each in self._visit(kind, content)]

    def _visit(self, kind: str, content: Node) -> Iterable[Node]:
        """Take note of a node; return the parts of it to look at."""
        match kind:
            case "Identifier":
                self._refer([content])
                return ()
            case "CompoundIdentifier":
                self._refer(content)
                return ()
            case "CompoundFieldAccess":
                return self._access(content)
            case "Placeholder":
                raise refusal(self._sql, f"{content!r} stands for a value that nobody gives.")
            case "Value":
                value = content["value"]
                return (value,) if "Placeholder" in value else ()
            case "Collate":
                raise refusal(self._sql, "COLLATE is not known here.")
            case "Lambda":
                raise refusal(self._sql, "functions of its own (x -> ...) are not known here.")
            case "Function":
                self._call(content)
        if kind in _SUBQUERIES:
            raise refusal(self._sql, _NO_SUBQUERY)
        self._compare(kind, content)
        if kind in _NOT_COLUMNS or not isinstance(content, dict):
            return () if kind in _NOT_COLUMNS else (content,)
        return [{part: inner} for part, inner in content.items() if part not in _NOT_COLUMNS]

    def _call(self, function: Node) -> None:
        name = ".".join(_ident(part)["value"] for part in function["name"])
        self.functions.append(name)
        if function["over"] is not None:
            raise refusal(self._sql, f"{name}(...) OVER is made from many rows. {_ONE_ROW}")
        if name.lower() in _AGGREGATES or function["within_group"] or function["filter"]:
            raise refusal(self._sql, f"{name}(...) is made from many rows. {_ONE_ROW}")

    def _refer(self, idents: Sequence[Node], end: int | None = None, more: Path = ()) -> None:
        names = [Name(i["value"], i["quote_style"]) for i in idents]
        start, stop = self._place(idents[0], "start"), self._place(idents[-1], "end")
        written = self._sql[start:stop]
        if re.sub(r"\s*\.\s*", ".", written) != ".".join(map(_as_written, names)):
            raise refusal(self._sql, f"a name in it can't be found again: {written!r}.")
        fields = (Name(field, "'") for field in more)
        self.references.append(Reference(start, end or stop, (*names, *fields)))

    def _access(self, access: Node) -> Iterable[Node]:
        """`s['u']`, fields of structs by name, as far as they go; the rest is looked at."""
        root, chain = access["root"], list(access["access_chain"])
        idents = root.get("CompoundIdentifier") or [root.get("Identifier")]
        if idents[0] is None:
            return [root, *(_subscript(each) for each in chain)]
        fields, end = [], None
        while chain:
            value = _subscript(chain[0]).get("Index", {}).get("index", {}).get("Value", {})
            text = value.get("value", {}).get("SingleQuotedString")
            closing = None
            if text is not None:
                closing = re.compile(r"\s*\]").match(self._sql, self._place(value, "end"))
            if closing is None:
                break
            fields.append(text)
            end = closing.end()
            chain.pop(0)
        self._refer(idents, end, tuple(fields))
        return [_subscript(each) for each in chain]

    def _compare(self, kind: str, content: Node) -> None:
        """Take note of intervals that something is compared with."""
        for operand in _operands(kind, content):
            if "Value" in operand or "interval" not in str(operand).lower():
                continue
            place = self._interval(operand)
            if place is None:
                self.computed_intervals.append(operand)
            else:
                self.intervals.append(place)

    def _interval(self, operand: Node) -> tuple[int, int] | None:
        """Where an interval is written, if the operand is one and no more."""
        while "Nested" in operand:
            operand = operand["Nested"]
        value = operand.get("Interval", {}).get("value", {}).get("Value")
        if value is None:
            return None
        begin, end = self._place(value, "start"), self._place(value, "end")
        before = re.search(r"\binterval\s*$", self._sql[:begin], re.IGNORECASE)
        unit = operand["Interval"]["leading_field"]
        after = re.compile(r"\s*\w+" if unit else r"").match(self._sql, end)
        if before is None or after is None:
            return None
        return before.start(), after.end()

    def _place(self, node: Node, which: str) -> int:
        at = node["span"][which]
        line, column = int(at["line"]), int(at["column"])
        return self._lines[line - 1] + column - 1 - (len(_BEFORE) if line == 1 else 0)


_ONE_ROW = "A condition or column is made from one row."


def _ident(part: Node) -> Node:
    return part.get("Identifier") or next(iter(part.values()))["name"]


def _subscript(step: Node) -> Node:
    """What is in brackets; a name behind a dot is no column, and DataFusion refuses it."""
    return step.get("Subscript") or {}


def _operands(kind: str, content: Node) -> Iterator[Node]:
    """What a node compares with each other."""
    if kind == "BinaryOp" and content["op"] in _COMPARISONS:
        yield from (content["left"], content["right"])
    elif kind in ("IsDistinctFrom", "IsNotDistinctFrom"):
        yield from content
    elif kind == "Between":
        yield from (content["expr"], content["low"], content["high"])
    elif kind == "InList":
        yield content["expr"]
        yield from content["list"]
    elif kind == "Case" and content["operand"] is not None:
        yield content["operand"]
        yield from (when["condition"] for when in content["conditions"])
    elif (
        kind == "Function"
        and content["name"][0].get("Identifier", {}).get("value", "").lower()
        in _COMPARING_FUNCTIONS
    ):
        arguments = content["args"].get("List", {}).get("args", [])
        yield from (a["Unnamed"]["Expr"] for a in arguments if "Expr" in a.get("Unnamed", {}))


def _is_exact(name: Name, found: str | None) -> bool:
    """Whether a name without quotes is the column's, to those who ignore letter case as well."""
    return name.quote is None and name.value == found == name.value.lower()


def _as_written(name: Name) -> str:
    if name.quote is None:
        return name.value
    return name.quote + name.value.replace(name.quote, name.quote * 2) + name.quote


# -- names


def resolve(parsed: Parsed, schema: pa.Schema) -> Resolved:
    """Find the columns of an expression in a table.

    A quoted name, in backticks or double quotes, is exact. One without quotes is the column of
    exactly that name, or else the only one of that name in other letter case.
    """
    return Resolved(parsed, tuple(_find_path(parsed.text, r, schema) for r in parsed.references))


def ambiguous_name(parsed: Parsed, schema: pa.Schema) -> str | None:
    """A name that could be read in two ways before there was one rule; None if there is none.

    In double quotes it was a literal to Lance and a column to DataFusion; without quotes Lance
    took it as written and DataFusion in lower case.
    """
    for reference in parsed.references:
        known = _known(schema)
        for name in reference.names:
            found = _match(name, known)
            alike = _alike(name.value, known) if name.quote is None else []
            if name.quote == '"' or (len(alike) > 1 and not _is_exact(name, found)):
                return _as_written(name)
            kind = known.get(found or "")
            known = _fields(kind) if kind is not None else {}
    return None


def _find_path(sql: str, reference: Reference, schema: pa.Schema) -> Path:
    known = _known(schema)
    path: list[str] = []
    for name in reference.names:
        found = _match(name, known)
        if found is None:
            raise _missing(sql, ".".join([*path, name.value]), name, known, schema)
        path.append(found)
        known = _fields(known[found])
    return tuple(path)


def _known(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {**ROW_META, **{f.name: f.type for f in schema if is_readable_name(f.name)}}


def _fields(kind: pa.DataType) -> dict[str, pa.DataType]:
    return {f.name: f.type for f in kind} if pa.types.is_struct(kind) else {}


def _match(name: Name, known: dict[str, pa.DataType]) -> str | None:
    if name.value in known:
        return name.value
    alike = _alike(name.value, known) if name.quote is None else []
    return alike[0] if len(alike) == 1 else None


def _alike(name: str, known: Iterable[str]) -> list[str]:
    return [each for each in known if each.lower() == name.lower()]


def _missing(
    sql: str, path: str, name: Name, known: dict[str, pa.DataType], schema: pa.Schema
) -> ColumnNotFoundError:
    alike = _alike(name.value, known)
    if len(alike) > 1:
        choice = " or ".join(map(quoted_name, alike))
        return ColumnNotFoundError(
            f"{path!r}, which {shown(sql)} names, can be more than one column: write {choice}."
        )
    if known.keys() >= ROW_META.keys():
        return ColumnNotFoundError(missing_column(path, schema, sql))
    hint = did_you_mean(name.value, known) or (f" It has {listed(known)}." if known else "")
    return ColumnNotFoundError(f"{path!r}, which {shown(sql)} names, is not in the table.{hint}")


def is_readable_name(name: str) -> bool:
    """Whether Lance finds a column by its name. It stores names with backticks, and can't."""
    return "`" not in name


def check_readable(names: Iterable[str], schema: pa.Schema) -> None:
    """Refuse columns that are there, and that Lance can't read."""
    for name in names:
        if not is_readable_name(name):
            raise ColumnNotFoundError(missing_column(name, schema))


def missing_column(name: str, schema: pa.Schema, sql: str | None = None) -> str:
    """What to say of a column that is not there, or can't be read."""
    if name in schema.names and not is_readable_name(name):
        return (
            f"Column {name!r} can't be read: Lance finds no column whose name has a backtick. "
            f'Rename it (table.alter_columns({{"path": {quoted_name(name)!r}, "rename": ...}})), '
            "or leave it out: name the columns to read."
        )
    known = shown_columns(schema.names)
    where = f", which {shown(sql)} names," if sql is not None and sql != name else ""
    return f"Column {name!r}{where} is not in the table." + (
        did_you_mean(name, known) or f" It has {listed(known)}."
    )


# -- parts of an expression


def text_of(part: Node) -> str:
    """A part of a parse tree as SQL, to ask what type it has; what is computed is never this."""
    sqloxide = _sqloxide()
    (statement,) = sqloxide.parse_sql(sql="SELECT 1", dialect="generic")
    statement["Query"]["body"]["Select"]["projection"] = [{"UnnamedExpr": part}]
    (text,) = sqloxide.restore_ast(ast=[statement])
    return str(text).removeprefix("SELECT ")
