"""What a function's code does, told alike wherever and however it is written.

By its syntax tree where the source is found and compiles to the very bytecode at hand; else by
its bytecode.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import linecache
import pathlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from geneva.user_code import NOT_THE_USERS, is_user_file, names_in, nested_codes

Digest = Callable[[Any], bytes]
"""Digests a constant of the code."""


def node_digest(tag: str, *parts: str | bytes) -> bytes:
    """Hash a tagged list of parts; lengths keep ("ab", "c") apart from ("a", "bc")."""
    state = hashlib.blake2b(digest_size=20)
    for part in (tag, *parts):
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Compile in silence: Python warned of the user's source when it was imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> tuple[dict[tuple[str, int], list[Any]], ...] | None:
    """Return a file's function nodes and code objects, both by (name, first line)."""
    try:
        with _no_warnings():
            tree = ast.parse(source)
            compiled = compile(tree, "<source>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    nodes: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            nodes[node.name, first].append(node)
        elif isinstance(node, ast.Lambda):
            nodes["<lambda>", node.lineno].append(node)
    codes: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
    for code in nested_codes(compiled):
        codes[code.co_name, code.co_firstlineno].append(code)
    return nodes, codes


def verified_tree(code: types.CodeType, digest: Digest) -> Any | None:
    """Return the syntax tree of exactly this code, or None if no source compiles to it."""
    linecache.checkcache(code.co_filename)
    parsed = _parsed("".join(linecache.getlines(code.co_filename)))
    if parsed is None:
        return None
    nodes, codes = (table.get((code.co_name, code.co_firstlineno), []) for table in parsed)
    wanted = code_digest(code, digest)
    if wanted not in [code_digest(c, digest) for c in codes]:
        return None
    if len(nodes) > 1:  # several lambdas on one line
        nodes = [n for n in nodes if _compiles_to(n, code.co_freevars, wanted, digest)]
    return nodes[0] if nodes else None


def _compiles_to(
    node: ast.Lambda, free_names: tuple[str, ...], wanted: bytes, digest: Digest
) -> bool:
    """Compile one lambda inside a function that owns its free variables, and compare."""
    parameters = ", ".join(free_names)
    module = ast.parse(f"def around({parameters}):\n    return lambda: None")
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [ast.copy_location(ast.Return(value=node), node)]
    with _no_warnings():
        compiled = compile(module, "<source>", "exec", dont_inherit=True)
    around = next(nested_codes(compiled))
    inner = [code for code in around.co_consts if inspect.iscode(code)]
    return wanted in [code_digest(code, digest) for code in inner]


_NO_MEANING = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns"})


_EMPTY = "str:''"


def canonical_source(node: Any) -> str:
    """Write out a function's tree: no name, decorators, defaults, docstrings or annotations."""
    if isinstance(node, ast.Lambda):
        body = [_dump(node.body, in_class=False)]
    else:
        body = _statements(node.body, in_class=False)
    return f"{_parameters(node.args)}: {body}"


def _parameters(arguments: ast.arguments) -> list[list[str]]:
    groups = [arguments.posonlyargs, arguments.args, arguments.kwonlyargs]
    stars = [[a] if a else [] for a in (arguments.vararg, arguments.kwarg)]
    return [[argument.arg for argument in group] for group in groups + stars]


def _statements(body: list[Any], *, in_class: bool) -> list[str]:
    first: Any = body[0] if body else None
    is_constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if is_constant and isinstance(first.value.value, str):
        body = body[1:]  # a docstring
    return [_dump(statement, in_class=in_class) for statement in body]


def _dump(node: Any, *, in_class: bool) -> str:
    """Dump a tree alike on all Python versions: empty fields and positions are left out."""
    if isinstance(node, list):
        return f"[{', '.join(_dump(item, in_class=in_class) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    # Inside a function an annotation is never evaluated; in a class it may make a field.
    if isinstance(node, ast.AnnAssign) and not in_class:
        value = None if node.value is None else _dump(node.value, in_class=False)
        return f"Assign({_dump(node.target, in_class=False)}, {value})"
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.JoinedStr):  # some versions put empty strings between the values
        pieces = [_dump(v, in_class=False) for v in node.values]
        return f"JoinedStr({', '.join(piece for piece in pieces if piece != _EMPTY)})"
    inner_class = isinstance(node, ast.ClassDef)
    is_scope = inner_class or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _NO_MEANING or value is None or value == []:
            continue
        if is_scope and name == "body":
            parts.append(f"body={_statements(value, in_class=inner_class)}")
        else:
            parts.append(f"{name}={_dump(value, in_class=in_class and not is_scope)}")
    return f"{type(node).__name__}({', '.join(parts)})"


_FLAGS = (
    inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
) | inspect.CO_ASYNC_GENERATOR


def code_digest(code: types.CodeType, digest: Digest) -> bytes:
    """Digest what the bytecode does: no names of files, no lines, no order of constants."""
    instructions: list[dis.Instruction] = []
    index = {}  # offset -> number, so that a jump is not told in bytes
    for instruction in dis.get_instructions(code):
        index[instruction.offset] = len(instructions)
        if instruction.opname not in ("EXTENDED_ARG", "CACHE", "NOP"):
            instructions.append(instruction)
    parts: list[str | bytes] = []
    for i in instructions:
        parts.append(i.opname)
        if i.opcode in dis.hasconst:
            is_code = isinstance(i.argval, types.CodeType)
            parts.append(code_digest(i.argval, digest) if is_code else digest(i.argval))
        elif i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
            parts.append(str(index.get(i.argval, i.argval)))
        else:
            parts.append(str(i.argval if isinstance(i.argval, (str, tuple)) else i.arg))
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_varnames[: sum(shape)], code.co_flags & _FLAGS, shape)
    handlers = getattr(code, "co_exceptiontable", b"")
    return node_digest("bytecode", str(names), handlers, *parts)


def imported_sources(code: types.CodeType, package: str) -> set[bytes]:
    """Digest the user's files that a function imports in its body (they may not be loaded yet)."""
    seen: set[str] = set()
    return {d for name in names_in(code, "IMPORT_NAME") for d in _source_files(name, package, seen)}


def _source_files(name: str, package: str, seen: set[str]) -> Iterator[bytes]:
    """Yield digests of a module's file and of the user's files that it imports in turn."""
    try:
        spec = importlib.util.find_spec(name) or importlib.util.find_spec(f".{name}", package)
    except (ImportError, ValueError, AttributeError, TypeError):
        return
    file = getattr(spec, "origin", None)
    if not file or file in seen or not file.endswith(".py") or not is_user_file(file):
        return
    if name.partition(".")[0] in NOT_THE_USERS:
        return
    seen.add(file)
    try:
        with _no_warnings():
            tree = ast.parse(pathlib.Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield node_digest("file", "\n".join(_statements(tree.body, in_class=True)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _source_files(alias.name, package, seen)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _source_files(node.module, package, seen)
