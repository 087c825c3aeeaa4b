"""A chunker: a function that makes several rows, or none, of one.

To the engine it is a UDF whose value is a list of structs: what runs, checks, stores and identifies
UDFs does so for chunkers too. A view lays the lists out as rows.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from geneva.compatibility import AUTO_REFRESH, warn_compatibility
from geneva.errors import InvalidUDFError
from geneva.flags import check_flag
from geneva.render.plain import plain
from geneva.render.text import a_type
from geneva.udf.call import (
    annotations_of_call,
    call_shape,
    callable_part,
    class_attribute,
    class_to_extend,
    is_async,
    name_of,
    signature_of,
)
from geneva.udf.declare import (
    UDF,
    Attribute,
    StatefulCallable,
    UDFArgType,
    attributes_of,
    check_options,
    declaring,
    look_like,
    udf,
)
from geneva.udf.picking import picked
from geneva.udf.records import OutputSchema, checked_record, declared_record
from geneva.udf.taken import taken
from geneva.udf.types import UnclearTypeError, arrow_type_of, without_optional

PARENT_ROW = "parent_row"
"""The column by which rows say, with batch=True, which row of the batch they are of."""

_MANY = (
    *(list, tuple, collections.abc.Sequence, collections.abc.Iterable),
    *(collections.abc.Iterator, collections.abc.Generator),
    *(collections.abc.AsyncIterable, collections.abc.AsyncIterator, collections.abc.AsyncGenerator),
)


@dataclass(frozen=True, eq=False, repr=False)
class RowsFunction:
    """A function that yields rows: a chunker, or a table function."""

    udf: UDF
    """The same function, returning its rows as one list."""

    def __post_init__(self) -> None:
        """Look like the function that was decorated."""
        look_like(self, self.func, self.name)

    def __geneva_state__(self) -> dict[str, Any]:
        """What it was made of, by which functions that call it are fingerprinted."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of; how it looks follows from that."""
        return type(self), tuple(self.__geneva_state__().values())

    @property
    def func(self) -> Callable[..., Any]:
        """The function as it was written."""
        rows = self.udf.func
        rows = rows.target if isinstance(rows, StatefulCallable) else rows
        return rows.function if isinstance(rows, _Rows) else rows

    @property
    def manifest(self) -> Any:
        """What the function needs."""
        return self.udf.manifest

    @property
    def num_cpus(self) -> float | None:
        """The cores of a task."""
        return self.udf.num_cpus

    @property
    def num_gpus(self) -> float | None:
        """The GPUs of a task."""
        return self.udf.num_gpus

    @property
    def memory(self) -> int | None:
        """The bytes of a task."""
        return self.udf.memory

    @property
    def declared_version(self) -> str | None:
        """The version that the user gave."""
        return self.udf.declared_version

    @property
    def name(self) -> str:
        """The function's name."""
        return self.udf.name

    @property
    def output_schema(self) -> pa.Schema:
        """The columns of the rows that it yields."""
        return pa.schema(list(self.udf.data_type.value_type))

    @property
    def version(self) -> str:
        """The user's version, or the fingerprint where none was given."""
        return self.udf.version

    def test(self, table: Any, n: int = 5, *, where: str | None = None) -> Any:
        """Try the function on a table, in this process: `table.preview(function, n)`."""
        return table.preview(self, n, where=where)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The rows that a call makes, as a list; for a decorated class, bind its arguments."""
        unbound = self._unbound()
        if unbound is None:
            return self.udf(*args, **kwargs)
        rows = StatefulCallable(unbound.bound_to(args, kwargs), is_bound=True)
        bound = dataclasses.replace(self.udf, func=rows, pinned_fingerprint=None)
        return dataclasses.replace(self, udf=bound)

    if not TYPE_CHECKING:  # a misspelt name is to be an error for type checkers

        def __getattr__(self, name: str) -> Any:
            """Return what a decorated class has."""
            return class_attribute(self, "udf" in self.__dict__ and self.func, name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let a decorated class be extended; what is made of it is decorated on its own."""
        return class_to_extend(self, self.func)

    def check_bound(self) -> None:
        """Refuse a decorated class that still needs arguments."""
        unbound = self._unbound()
        if unbound is not None:
            unbound.bound_to((), {})

    def _unbound(self) -> _LiveRows | None:
        rows = self.udf.func.target if isinstance(self.udf.func, StatefulCallable) else None
        return rows if isinstance(rows, _LiveRows) and not rows.function.is_bound else None


def evolvable_rows(kind: type[Any], *more: str) -> None:
    """Let `attrs.evolve(chunker, version=..., num_gpus=...)` copy a function that yields rows.

    These, and `more`, are options of the UDF that it is made of.
    """
    plain_init = kind.__init__
    options = {name: name for name in ("num_cpus", "num_gpus", "memory", "manifest", *more)}
    options["version"] = "declared_version"

    def init(self: Any, udf: UDF, *args: Any, **given: Any) -> None:
        asked = {options[name]: given.pop(name) for name in options if name in given}
        plain_init(self, dataclasses.replace(udf, **asked) if asked else udf, *args, **given)

    own = [item.name for item in dataclasses.fields(kind)]
    kind.__init__ = init
    # Attrs gives the constructor what the copied one has, where nothing else is asked for. Not so
    # of its UDF's options (init=False): the UDF has them, and so has another one that is given.
    kind.__attrs_attrs__ = attributes_of(
        Attribute(name, name, init=name in own) for name in dict.fromkeys([*options, *own])
    )


@dataclass(frozen=True, eq=False, repr=False)
class Chunker(RowsFunction):
    """A function of one source row that yields rows. Made by `chunker`; still callable."""

    inherit_input_columns: bool | None = None
    """Whether `create_udtf_view` keeps the chunker's inputs in the view; None: those that the
    query's `select` names."""
    batch: bool = False
    """Whether the function takes and returns a RecordBatch."""

    @property
    def input_columns(self) -> list[str] | None:
        """The columns that it reads."""
        return self.udf.input_columns

    def with_inputs(self, columns: Sequence[str]) -> Chunker:
        """This chunker fed from other columns, by position."""
        return dataclasses.replace(self, udf=self.udf.with_inputs(columns))

    def __repr__(self) -> str:
        """Show the name, the inputs and the columns."""
        inputs = "?" if self.udf.input_columns is None else ", ".join(self.udf.input_columns)
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.output_schema)
        return f"<Chunker {plain(self.name)}({plain(inputs)}) -> rows of ({plain(columns)})>"


evolvable_rows(Chunker, "input_columns")


@overload
def chunker(function: Callable[..., Any], **options: Any) -> Chunker: ...


@overload
def chunker(**options: Any) -> Callable[[Callable[..., Any]], Chunker]: ...


def chunker(
    function: Callable[..., Any] | None = None,
    *,
    output_schema: OutputSchema | None = None,
    data_type: pa.DataType | None = None,
    input_columns: Sequence[str] | None = None,
    name: str | None = None,
    inherit_input_columns: bool | None = None,
    batch: bool = False,
    auto_refresh: bool = False,
    **options: Any,
) -> Chunker | Callable[[Callable[..., Any]], Chunker]:
    """Make a chunker of a function that yields rows, or returns a list of them; also a decorator.

    A row is a dict, a dataclass, a named tuple, or a tuple in the order of the columns. Returning
    None, or yielding nothing, makes no row. An `async def` may do both, too.

    Args:
        function: Called once per row of the source; with `pa.Array` parameters once per batch, and
            then it returns a list of rows for each.
        output_schema: The columns of the rows.
        data_type: The same as a struct. Without either, the return annotation says it, for
            example `Iterator[Clip]` where `Clip` is a dataclass or a TypedDict.
        input_columns: The source's columns to read, if not those named like the parameters.
        name: Another name than the function's.
        inherit_input_columns: Whether `create_udtf_view` keeps the inputs in the view: all of
            them, or none. By default those that the query's `select` names, and none where it
            selects everything.
        batch: The function takes a RecordBatch of source rows (`input_columns`), and returns one of
            their rows (`output_schema`). In its column `parent_row` each row says which row of the
            batch it is of, counted from 0. A function that returns no such column is called for one
            source row at a time.
        auto_refresh: For services that refresh views by themselves: there is none here.
        options: What `udf` takes besides: version, batch_size, num_cpus, num_gpus, memory, ...
    """
    unfit_options = ("nullable", "field_metadata")
    for unfit in (name for name in options if name in unfit_options):
        raise InvalidUDFError(f"A chunker has no option {unfit!r}: say it in output_schema.")
    check_options("A chunker", options, chunker, unfit_options)
    for flag, value in (("batch", batch), ("auto_refresh", auto_refresh)):
        check_flag(flag, value, InvalidUDFError)
    if inherit_input_columns is not None:
        check_flag("inherit_input_columns", inherit_input_columns, InvalidUDFError)
    if batch and (output_schema is None and data_type is None):
        raise InvalidUDFError("A chunker with batch=True needs output_schema=pa.schema([...]).")
    if auto_refresh:
        warn_compatibility("chunker(auto_refresh=True)", AUTO_REFRESH)

    def declare(target: Callable[..., Any]) -> Chunker:
        if isinstance(target, UDF | Chunker):
            raise InvalidUDFError(f"{target!r} is decorated already: decorate the function once.")
        called = _called_part(target)
        shown = name or name_of(called)
        arg_type = UDFArgType.RECORD_BATCH
        if batch:
            _check_takes_batch(shown, called)
        else:
            arg_type, _ = call_shape(shown, called, input_columns)
        struct = declared_struct("Chunker", shown, output_schema, data_type) or _annotated(
            shown, called
        )
        names = tuple(field.name for field in struct)
        if batch and PARENT_ROW in names:
            raise InvalidUDFError(
                f"Chunker '{shown}': with batch=True the column {PARENT_ROW!r} says which row of "
                "the batch a row is of, so that output_schema can't have it."
            )
        rows = _rows_class(called)(called, names, arg_type, by_row=batch)
        made = udf(
            rows, data_type=pa.list_(struct), name=shown, input_columns=input_columns, **options
        )
        return Chunker(made, inherit_input_columns, batch)

    def declared(target: Callable[..., Any]) -> Chunker:
        with declaring("Chunker", "chunker"):
            return declare(target)

    return declared if function is None else declared(function)


def _called_part(target: Callable[..., Any]) -> Any:
    """What is to be called: the function, which may be a generator, or a callable made lazily."""
    if not callable(target):
        raise InvalidUDFError(f"A chunker needs a callable, not {type(target).__name__}.")
    return callable_part(target, may_yield=True)


def declared_struct(
    what: str, name: str, schema: OutputSchema | None, data_type: Any
) -> pa.StructType | None:
    """The struct of a row, as it was given."""
    if schema is not None and data_type is not None:
        raise InvalidUDFError(f"{what} '{name}': give output_schema or data_type, not both.")
    if schema is not None:
        return declared_record(what, name, schema)
    if data_type is None:
        return None
    is_list = isinstance(data_type, pa.DataType) and pa.types.is_list(data_type)
    given = data_type.value_type if is_list else data_type
    return declared_record(what, name, given, "data_type")


def _annotated(name: str, called: Any) -> pa.StructType:
    """The struct of a row, as the return annotation says it."""
    annotation = without_optional(annotations_of_call(called).get("return"))
    item = typing.get_args(annotation)[:1]
    reason = "its return annotation is missing or can't be resolved"
    if annotation is not None:
        reason = f"'{annotation}' doesn't say the columns of a row"
        if typing.get_origin(annotation) in _MANY and item:
            try:
                struct = arrow_type_of(item[0])
                if pa.types.is_struct(struct):
                    return checked_record("Chunker", name, struct)
            except UnclearTypeError as error:
                reason = str(error)
    raise InvalidUDFError(
        f"Chunker '{name}': can't tell the columns of its rows, because {reason}. Pass them, for "
        f'example @chunker(output_schema=pa.schema([("text", pa.string())])).'
    )


def _check_takes_batch(name: str, called: Any) -> None:
    """Refuse a function with batch=True that says that it takes something else."""
    known = signature_of(called)
    if known is None or _batch_parameter_kind(known, called) in (Any, object, pa.RecordBatch):
        return
    raise InvalidUDFError(
        f"Chunker '{name}': with batch=True it is called with one argument, a pa.RecordBatch, and "
        f"it is declared as {name}{known}. Give it one parameter (batch: pa.RecordBatch), and say "
        "which columns the batch has with input_columns=[...]."
    )


def _batch_parameter_kind(known: inspect.Signature, called: Any) -> Any:
    """The annotation of the parameter that gets the batch; None: one argument is not enough."""
    try:
        parameter, *_ = known.bind(None).arguments
    except TypeError:
        return None
    return without_optional(annotations_of_call(called).get(parameter, Any))


def _takes_batch(batch: pa.RecordBatch) -> Any:
    """How a chunker with batch=True is called."""


_BATCH_SIGNATURE = inspect.signature(_takes_batch)


class _Rows:
    """A chunker's function as one that returns a list of records."""

    by_row = False
    """Whether it takes and returns record batches; not so of stored ones that don't say."""
    names_parents = False
    """Whether the rows that it returns say whose they are, as known after its first call."""

    def __init__(
        self,
        function: Any,
        names: tuple[str, ...],
        arg_type: UDFArgType,
        *,
        by_row: bool = False,
    ) -> None:
        self.function, self.names, self.arg_type = function, names, arg_type
        self.by_row = by_row
        # For whoever asks for the inputs and their annotations.
        self.__signature__ = _BATCH_SIGNATURE if by_row else signature_of(function)
        self.__wrapped__ = _takes_batch if by_row else _written(function)
        self.__name__ = name_of(function)

    def __call__(self, *values: Any) -> Any:
        if not self.by_row:
            return self._result(self.function(*values))
        lists: list[Any] = []
        for part in self._parts(*values):
            lists += self._rows_by_parent(part, self.function(part))
        return lists

    async def _awaited(self, function: Any, values: tuple[Any, ...]) -> Any:
        """The same of a function whose calls are to be awaited."""
        if not self.by_row:
            return self._result(await _made(function(*values)))
        lists: list[Any] = []
        for part in self._parts(*values):
            lists += self._rows_by_parent(part, await _made(function(part)))
        return lists

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What the function is called with: one row at a time until it says whose its rows are."""
        at = 0
        while at < batch.num_rows:
            rows = batch.num_rows - at if self.names_parents else 1
            yield batch if rows == batch.num_rows else _cut(batch, at, rows)
            at += rows

    def _rows_by_parent(self, part: pa.RecordBatch, made: Any) -> list[Any]:
        """What a call with batch=True returned, as the rows of each source row."""
        if made is None:
            return [[] for _ in range(part.num_rows)]
        if not isinstance(made, pa.RecordBatch | pa.Table):
            raise TypeError(
                f"a chunker with batch=True returns a pa.RecordBatch, not {a_type(made)}"
            )
        if PARENT_ROW in made.schema.names:
            self.names_parents = True
            order, ends = _by_parent(made.column(PARENT_ROW), part.num_rows)
            made = picked(made.drop_columns([PARENT_ROW]), order)
        elif part.num_rows == 1:
            ends = [made.num_rows]
        else:
            raise ValueError(
                f"the batch that it returned has no column {PARENT_ROW!r}, which it had before: "
                f"nobody knows whose the rows are"
            )
        if set(made.schema.names) != set(self.names):
            raise ValueError(
                f"the batch that it returned has the columns {made.schema.names}, and not "
                f"{list(self.names)}"
            )
        found = [_structs(batch, self.names) for batch in _batches(made)]
        # Copied, also where it is one: the next call may use the memory again.
        rows = pa.concat_arrays([*found, found[0][:0]])
        return [rows[start:end] for start, end in itertools.pairwise([0, *ends])]

    def _result(self, made: Any) -> Any:
        if self.arg_type is UDFArgType.SCALAR:
            return self._records(made)
        if isinstance(made, pa.Array | pa.ChunkedArray):
            return made
        is_made = isinstance(made, list | tuple)
        return [self._records(rows if is_made else taken(rows)) for rows in made]

    def _records(self, rows: Iterable[Any] | None) -> list[Any]:
        if rows is None:
            return []
        if isinstance(rows, dict | str | bytes) or not isinstance(rows, Iterable):
            raise TypeError(f"a chunker yields rows or returns a list of them, not {a_type(rows)}")
        # What is yielded may be yielded again, with other contents.
        is_made = isinstance(rows, list | tuple)
        return [self._record(row if is_made else taken(row)) for row in rows]

    def _record(self, row: Any) -> Any:
        if row is None:
            raise TypeError("a chunker yields rows, and None is none: yield nothing instead")
        if type(row) is tuple:
            if len(row) != len(self.names):
                raise ValueError(f"the row {row!r} has not one value for each of {self.names}")
            return dict(zip(self.names, row, strict=True))
        return row

    def __geneva_meaning__(self) -> Any:
        """Return what a fingerprint takes for this: the user's function, made a list of."""
        return self.function

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what only declaring needs."""
        kept = ("function", "names", "arg_type", "by_row", "__name__")
        return {name: getattr(self, name) for name in kept}


class _LiveRows(_Rows):
    """The same for a class, or an object that is set up: made once in each process."""

    function: StatefulCallable

    def bound_to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _LiveRows:
        bound = self.function.bound_to(args, kwargs)
        return type(self)(bound, self.names, self.arg_type, by_row=self.by_row)

    def setup(self) -> None:
        self.function.live()

    def close(self) -> None:
        self.function.close()


class _AsyncRows(_Rows):
    """The same for a coroutine, or an asynchronous generator."""

    async def __call__(self, *values: Any) -> Any:
        return await self._awaited(self.function, values)


class _AsyncLiveRows(_LiveRows):
    """The same for a class whose `__call__` is one."""

    async def setup(self) -> None:  # type: ignore[override]
        await self.function.live_async()

    async def close(self) -> None:  # type: ignore[override]
        await self.function.close_async()

    async def __call__(self, *values: Any) -> Any:
        return await self._awaited(await self.function.live_async(), values)


async def _made(call: Any) -> Any:
    """What a coroutine returned, or all that an asynchronous generator yields."""
    if not inspect.isasyncgen(call):
        return await call
    async with contextlib.aclosing(call) as rows:
        return [taken(row) async for row in rows]


def _by_parent(parents: Any, rows: int) -> tuple[pa.Array, list[int]]:
    """The order that puts rows by their parents, and where those of each parent end."""
    if not pa.types.is_integer(parents.type) or parents.null_count:
        raise TypeError(
            f"the column {PARENT_ROW!r} has a whole number for each row, from 0 on: which row of "
            f"the batch it is of (it is {parents.type}, with {parents.null_count} NULLs)"
        )
    numbers = parents.to_numpy()
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < rows:
        raise ValueError(
            f"the column {PARENT_ROW!r} has numbers from {numbers.min()} to {numbers.max()}, and "
            f"the batch has rows 0 to {rows - 1}"
        )
    ends = np.cumsum(np.bincount(numbers.astype(np.int64), minlength=rows))
    return pa.array(np.argsort(numbers, kind="stable")), ends.tolist()


def _cut(batch: pa.RecordBatch, start: int, rows: int) -> pa.RecordBatch:
    """Some rows, in buffers of their own, as the whole batch is."""
    cut = [column.slice(start, rows) for column in batch.columns]
    own = [pa.concat_arrays([column, column[:0]]) for column in cut]
    return pa.RecordBatch.from_arrays(own, schema=batch.schema)


def _batches(made: pa.RecordBatch | pa.Table) -> list[pa.RecordBatch]:
    if isinstance(made, pa.RecordBatch):
        return [made]
    return made.to_batches() or [pa.RecordBatch.from_pylist([], schema=made.schema)]


def _structs(batch: pa.RecordBatch, names: Sequence[str]) -> pa.StructArray:
    return pa.StructArray.from_arrays([batch.column(name) for name in names], list(names))


def _rows_class(called: Any) -> type[_Rows]:
    """How a function's rows are made a list."""
    if isinstance(called, StatefulCallable):
        return _AsyncLiveRows if is_async(called) else _LiveRows
    return _AsyncRows if is_async(called) else _Rows


def _written(function: Any) -> Any:
    """The function as it was written, with its annotations."""
    if not isinstance(function, StatefulCallable):
        return function
    target = function.target
    return target.__call__ if inspect.isclass(target) else type(target).__call__
