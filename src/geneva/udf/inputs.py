"""Finding a UDF's inputs in a table, and checking their types against its annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from geneva.errors import ColumnNotFoundError, TypeMismatchError
from geneva.render.text import did_you_mean, shown_columns
from geneva.udf.call import StatefulCallable, UDFArgType, annotations_of_call, signature_of
from geneva.udf.paths import exact_path, field_by, steps_to
from geneva.udf.types import accepts

if TYPE_CHECKING:
    from geneva.udf.declare import UDF


@dataclass(frozen=True, slots=True)
class ResolvedInput:
    """One input of a UDF, found in a table."""

    path: str  # dots lead into structs; without the backticks that the UDF may name it with
    type: pa.DataType
    root: str  # the top-level column that holds it


def resolve_inputs(udf: UDF, schema: pa.Schema) -> tuple[ResolvedInput, ...]:
    """Find the UDF's inputs in a table's schema, and check their types against its annotations.

    One that takes a RecordBatch and doesn't say what it reads gets all of the schema's columns.
    """
    if isinstance(udf.func, StatefulCallable) and not udf.func.is_bound:
        udf.func.bound_to((), {})
    paths = schema.names if udf.input_columns is None else udf.input_columns
    found = [_find(schema, path) for path in paths]
    missing = [p for p, f in zip(paths, found, strict=True) if f is None]
    if missing:
        raise ColumnNotFoundError(_missing_message(udf, missing, schema))
    resolved = tuple(f for f in found if f is not None)
    if udf.arg_type in (UDFArgType.SCALAR, UDFArgType.ARRAY):
        _check_types(udf, resolved)
    return resolved


def _find(schema: pa.Schema, path: str) -> ResolvedInput | None:
    exact = exact_path(schema, path)
    steps = None if exact is None else steps_to(schema, exact)
    if exact is None or steps is None:
        return None
    return ResolvedInput(exact, field_by(schema, steps).type, steps[0])


def _missing_message(udf: UDF, missing: list[str], schema: pa.Schema) -> str:
    columns = shown_columns(schema.names)
    known = list(columns)
    for f in schema:
        if pa.types.is_struct(f.type):
            known += [f"{f.name}.{inner.name}" for inner in f.type]
    guess = "".join(did_you_mean(name, known) for name in missing)
    return (
        f"UDF expects input columns {missing} which are not found in table schema: "
        f"{columns}.{guess} UDF '{udf.name}' reads {list(udf.input_columns or ())}; "
        f"to read other columns pass input_columns=[...] to @udf, or add it as "
        f'(udf, ["actual_column_name"]).'
    )


def _check_types(udf: UDF, resolved: tuple[ResolvedInput, ...]) -> None:
    signature = signature_of(udf.func, udf.first_step)
    annotations = annotations_of_call(udf.func, udf.first_step)
    names = [p.name for p in signature.parameters.values()] if signature else []
    for parameter, column in zip(names, resolved, strict=False):
        if parameter in annotations and not accepts(annotations[parameter], column.type):
            wanted = annotations[parameter]
            shown = wanted.__name__ if isinstance(wanted, type) else str(wanted)
            raise TypeMismatchError(
                f"Type mismatch for column {column.path}: UDF '{udf.name}' annotates parameter "
                f"'{parameter}' as {shown}, but the column is {column.type}. Fix the annotation, "
                f"cast the column, or feed another one with input_columns=[...]."
            )
