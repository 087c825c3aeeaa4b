"""A table function (UDTF): many rows to many rows, partition by partition.

To the engine it is a UDF of a hidden table of partitions, whose value is a list of structs: what
runs, checks, stores and identifies UDFs does so for it, too. A view lays the lists out as rows.
"""

from __future__ import annotations

import dataclasses
import inspect
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import pyarrow as pa

from geneva.errors import InvalidUDFError
from geneva.render.plain import plain
from geneva.render.text import a_type
from geneva.udf.call import (
    StatefulCallable,
    callable_part,
    checked_names,
    is_async,
    name_of,
    signature_of,
)
from geneva.udf.chunker import (
    Chunker,
    RowsFunction,
    _LiveRows,
    _Rows,
    chunker,
    declared_struct,
    evolvable_rows,
)
from geneva.udf.declare import UDF, UDFArgType, check_options, declaring, udf
from geneva.udf.records import OutputSchema
from geneva.udf.taken import taken

PARTITION_INPUTS = ("partition", "id", "digest")
"""What the function is computed from: columns of a table of partitions. Their rows come with it."""

_UNFIT = {
    "data_type": "output_schema says the types of its columns",
    "nullable": "the fields of output_schema say it",
    "field_metadata": "the fields of output_schema have it",
    "memoize": "a partition is computed once as it is",
    "cpu_workers": "it has no step to prepare batches",
}
"""Options of a UDF that a table function has no use for, and why."""


@dataclass(frozen=True, eq=False, repr=False)
class UDTF(RowsFunction):
    """A function of the rows of a partition that yields rows. Made by `udtf`; still callable."""

    partition_by: tuple[str, ...] = ()
    """The columns that say which partition a row is in; none: all rows are one partition."""
    input_columns: list[str] | None = None
    """The columns that it reads; None: all of the query's."""
    partition_by_indexed_column: str | None = None
    """The column of vectors whose IVF index says which partition a row is in."""

    def __repr__(self) -> str:
        """Show the name, the partitions, the inputs and the columns."""
        inputs = "*" if self.input_columns is None else ", ".join(self.input_columns)
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.output_schema)
        by = f" by {', '.join(self.partition_by)}" if self.partition_by else ""
        return (
            f"<UDTF {plain(self.name)}({plain(inputs)}){plain(by)} -> rows of ({plain(columns)})>"
        )


evolvable_rows(UDTF)


@overload
def udtf(func: Callable[..., Any], **options: Any) -> UDTF: ...


@overload
def udtf(**options: Any) -> Callable[[Callable[..., Any]], UDTF]: ...


def udtf(
    func: Callable[..., Any] | None = None,
    *,
    output_schema: OutputSchema | None = None,
    input_columns: Sequence[str] | None = None,
    partition_by: str | Sequence[str] | None = None,
    partition_by_indexed_column: str | None = None,
    name: str | None = None,
    version: str | int | uuid.UUID | None = None,
    **options: Any,
) -> UDTF | Callable[[Callable[..., Any]], UDTF]:
    """Make a table function: many rows to many rows; also a decorator.

    It is called once per partition with a query over the partition's rows (`to_arrow()`,
    `to_pandas()`, `to_batches(batch_size=)`), and yields record batches, tables or rows. A class is
    constructed once per worker. `Connection.create_udtf_view` makes a view of it.

    A partition is the multiset of its rows. It is computed again when that changes, and only then:
    a function whose result depends on the order of the rows should sort them.

    Args:
        func: The function or class.
        output_schema: The columns of the rows that it yields.
        input_columns: The columns that it reads; by default all of the query's.
        partition_by: The column, or columns, that say which partition a row is in. Without it, all
            rows are one partition.
        partition_by_indexed_column: A column of vectors with an IVF index, whose partitions are
            these.
        name: Another name than the function's.
        version: Another version than the fingerprint of its code.
        options: What `udf` takes besides: num_cpus, num_gpus, memory, on_error, timeout, ...
    """
    for unfit, instead in _UNFIT.items():
        if unfit in options:
            raise InvalidUDFError(f"A table function has no option {unfit!r}: {instead}.")
    check_options("A table function", options, udtf, _UNFIT)
    if output_schema is None:
        raise InvalidUDFError("A table function needs output_schema=pa.schema([...]).")
    if partition_by is not None and partition_by_indexed_column is not None:
        raise InvalidUDFError("Give partition_by or partition_by_indexed_column, not both.")
    if partition_by_indexed_column == "" or not isinstance(partition_by_indexed_column, str | None):
        raise InvalidUDFError(
            f"partition_by_indexed_column is the name of one column, not "
            f"{partition_by_indexed_column!r}."
        )

    def declare(target: Callable[..., Any]) -> UDTF:
        if isinstance(target, UDF | RowsFunction):
            raise InvalidUDFError(f"{target!r} is decorated already: decorate the function once.")
        if not callable(target):
            raise InvalidUDFError(
                f"A table function needs a callable, not {type(target).__name__}."
            )
        called: Any = callable_part(target, may_yield=True)
        shown = name or name_of(called)
        if is_async(called):
            raise InvalidUDFError(
                f"UDTF '{shown}' is `async`: a table function is a plain function or class. Run "
                "what is to be awaited inside of it, with asyncio.run."
            )
        _check_parameters(shown, called)
        struct = declared_struct("UDTF", shown, output_schema, None)
        assert struct is not None
        names = tuple(field.name for field in struct)
        made_class = _LiveTables if isinstance(called, StatefulCallable) else _Tables
        made = udf(
            made_class(called, names, UDFArgType.QUERY),
            data_type=pa.list_(struct),
            name=shown,
            input_columns=PARTITION_INPUTS,
            version=None if version == "" else version,
            **options,
        )
        return UDTF(
            udf=dataclasses.replace(made, arg_type=UDFArgType.QUERY),
            partition_by=_partition_columns(shown, partition_by),
            input_columns=(
                None if input_columns is None else list(checked_names(shown, input_columns))
            ),
            partition_by_indexed_column=partition_by_indexed_column,
        )

    def declared(target: Callable[..., Any]) -> UDTF:
        with declaring("UDTF", "udtf"):
            return declare(target)

    return declared if func is None else declared(func)


def _check_parameters(name: str, called: Any) -> None:
    """Refuse a function that can't be called with one query."""
    signature = signature_of(called)
    if signature is None:
        return
    try:
        signature.bind(object())
    except TypeError:
        raise InvalidUDFError(
            f"UDTF '{name}' is called with one argument, a query over the rows of a partition "
            f"(source.to_arrow(), source.to_pandas(), ...), and its parameters are {signature}."
        ) from None


def _partition_columns(name: str, given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, list | tuple) and not given:
        raise InvalidUDFError(
            f"UDTF '{name}': partition_by has no column in it. Name one or more, or leave it out: "
            "then all rows are one partition."
        )
    columns = checked_names(name, (given,) if isinstance(given, str) else given, "partition_by")
    for twice in (column for column in columns if columns.count(column) > 1):
        raise InvalidUDFError(f"UDTF '{name}': partition_by names column {twice!r} twice.")
    return columns


def _of_partition(partition: Any, id: Any, digest: Any) -> Any:
    """What the engine takes a table function for: a function of a partition's description."""


class _Tables(_Rows):
    """A table function as one that returns a list of what it yields."""

    def __init__(
        self,
        function: Any,
        names: tuple[str, ...],
        arg_type: UDFArgType,
        *,
        by_row: bool = False,
    ) -> None:
        super().__init__(function, names, arg_type, by_row=by_row)
        self.__signature__ = inspect.signature(_of_partition)
        self.__wrapped__ = _of_partition

    def _result(self, made: Any) -> list[Any]:
        if made is None:
            return []
        if isinstance(made, dict | pa.RecordBatch | pa.Table) or hasattr(made, "iloc"):
            return [made]
        if isinstance(made, str | bytes) or not isinstance(made, Iterable):
            raise TypeError(f"a table function yields tables or rows, not {a_type(made)}")
        # What is yielded may be yielded again, with other contents.
        return list(made) if isinstance(made, list | tuple) else [*map(taken, made)]


class _LiveTables(_Tables, _LiveRows):
    """The same for a class, or an object that is set up: made once in each process."""


batch_udtf = udtf
"""The same, by an earlier name."""
scalar_udtf = chunker
"""A chunker, by an earlier name."""

__all__ = ["UDTF", "Chunker", "batch_udtf", "scalar_udtf", "udtf"]
