"""A UDF: a Python function together with what Geneva must know to compute a column with it."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import difflib
import enum
import hashlib
import inspect
import io
import platform
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, overload

import cloudpickle
import pyarrow as pa

from geneva.errors import (
    ColumnNotFoundError,
    InvalidUDFError,
    TypeMismatchError,
    UDFIntegrityError,
)
from geneva.fingerprint import fingerprint, modules_used, references, user_modules
from geneva.udf_types import (
    UnclearTypeError,
    accepts,
    annotations_of,
    arrow_type_of,
    without_optional,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class UDFArgType(enum.Enum):
    """How a UDF is called."""

    SCALAR = "scalar"  # once per row, with Python values
    ARRAY = "array"  # once per batch, with one pa.Array per input
    RECORD_BATCH = "record_batch"  # once per batch, with the pa.RecordBatch of its inputs


class StatefulCallable:
    """A callable object that is made, and set up, once: on first use, in the process that uses it.

    `target` is a class, constructed with the bound arguments, or an instance, copied before its
    `setup()` so that what was declared stays as it was declared.
    """

    def __init__(
        self,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_bound: bool,
    ) -> None:
        self.target, self.args, self.kwargs = target, args, dict(kwargs or {})
        self.is_bound = is_bound
        self._instance: Any = None
        self._lock = threading.Lock()

    def bound_to(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StatefulCallable:
        """Return the class bound to constructor arguments; nothing is constructed yet."""
        try:
            inspect.signature(self.target).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidUDFError(
                f"{self.target.__name__}(...) can't be constructed like that: {error}."
            ) from None
        return StatefulCallable(self.target, args, kwargs, is_bound=True)

    def live(self) -> Callable[..., Any]:
        """Return the working object: constructed and set up the first time, then the same one."""
        with self._lock:
            if self._instance is None:
                instance = self._made()
                getattr(instance, "setup", _nothing)()
                self._instance = instance
            live: Callable[..., Any] = self._instance
            return live

    def _made(self) -> Any:
        if inspect.isclass(self.target):
            return self.target(*self.args, **self.kwargs)
        return copy.copy(self.target) if hasattr(self.target, "setup") else self.target

    def close(self) -> None:
        """Call the object's `close()`, if it was ever made and has one; next use makes it anew."""
        with self._lock:
            instance, self._instance = self._instance, None
        if instance is not None:
            getattr(instance, "close", _nothing)()

    def __call__(self, *args: Any) -> Any:
        """Call the working object."""
        return self.live()(*args)

    def __geneva_meaning__(self) -> Any:
        """Return what a fingerprint takes for this: the class and its arguments, or the object."""
        if not inspect.isclass(self.target):
            return self.target
        try:
            bound = inspect.signature(self.target).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # arguments still to come, or a class of a C extension
            return (self.target, self.args, self.kwargs)
        bound.apply_defaults()
        return (self.target, bound.args, bound.kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process."""
        return {**self.__dict__, "_instance": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the declaration over, with a lock of this process."""
        self.__dict__.update(state, _lock=threading.Lock())


def _nothing() -> None:
    """Stand in for a setup() or close() that the user did not write."""


# A UDF that refers to itself (recursion) must be pickled by its state, not by a nested dump.
_serializing = contextvars.ContextVar("serializing", default=False)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class UDF:
    """A function, its Arrow types and how it wants to be run. Made by `udf`; still callable.

    `input_columns` is None only for a RECORD_BATCH function that did not say what it reads.
    `memory` is in bytes; all sizes are in rows.
    """

    func: Callable[..., Any]
    name: str
    data_type: pa.DataType
    arg_type: UDFArgType
    input_columns: tuple[str, ...] | None
    nullable: bool = True
    declared_version: str | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    batch_size: int | None = None
    checkpoint_size: int | None = None
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    task_size: int | None = None
    field_metadata: Mapping[str, str] = field(default_factory=dict)
    pinned_fingerprint: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers, and look like the function that was decorated."""
        _check_numbers(self)
        shown = self.func.target if isinstance(self.func, StatefulCallable) else self.func
        for attribute in ("__module__", "__qualname__", "__doc__"):
            if getattr(shown, attribute, None) is not None:
                self.__dict__[attribute] = getattr(shown, attribute)
        self.__dict__.update(__name__=self.name, __wrapped__=shown)

    @property
    def fingerprint(self) -> str:
        """Identify what the function means, as of now, or as of when it was serialized."""
        if self.pinned_fingerprint is not None:
            return self.pinned_fingerprint
        # Not remembered: a helper defined below the UDF, or a global set since, counts as well.
        arity = -1 if self.arg_type is UDFArgType.RECORD_BATCH else len(self.input_columns or ())
        return fingerprint(self.func, self.data_type, f"{self.arg_type.value}/{arity}")

    @property
    def version(self) -> str:
        """Return the user's version, or the fingerprint where none was given."""
        return self.declared_version or self.fingerprint

    def with_inputs(self, columns: Sequence[str]) -> UDF:
        """Return this UDF fed from other columns, by position. The version stays as it is."""
        names = _checked_names(self.name, columns)
        if self.input_columns is not None and len(names) != len(self.input_columns):
            raise InvalidUDFError(
                f"UDF '{self.name}' takes {len(self.input_columns)} input columns "
                f"{list(self.input_columns)}, but {len(names)} were given: {list(names)}."
            )
        return dataclasses.replace(self, input_columns=names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it was written; for a decorated class, bind its arguments."""
        if not isinstance(self.func, StatefulCallable):
            return self.func(*args, **kwargs)
        if self.func.is_bound:
            return self.func.live()(*args, **kwargs)
        bound = self.func.bound_to(args, kwargs)
        return dataclasses.replace(self, func=bound, pinned_fingerprint=None)

    def __repr__(self) -> str:
        """Show the name, the inputs and the type."""
        inputs = "?" if self.input_columns is None else ", ".join(self.input_columns)
        version = f", version={self.declared_version!r}" if self.declared_version else ""
        return f"<UDF {self.name}({inputs}) -> {self.data_type}, {self.arg_type.value}{version}>"

    def __geneva_meaning__(self) -> Any:
        """Return what a fingerprint takes for a UDF that another function calls."""
        return self.func

    def __copy__(self) -> UDF:
        """Return itself: the record never changes."""
        return self

    def __deepcopy__(self, memo: object) -> UDF:
        """Return itself: the record never changes."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the function by value, so that any process can run it."""
        if _serializing.get():
            return super().__reduce_ex__(protocol)
        data = serialize_udf(self)
        return deserialize_udf, (data, udf_digest(data))


class UDFOptions(TypedDict, total=False):
    """What `udf` may be told, for type checkers."""

    data_type: pa.DataType | pa.Field | str | None
    version: str | None
    name: str | None
    input_columns: Sequence[str] | None
    num_cpus: float | None
    num_gpus: float | None
    memory: int | None
    batch_size: int | None
    checkpoint_size: int | None
    min_checkpoint_size: int | None
    max_checkpoint_size: int | None
    task_size: int | None
    field_metadata: Mapping[str, str] | None
    nullable: bool


@overload
def udf(func: Callable[..., Any], **options: Unpack[UDFOptions]) -> UDF: ...
@overload
def udf(**options: Unpack[UDFOptions]) -> Callable[[Callable[..., Any]], UDF]: ...
def udf(
    func: Callable[..., Any] | None = None,
    *,
    data_type: pa.DataType | pa.Field | str | None = None,
    version: str | None = None,
    name: str | None = None,
    input_columns: Sequence[str] | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | None = None,
    batch_size: int | None = None,
    checkpoint_size: int | None = None,
    min_checkpoint_size: int | None = None,
    max_checkpoint_size: int | None = None,
    task_size: int | None = None,
    field_metadata: Mapping[str, str] | None = None,
    nullable: bool = True,
) -> UDF | Callable[[Callable[..., Any]], UDF]:
    """Make a UDF of a function, a callable object or a callable class; also a decorator.

    Inputs are the parameters without a default, by name, or `input_columns`, by position: a
    parameter with a default is fed only when `input_columns` is long enough to reach it. All
    parameters annotated `pa.Array`: called once a batch with arrays. One parameter annotated
    `pa.RecordBatch`: called once a batch with that. Otherwise called once a row.
    """
    options: dict[str, Any] = {
        "declared_version": version,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "memory": memory,
        "batch_size": batch_size,
        "checkpoint_size": checkpoint_size,
        "min_checkpoint_size": min_checkpoint_size,
        "max_checkpoint_size": max_checkpoint_size,
        "task_size": task_size,
    }

    def declare(function: Callable[..., Any]) -> UDF:
        target = _callable_part(function)
        shown_name = name or _name_of(target)
        declared = _declared_field(shown_name, data_type, nullable=nullable)
        arg_type, inputs = _call_shape(shown_name, target, input_columns)
        if declared is None:
            declared = pa.field("", _inferred_type(shown_name, target, arg_type), nullable)
        metadata = {k.decode(): v.decode() for k, v in (declared.metadata or {}).items()}
        return UDF(
            func=target,
            name=shown_name,
            data_type=declared.type,
            arg_type=arg_type,
            input_columns=inputs,
            nullable=declared.nullable,
            field_metadata=metadata | dict(field_metadata or {}),
            **options,
        )

    return declare if func is None else declare(func)


# ------------------------------------------------------------------- reading a declaration


def _callable_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is to be called: the function itself, or a callable that is made lazily."""
    if isinstance(function, UDF):
        raise InvalidUDFError(f"'{function.name}' is a UDF already: decorate the function once.")
    if not callable(function):
        raise InvalidUDFError(f"A UDF needs a callable, not {type(function).__name__}.")
    if inspect.isclass(function):
        if "__call__" not in dir(function) or not inspect.isfunction(function.__call__):
            raise InvalidUDFError(f"Class {function.__name__} has no __call__: it can't be a UDF.")
        return StatefulCallable(function, is_bound=False)
    called = function
    if not inspect.isroutine(function):
        called = type(function).__call__
    if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
        raise InvalidUDFError(
            f"UDF '{_name_of(function)}' is a coroutine or a generator; a UDF is an ordinary "
            f"function that returns one value per row (for a coroutine, wrap it in asyncio.run)."
        )
    if hasattr(function, "setup") or hasattr(function, "close"):
        return StatefulCallable(function, is_bound=True)
    return function


def _name_of(target: Any) -> str:
    """Return the name that people know a callable by."""
    target = target.target if isinstance(target, StatefulCallable) else target
    target = getattr(target, "func", target)  # functools.partial
    found = getattr(target, "__name__", None) or type(target).__name__
    return "lambda" if found == "<lambda>" else str(found)


def _declared_field(name: str, data_type: Any, *, nullable: bool) -> pa.Field | None:
    """Return data_type as a field, whichever way it was spelled; None where it wasn't given."""
    if data_type is None:
        return None
    if isinstance(data_type, pa.Field):
        return data_type.with_nullable(data_type.nullable and nullable)
    if isinstance(data_type, str):
        try:
            data_type = pa.type_for_alias(data_type)
        except ValueError:
            raise InvalidUDFError(
                f"UDF '{name}': data_type={data_type!r} is no Arrow type that pyarrow knows by "
                f"name; pass a pa.DataType such as pa.float32()."
            ) from None
    if not isinstance(data_type, pa.DataType):
        raise InvalidUDFError(
            f"UDF '{name}': data_type must be a pa.DataType, a pa.Field or the name of a type, "
            f"not {data_type!r}."
        )
    return pa.field("", data_type, nullable)


def _signature(target: Any) -> inspect.Signature | None:
    """Return the signature without self; None for a builtin that has none."""
    if isinstance(target, StatefulCallable):
        target = target.target
    try:
        if inspect.isclass(target):
            whole = inspect.signature(target.__call__)
            return whole.replace(parameters=list(whole.parameters.values())[1:])
        return inspect.signature(target)
    except (ValueError, TypeError):
        return None


def _annotations(target: Any) -> dict[str, Any]:
    """Return the annotations of what is called, for a class those of its __call__."""
    if isinstance(target, StatefulCallable):
        is_class = inspect.isclass(target.target)
        target = target.target.__call__ if is_class else target.target
    return annotations_of(target)


def _call_shape(
    name: str, target: Any, input_columns: Sequence[str] | None
) -> tuple[UDFArgType, tuple[str, ...] | None]:
    """Work out how the function is called and which columns it reads."""
    given = None if input_columns is None else _checked_names(name, input_columns)
    signature = _signature(target)
    if signature is None:
        if given is None:
            raise InvalidUDFError(
                f"UDF '{name}' has no signature to read its inputs from: pass input_columns=[...]."
            )
        return UDFArgType.SCALAR, given
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    annotations = {n: without_optional(a) for n, a in _annotations(target).items()}
    if [annotations.get(p.name) for p in required] == [pa.RecordBatch]:
        return UDFArgType.RECORD_BATCH, given
    fed = _fed_parameters(name, parameters, positional, required, given)
    arg_type = _kind_of(name, [(p.name, annotations.get(p.name)) for p in fed])
    return arg_type, given or tuple(p.name for p in fed)


def _fed_parameters(
    name: str,
    parameters: list[inspect.Parameter],
    positional: list[inspect.Parameter],
    required: list[inspect.Parameter],
    given: tuple[str, ...] | None,
) -> list[inspect.Parameter]:
    """Return the parameters that get a column, in order."""
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            raise InvalidUDFError(
                f"UDF '{name}': inputs are passed by position, so the keyword-only parameter "
                f"'{p.name}' can't be fed; give it a default or make it positional."
            )
    stars = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if given is None:
        if stars:
            raise InvalidUDFError(
                f"UDF '{name}' takes '{stars[0]}', which doesn't say which columns it reads: "
                f"pass input_columns=[...]."
            )
        if not required:
            raise InvalidUDFError(
                f"UDF '{name}' has no parameter without a default, so no column is read: name "
                f"the columns to pass in input_columns=[...]."
            )
        return required
    rest = next((p for p in stars if p.kind is p.VAR_POSITIONAL), None)
    if len(given) < len(required) or (rest is None and len(given) > len(positional)):
        raise InvalidUDFError(
            f"UDF '{name}' is called as {name}({', '.join(p.name for p in positional)}), but "
            f"input_columns has {len(given)} names: {list(given)}. Inputs are passed by position."
        )
    fed = positional[: len(given)]
    skipped = {p.name for p in positional[len(given) :]} & set(given)
    if skipped:
        raise InvalidUDFError(
            f"UDF '{name}': input_columns {list(given)} names the parameter {sorted(skipped)}, "
            f"but by position it feeds {[p.name for p in fed]}. List a column for every "
            f"parameter before it, too."
        )
    return fed + [rest] * (len(given) - len(fed)) if rest else fed


def _kind_of(name: str, fed: list[tuple[str, Any]]) -> UDFArgType:
    """Return SCALAR or ARRAY; refuse mixtures and table-like parameters."""
    arrays = [p for p, a in fed if isinstance(a, type) and issubclass(a, _ARRAYS)]
    for parameter, annotation in fed:
        tables = isinstance(annotation, type) and (
            issubclass(annotation, (pa.RecordBatch, pa.Table)) or _is_pandas(annotation)
        )
        if tables:
            raise InvalidUDFError(
                f"UDF '{name}': parameter '{parameter}' is a {annotation.__name__}. Take one "
                f"pa.RecordBatch and nothing else, or one pa.Array per column."
            )
    if arrays and len(arrays) < len(fed):
        others = [p for p, _ in fed if p not in arrays]
        raise InvalidUDFError(
            f"UDF '{name}' mixes pa.Array parameters {arrays} with others {others}: annotate all "
            f"of them pa.Array (called once a batch) or none (called once a row)."
        )
    return UDFArgType.ARRAY if arrays else UDFArgType.SCALAR


_ARRAYS = (pa.Array, pa.ChunkedArray)


def _is_pandas(annotation: type) -> bool:
    named = annotation.__name__ in ("Series", "DataFrame")
    return named and annotation.__module__.partition(".")[0] == "pandas"


def _inferred_type(name: str, target: Any, arg_type: UDFArgType) -> pa.DataType:
    """Return the column's type as the return annotation says it, or ask for data_type."""
    annotation = _annotations(target).get("return")
    reason = "its return annotation is missing or can't be resolved"
    if annotation is not None:
        try:
            inferred = arrow_type_of(annotation)
            # In a batch function `-> list[float]` may be the column or one value: it doesn't say.
            plain = without_optional(annotation)
            if arg_type is UDFArgType.SCALAR or plain is not annotation or _is_array(plain):
                return inferred
            reason = f"'{plain}' doesn't say the type of one value of a batch"
        except UnclearTypeError as error:
            reason = str(error)
    raise InvalidUDFError(
        f"UDF '{name}': can't tell the column's type, because {reason}. "
        f"Pass it, for example @udf(data_type=pa.float32())."
    )


def _is_array(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pa.Array)


def _checked_names(name: str, columns: Any) -> tuple[str, ...]:
    """Return input columns as a tuple of names; refuse anything else."""
    names = tuple(columns) if not isinstance(columns, str) else ()
    if not names or not all(isinstance(column, str) and column for column in names):
        raise InvalidUDFError(
            f"UDF '{name}': input columns must be a list of one or more names, not {columns!r}."
        )
    return names


def _check_numbers(declared: UDF) -> None:
    """Refuse sizes and resources that can't be meant."""
    counts = ("memory", "batch_size", "checkpoint_size", "task_size")
    for option in (*counts, "min_checkpoint_size", "max_checkpoint_size"):
        value = getattr(declared, option)
        if value is not None and (type(value) is not int or value <= 0):
            _refuse_number(declared, option, "a whole number above 0")
    for option, least, meaning in (("num_cpus", 1e-9, "above 0"), ("num_gpus", 0, "0 or more")):
        value = getattr(declared, option)
        if value is not None and (type(value) not in (int, float) or not value >= least):
            _refuse_number(declared, option, f"a number, {meaning}")
    low, high = declared.min_checkpoint_size, declared.max_checkpoint_size
    if low is not None and high is not None and low > high:
        raise InvalidUDFError(
            f"UDF '{declared.name}': min_checkpoint_size={low} is above max_checkpoint_size={high}."
        )


def _refuse_number(declared: UDF, option: str, wanted: str) -> None:
    value = getattr(declared, option)
    raise InvalidUDFError(f"UDF '{declared.name}': {option}={value!r} must be {wanted}.")


# ------------------------------------------------------------------------ fitting a table


@dataclass(frozen=True, slots=True)
class ResolvedInput:
    """One input of a UDF, found in a table."""

    path: str  # as named by the UDF; dots lead into structs
    type: pa.DataType
    root: str  # the top-level column that holds it


def resolve_inputs(udf: UDF, schema: pa.Schema) -> tuple[ResolvedInput, ...]:
    """Find the UDF's inputs in a table's schema, and check their types against its annotations."""
    if isinstance(udf.func, StatefulCallable) and not udf.func.is_bound:
        udf.func.bound_to((), {})
    if udf.input_columns is None:
        raise InvalidUDFError(
            f"UDF '{udf.name}' takes a pa.RecordBatch and doesn't say which columns it reads: "
            f'pass input_columns=[...] to @udf, or add it as (udf, ["actual_column_name"]).'
        )
    found = [_find(schema, path) for path in udf.input_columns]
    missing = [p for p, f in zip(udf.input_columns, found, strict=True) if f is None]
    if missing:
        raise ColumnNotFoundError(_missing_message(udf, missing, schema))
    resolved = tuple(f for f in found if f is not None)
    if udf.arg_type is not UDFArgType.RECORD_BATCH:
        _check_types(udf, resolved)
    return resolved


def _find(schema: pa.Schema, path: str) -> ResolvedInput | None:
    if path in schema.names:
        return ResolvedInput(path, schema.field(path).type, path)
    for root, rest in _splits(path):
        if root in schema.names:
            inner = _inner_type(schema.field(root).type, rest)
            if inner is not None:
                return ResolvedInput(path, inner, root)
    return None


def _inner_type(outer: pa.DataType, path: str) -> pa.DataType | None:
    if not pa.types.is_struct(outer):
        return None
    names = [f.name for f in outer]
    if path in names:
        return outer.field(path).type
    steps = ((n, rest) for n, rest in _splits(path) if n in names)
    return next(filter(None, (_inner_type(outer.field(n).type, r) for n, r in steps)), None)


def _splits(path: str) -> Iterator[tuple[str, str]]:
    """Yield every way to cut a path at a dot, the longest first name first."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


def _missing_message(udf: UDF, missing: list[str], schema: pa.Schema) -> str:
    known = list(schema.names)
    for f in schema:
        if pa.types.is_struct(f.type):
            known += [f"{f.name}.{inner.name}" for inner in f.type]
    guesses = [difflib.get_close_matches(m, known, n=1) for m in missing]
    guess = "".join(f" Did you mean '{g[0]}'?" for g in guesses if g)
    return (
        f"UDF expects input columns {missing} which are not found in table schema: "
        f"{list(schema.names)}.{guess} UDF '{udf.name}' reads {list(udf.input_columns or ())}; "
        f"to read other columns pass input_columns=[...] to @udf, or add it as "
        f'(udf, ["actual_column_name"]).'
    )


def _check_types(udf: UDF, resolved: tuple[ResolvedInput, ...]) -> None:
    signature, annotations = _signature(udf.func), _annotations(udf.func)
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


# --------------------------------------------------------------------------- as bytes

_HEADER = b"geneva-udf/1 python="
_registry_lock = threading.Lock()  # cloudpickle's registry of modules belongs to the process


def udf_digest(data: bytes) -> str:
    """Return the SHA-256 of a serialized UDF, in hex."""
    return hashlib.sha256(data).hexdigest()


def serialize_udf(udf: UDF) -> bytes:
    """Return the UDF as bytes that a process without the user's source files can load."""
    pinned = dataclasses.replace(udf, pinned_fingerprint=udf.fingerprint)
    try:
        body = _dumped(pinned, modules_used(udf))
    except Exception as error:  # the user's objects may raise anything
        raise InvalidUDFError(
            f"UDF '{udf.name}' can't be sent to workers: {_culprit(udf.func) or error}. Create "
            f"it inside the function, or in setup() of a callable class, or pass its settings."
        ) from error
    return b"%s%s\n%s" % (_HEADER, platform.python_version().encode(), body)


def deserialize_udf(data: bytes, digest: str) -> UDF:
    """Load a UDF, after checking that its bytes are the ones that were written."""
    if udf_digest(data) != digest:
        raise UDFIntegrityError(
            f"The stored UDF has digest {udf_digest(data)}, but {digest} was recorded when it was "
            f"written. It was altered or cut short and is not run; set the column's UDF again."
        )
    header, _, body = data.partition(b"\n")
    if not header.startswith(_HEADER):
        raise InvalidUDFError("These bytes are no UDF that this version of Geneva wrote.")
    written_with = header.removeprefix(_HEADER).decode()
    here = platform.python_version()
    # Bytecode of another minor version may load and then crash the interpreter.
    if written_with.split(".")[:2] != here.split(".")[:2]:
        raise InvalidUDFError(
            f"The UDF was defined with Python {written_with} and this is Python {here}: bytecode "
            f"can't move between them. Use the same minor version, or set the column's UDF again."
        )
    try:
        loaded = cloudpickle.loads(body)
    except Exception as error:  # the user's modules may raise anything
        needs = f" Module '{error.name}' is missing here." if isinstance(error, ImportError) else ""
        raise InvalidUDFError(
            f"The UDF (defined with Python {written_with}) can't be loaded here: "
            f"{type(error).__name__}: {error}.{needs} Install what it needs on every worker."
        ) from error
    if not isinstance(loaded, UDF):
        raise InvalidUDFError(f"The stored bytes hold a {type(loaded).__name__}, not a UDF.")
    return loaded


@contextlib.contextmanager
def _user_code_by_value() -> Iterator[None]:
    """Have cloudpickle embed the user's own modules, and leave installed ones by name."""
    with _registry_lock:
        known = cloudpickle.list_registry_pickle_by_value()
        added = [m for m in user_modules() if m.__name__ not in known]
        token = _serializing.set(True)
        try:
            for module in added:
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            _serializing.reset(token)
            for module in added:
                if module.__name__ in sys.modules:
                    cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Embeds of the user's modules only what the function takes from them.

    Whole modules would drag along their locks, clients and data.
    """

    def __init__(self, file: io.BytesIO, taken: Mapping[str, set[str]]) -> None:
        super().__init__(file)
        self._taken = taken

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj.__name__ in self._taken:
            names = sorted(self._taken[obj.__name__])
            values = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
            return _module_with, (obj.__name__, values)
        return super().reducer_override(obj)


def _module_with(name: str, values: Mapping[str, Any]) -> types.ModuleType:
    """Return a module, of no file, with these attributes."""
    module = types.ModuleType(name)
    module.__dict__.update(values)
    return module


def _dumped(value: Any, taken: Mapping[str, set[str]]) -> bytes:
    """Return a value as bytes, with the user's code embedded."""
    file = io.BytesIO()
    with _user_code_by_value():
        _Pickler(file, taken).dump(value)
    return file.getvalue()


def _culprit(func: Any, depth: int = 0) -> str | None:
    """Name the first thing inside the function that can't be pickled, if one can be found."""
    for label, value in references(func).items():
        try:
            _dumped(value, modules_used(func))
        except Exception:  # noqa: BLE001 - whatever it is, this is the culprit
            inner = _culprit(value, depth + 1) if depth < 6 else None
            return f"{label} -> {inner}" if inner else f"{label} is a {type(value).__qualname__}"
    return None
