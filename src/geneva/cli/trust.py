"""`geneva trust ...`: looking at functions that others declared, before anything of them runs."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geneva.cli.arguments import (
    AsJson,
    ColumnName,
    Database,
    StorageOption,
    TableName,
    epilog,
    group,
)
from geneva.cli.database import connect, connect_to_look
from geneva.cli.terminal import confirm, emit, facts, grid, redact, say
from geneva.errors import GenevaError, UserInputError
from geneva.model.computation import is_named
from geneva.render.plain import plain
from geneva.render.text import did_you_mean, listed, one_line, raise_if_stopping

if TYPE_CHECKING:
    from geneva.connection import Connection
    from geneva.trust.policy import StoredFunction

app = group("Functions of others: look at them, accept them, sign your own (docs/security.md).")


@app.command(name="list", epilog=epilog("geneva trust list my-database"))
def list_functions(
    db: Database, *, as_json: AsJson = False, storage_option: StorageOption = None
) -> None:
    """List the functions of a database, and which of them are trusted here. Loads none."""
    from geneva.trust.policy import StoredFunction

    connection = connect_to_look(db, storage_option)
    unknown = dict.fromkeys(field.name for field in fields(StoredFunction))
    lines: list[tuple[str, ...]] = []
    records: list[dict[str, Any]] = []
    for name in connection.all_table_names():
        try:
            found = connection.open_table(name).stored_functions()
        except BaseException as error:  # noqa: BLE001  one bad table hides no other
            why = redact(one_line(error))
            lines.append((name, "", "", "", why, ""))
            records.append({**unknown, "table": name, "error": why})
            continue
        for f in found:
            lines.append((f.table, f.column, f.name, f.digest[:12], state(f), f.declared_by))
            records.append({**asdict(f), "error": None})
    if as_json:
        return emit({"functions": records})
    if not lines:
        return say("There are no stored functions in this database.")
    headers = ("table", "column", "function", "digest", "trusted here", "declared by (says)")
    return grid(headers, lines)


@app.command(epilog=epilog("geneva trust show my-database articles words"))
def show(
    db: Database,
    table: TableName,
    column: ColumnName,
    *,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show a function: who declared it, its source, and what loading it would import.

    Nothing of it is loaded. The source is what its author stored for readers: only the names are
    read off the bytes that would run.
    """
    connection = connect(db, storage_option)
    found = _find(connection, table, column)
    source, imports = _read(connection, found)
    if as_json:
        return emit({**asdict(found), "source": source, "imports": imports})
    facts(
        (
            ("table", found.table),
            ("column", f"{found.column}: {found.type}"),
            ("function", f"{found.name}({', '.join(found.inputs)})"),
            ("digest", found.digest),
            ("declared by", f"{found.declared_by or '?'}, {found.declared_at or '?'} (as it says)"),
            ("trusted here", state(found)),
            ("used by", ", ".join(_users(connection, found.digest))),
        )
    )
    say()
    say("Source, as its author stored it (nothing proves that it is what runs):", "bold")
    say("\n".join(f"  | {line}" for line in source.splitlines()) or "  (none)")
    say()
    say("What loading it imports and may call, read off its bytes:", "bold")
    say("\n".join(f"  {plain(name)}" for name in imports) or "  (nothing)")
    return None


@app.command(epilog=epilog("geneva trust accept my-database articles words"))
def accept(
    db: Database,
    table: TableName,
    column: ColumnName,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.", metavar="")] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Let a function run on this machine, in this column, from these inputs.

    Another function, column, type or input is another matter, and has to be accepted anew.
    """
    connection = connect(db, storage_option)
    found = _find(connection, table, column)
    if not yes:
        confirm(f"Let {found.name!r} ({found.digest[:12]}) run on this machine?")
    connection._trust.accept(found)
    if as_json:
        return emit({"accepted": found.digest})
    return say(f"Function {found.name!r} of column {found.column!r} is accepted on this machine.")


@app.command(epilog=epilog("geneva trust forget my-database articles words"))
def forget(
    db: Database,
    table: TableName,
    column: ColumnName,
    *,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Take back what was accepted."""
    connection = connect(db, storage_option)
    found = _find(connection, table, column)
    if not connection._trust.forget(found):
        raise UserInputError(f"Function {found.name!r} of column {column!r} was not accepted here.")
    if as_json:
        return emit({"forgotten": found.digest})
    return say(f"Function {found.name!r} of column {column!r} is accepted here no longer.")


@app.command(epilog=epilog("GENEVA_SIGNING_KEY=~/my.key geneva trust sign my-database articles"))
def sign(
    db: Database,
    table: TableName,
    column: Annotated[
        str | None, typer.Argument(metavar="[COLUMN]", help="By default all.", show_default=False)
    ] = None,
    *,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Sign the functions of a table as they are, with the key of GENEVA_SIGNING_KEY.

    Look at them first: with this everybody who trusts the key will run them.
    """
    opened = connect(db, storage_option).open_table(table)
    names = opened.sign_functions(None if column is None else [column])
    if not names:
        raise UserInputError(f"Table {table!r} has no function of that name to sign.")
    return emit({"signed": list(names)}) if as_json else say(f"Signed: {', '.join(names)}.")


@app.command(epilog=epilog("geneva trust keygen alice --file alice.key"))
def keygen(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called.")],
    *,
    file: Annotated[
        Path | None, typer.Option(help="The file to write it to; by default NAME.key.")
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="A shared secret (hmac-sha256): who can check can sign. Needs no other package.",
            metavar="",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key to sign functions with, in a file that only you can read."""
    from geneva.trust.keys import new_key

    own, public = new_key(name, shared=shared)
    path = file or Path(f"{name}.key")
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserInputError(
            f"The key can't be written to {str(path)!r}: {error.strerror}."
        ) from None
    with os.fdopen(handle, "w") as out:
        out.write(own + "\n")
    if as_json:
        return emit({"file": str(path), "public": None if shared else public})
    say(f"The key is in {path}: GENEVA_SIGNING_KEY={path} signs with it.")
    if not shared:
        say("For those who are to trust it, in the file of their GENEVA_TRUSTED_KEYS:")
        say(public)
    return None


def state(function: StoredFunction) -> str:
    """Whether a function would run where only trusted ones do, and why."""
    if function.signed_by is not None:
        return f"yes: signed with key {function.signed_by!r}"
    if function.accepted:
        return "yes: accepted on this machine"
    return f"no: {function.doubt}"


def _find(connection: Connection, table: str, column: str) -> StoredFunction:
    opened = connection.open_table(table)
    names = {column}
    chunker = getattr(getattr(opened, "definition", None), "chunker", None)
    if chunker is not None and chunker.name == column:
        names.add(chunker.udf_name)
    every = opened.stored_functions()
    for function in every:
        if any(is_named(function.column, name) for name in names):
            return function
    known = [function.column for function in every]
    raise UserInputError(
        f"{table!r} has no function for column {column!r}.{did_you_mean(column, known)} "
        f"It has: {listed(known)}."
    )


def _read(connection: Connection, function: StoredFunction) -> tuple[str, tuple[str, ...]]:
    from geneva.storage.columns.functions import read_function, read_source
    from geneva.udf.declare import udf_digest
    from geneva.udf.reading import imported_names

    for ref in connection.open_table(function.table)._refs():
        try:
            data = read_function(ref, function.digest)
        except GenevaError:
            continue
        if udf_digest(data) != function.digest:
            raise UserInputError(
                f"The bytes of function {function.name!r} were altered: they don't have its digest."
            )
        return read_source(ref, function.digest), imported_names(data)
    raise UserInputError(f"The bytes of function {function.name!r} are not there.")


def _users(connection: Connection, digest: str) -> list[str]:
    """Every column of the database that has this function."""
    found = []
    for name in connection.all_table_names():
        try:
            functions = connection.open_table(name).stored_functions()
        except BaseException as error:  # noqa: BLE001  one bad table hides no other
            raise_if_stopping(error)
            continue
        found += [f"{f.table}.{f.column}" for f in functions if f.digest == digest]
    return found
