"""What `add_columns` and `alter_columns` are given: functions and the columns that they fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from geneva.errors import InvalidUDFError, UserInputError
from geneva.render.text import did_you_mean
from geneva.udf.chunker import RowsFunction
from geneva.udf.declare import UDF
from geneva.udf.records import UnpackedUDF

KEEP_COMPUTED = "computed"
"""What `alter_columns` can be told to keep of a column that gets another UDF."""


@dataclass(frozen=True, slots=True)
class NewColumns:
    """A function that is given to `add_columns`, and the columns that one call of it fills."""

    udf: UDF
    input_columns: list[str] | None
    """The columns that it reads; None: those that it names itself."""
    names: Mapping[str, str]
    """The columns' names, and the field of the function's record that each holds."""
    prefix: str = ""

    @property
    def fields(self) -> dict[str, pa.Field]:
        """What is to be added, by name."""
        made = {field.name: field for field in self.udf.outputs}
        return {name: made[output].with_name(name) for name, output in self.names.items()}


def split_transforms(transforms: Any) -> tuple[list[NewColumns], Any]:
    """The UDF columns of an `add_columns` call, and what is left of it for LanceDB."""
    if isinstance(transforms, Mapping):
        return _split_mapping(transforms)
    if isinstance(transforms, UDF | UnpackedUDF) or _is_pair(transforms):
        return [_unpacked(transforms)], None
    if isinstance(transforms, list | tuple):
        return _split_list(transforms)
    return [], transforms


def _split_mapping(transforms: Mapping[str, Any]) -> tuple[list[NewColumns], Any]:
    udfs: list[NewColumns] = []
    others: dict[str, Any] = {}
    for name, source in transforms.items():
        if not isinstance(name, str):
            raise UserInputError(f"A column's name must be a string, not {name!r}.")
        if isinstance(source, str) or type(source).__module__.partition(".")[0] == "lancedb":
            others[name] = source
        else:
            udf, columns = as_udf(name, source)
            refuse_several(udf, name)
            udfs.append(NewColumns(udf, columns, {name: ""}))
    return udfs, (others or None) if udfs else others


def _split_list(transforms: Sequence[Any]) -> tuple[list[NewColumns], Any]:
    """A list may hold functions of several columns, and mappings, beside what is LanceDB's."""
    udfs: list[NewColumns] = []
    sql: dict[str, Any] = {}
    others: list[Any] = []
    for item in transforms:
        if isinstance(item, UDF | UnpackedUDF) or _is_pair(item):
            udfs.append(_unpacked(item))
        elif isinstance(item, Mapping):
            found, left = _split_mapping(item)
            udfs += found
            sql |= left or {}
        else:
            others.append(item)
    if not udfs and not sql:
        return [], transforms
    if others:
        raise UserInputError(
            f"A list of UDFs can't hold {type(others[0]).__name__}: {others[0]!r}. Add that in a "
            "call of its own. Nothing was added."
        )
    return udfs, sql or None


def _is_pair(source: Any) -> bool:
    """Whether it is `(udf, [input columns])`, and not a list of two."""
    if not isinstance(source, tuple) or len(source) != 2:
        return False
    return isinstance(source[0], UDF | UnpackedUDF) and not isinstance(source[1], UDF | UnpackedUDF)


def _unpacked(source: Any) -> NewColumns:
    """The columns of a function that fills several."""
    given, columns = source if _is_pair(source) else (source, None)
    if columns is not None:
        columns = [columns] if isinstance(columns, str) else list(columns)
    if isinstance(given, UDF):
        if not given.unpacks:
            raise InvalidUDFError(
                f"UDF '{given.name}' fills one column, which needs a name: "
                f"add_columns({{name: {given.name}}}). (One that returns geneva.Columns[...] fills "
                "several, which are called like its fields.)"
            )
        given = UnpackedUDF(given)
    names = {name: field.name for name, field in given.columns.items()}
    return NewColumns(_fed(given.udf, columns), columns, names, given.prefix or "")


def _fed(udf: UDF, columns: list[str] | None) -> UDF:
    """The function with as many inputs as it is given; which they are is up to its column."""
    if columns is None or len(columns) == len(udf.input_columns or columns):
        return udf
    return udf.with_inputs(columns)


def refuse_several(udf: UDF, name: str) -> None:
    """Refuse a function of several columns where one is asked for."""
    if udf.unpacks:
        names = ", ".join(field.name for field in udf.outputs)
        raise InvalidUDFError(
            f"Column {name!r} can't be given UDF '{udf.name}', which fills several: {names}. Pass "
            f"the UDF itself, without a name (add_columns({udf.name}), select([{udf.name}])), or "
            f"geneva.UnpackedUDF({udf.name}, prefix=...) for other names."
        )


def as_udf(name: str, source: Any) -> tuple[UDF, list[str] | None]:
    """A function and the columns that it reads, if these were given."""
    pair = isinstance(source, tuple | list) and len(source) == 2
    function, columns = source if pair else (source, None)
    if isinstance(function, UnpackedUDF):
        function = function.udf
    if isinstance(function, UDF):
        if columns is not None:
            columns = [columns] if isinstance(columns, str) else list(columns)
        return _fed(function, columns), columns
    hint = " Decorate it with @udf." if callable(source) else ""
    if isinstance(source, RowsFunction):
        hint = " It makes a view: db.create_udtf_view(name, source=table, udtf=...)."
    raise InvalidUDFError(
        f"Column {name!r} must be given a UDF, (udf, [input columns]) or an SQL string, "
        f"not {type(source).__name__}.{hint}"
    )


@dataclass(frozen=True, slots=True)
class NewFunction:
    """Another UDF for a column that there is."""

    udf: UDF
    input_columns: list[str] | None = None
    """The columns that it reads; None: those that it names itself."""
    keep: bool = False
    """Whether what is computed stays, and counts as right."""


def listed_alterations(
    alterations: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]],
) -> list[Mapping[str, Any]]:
    """The alterations of a call, one by one: given as arguments, or as lists of them."""
    listed: list[Mapping[str, Any]] = []
    for given in alterations:
        some = list(given) if isinstance(given, list | tuple) else [given]
        for alteration in some:
            if not isinstance(alteration, Mapping):
                raise UserInputError(
                    f'alter_columns takes {{"path": column, ...}}, not {alteration!r}.'
                )
            listed.append(alteration)
    return listed


def split_alterations(
    alterations: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, NewFunction], list[Mapping[str, Any]]]:
    """The alterations that give a column another UDF, and the others, which are LanceDB's."""
    udfs: dict[str, NewFunction] = {}
    others: list[Mapping[str, Any]] = []
    for alteration in alterations:
        if "udf" not in alteration:
            if "keep" in alteration:
                raise UserInputError(f'"keep" is for a column\'s new "udf"; got {alteration!r}.')
            _check_alteration(alteration)
            others.append(alteration)
            continue
        unknown = set(alteration) - {"path", "udf", "input_columns", "keep"}
        if "path" not in alteration or unknown:
            raise UserInputError(
                'To change a column\'s UDF give {"path": column, "udf": udf}, with '
                '"input_columns" and "keep": "computed" if need be, and nothing else; got '
                f"{sorted(alteration)}."
            )
        udfs[alteration["path"]] = _new_function(alteration)
    return udfs, others


_ALTERED = ("rename", "name", "nullable", "data_type")
"""What LanceDB can alter of a column; the second is another word for the first."""


def _check_alteration(alteration: Mapping[str, Any]) -> None:
    """Refuse what LanceDB would pass over in silence."""
    unknown = [key for key in alteration if key not in ("path", *_ALTERED)]
    hint = did_you_mean(str(unknown[0]), ("path", "udf", *_ALTERED)) if unknown else ""
    if unknown or "path" not in alteration or len(alteration) == 1:
        raise UserInputError(
            'alter_columns takes {"path": column}, with "udf" (and "input_columns", "keep"), or '
            f'with "rename", "nullable" or "data_type"; got {list(alteration)}.{hint}'
        )


def _new_function(alteration: Mapping[str, Any]) -> NewFunction:
    keep = alteration.get("keep")
    if keep not in (None, KEEP_COMPUTED):
        raise UserInputError(
            f'"keep" must be {KEEP_COMPUTED!r} (what is computed stays, and only what failed, is '
            f"missing or stale is run with the new UDF), or be left out, not {keep!r}."
        )
    udf, columns = as_udf(alteration["path"], alteration["udf"])
    if alteration.get("input_columns") is not None:
        columns = list(alteration["input_columns"])
    return NewFunction(_fed(udf, columns), columns, keep == KEEP_COMPUTED)
