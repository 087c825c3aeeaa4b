"""A UDF: a Python function together with what Geneva must know to compute a column with it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import pickle
import platform
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypedDict, overload

import pyarrow as pa

from geneva.compatibility import AUTO_BACKFILL, warn_compatibility, warn_user
from geneva.errors import (
    ClassTwiceWarning,
    InvalidUDFError,
    UDFIntegrityError,
    UnknownOptionError,
)
from geneva.flags import check_flag
from geneva.render.plain import plain
from geneva.render.text import a_type, did_you_mean, listed
from geneva.secret_values import Secrets, checked_variables
from geneva.udf.call import (
    PREPARE,
    StatefulCallable,
    UDFArgType,
    annotations_of_call,
    call_shape,
    callable_part,
    check_prepare,
    checked_names,
    class_attribute,
    class_to_extend,
    file_parameters,
    inferred_type,
    is_async,
    name_of,
    python_parameters,
    two_steps,
)
from geneva.udf.identity.fingerprint import fingerprint, fingerprint_parts
from geneva.udf.identity.version_parts import VersionExplanation, VersionPart
from geneva.udf.inputs import ResolvedInput, resolve_inputs
from geneva.udf.pickling import culprit, dumped, serializing
from geneva.udf.policy import FAIL_FAST, ErrorPolicy, OnError, policy_of
from geneva.udf.records import OutputSchema, Record, annotated_record, declared_record
from geneva.udf.shipped_modules import ShippedModule
from geneva.udf.types import BLOB_MARK, is_blob_type
from geneva.udf.usage import RateLimit

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "UDF",
    "ResolvedInput",
    "StatefulCallable",
    "UDFArgType",
    "UDFOptions",
    "deserialize_udf",
    "resolve_inputs",
    "serialize_udf",
    "udf",
    "udf_digest",
]


NO_VARIABLES = Secrets()


def look_like(declared: Any, func: Any, name: str) -> None:
    """Let what was made of a function show its documentation, its module and its signature."""
    shown = func.target if isinstance(func, StatefulCallable) else func
    for attribute in ("__module__", "__qualname__", "__doc__"):
        if getattr(shown, attribute, None) is not None:
            declared.__dict__[attribute] = getattr(shown, attribute)
    declared.__dict__.update(__name__=name, __wrapped__=shown)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class UDF:
    """A function, its Arrow types and how it wants to be run. Made by `udf`; still callable.

    `input_columns` is None only for a RECORD_BATCH function that did not say what it reads: it gets
    all columns that the table has when it is declared.
    `memory` is in bytes; all sizes are in rows; `timeout` is in seconds, of one call.
    """

    func: Callable[..., Any]
    name: str
    data_type: pa.DataType
    arg_type: UDFArgType
    input_columns: list[str] | None
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
    on_error: ErrorPolicy = FAIL_FAST
    timeout: float | None = None
    memoize: bool = False
    cpu_workers: int | None = None
    env: Secrets = NO_VARIABLES
    """Environment variables of its calls. They are no part of what it means."""
    modules: tuple[ShippedModule, ...] = ()
    """Modules of the user's that come with it. Only a stored function has them."""
    manifest: Any = None
    auto_backfill: bool = False
    rate_limit: RateLimit | None = None
    unpacks: bool = False
    """Whether it returns a record, of type `data_type`, of which each field is a column."""
    optional_fields: tuple[str, ...] = ()
    """Fields that such a record may leave out: they are NULL then."""
    file_inputs: tuple[bool, ...] = ()
    """Which inputs are annotated `lance.blob.BlobFile`, and so are files over their bytes."""
    python_inputs: tuple[type[Any] | None, ...] = ()
    """Which inputs are annotated as a list, tuple or dict, and so are that: no numpy arrays."""

    def __post_init__(self) -> None:
        """Check the options, and look like the function that was decorated."""
        _check_name(self.name)
        for flag in ("nullable", "memoize", "auto_backfill"):
            check_flag(flag, getattr(self, flag), InvalidUDFError)
        _check_numbers(self)
        _check_manifest(self)
        _check_types(self)
        version = _version_text(self.name, self.declared_version)
        metadata = _metadata_texts(self.name, self.field_metadata)
        object.__setattr__(self, "declared_version", version)
        object.__setattr__(self, "field_metadata", metadata)
        if self.input_columns is not None:
            object.__setattr__(self, "input_columns", list(self.input_columns))
        look_like(self, self.func, self.name)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine (`async def`): many calls wait at the same time."""
        return is_async(self.func)

    @property
    def outputs(self) -> tuple[pa.Field, ...]:
        """The columns that it fills: the fields of its record, or one that has no name yet."""
        if self.unpacks:
            return tuple(self.data_type)
        return (pa.field("", self.data_type, metadata=dict(self.field_metadata) or None),)

    @property
    def fingerprint(self) -> str:
        """Identify what the function means, as of now, or as of when it was serialized."""
        if self.pinned_fingerprint is not None:
            return self.pinned_fingerprint
        # Not remembered: a helper defined below the UDF, or a global set since, counts as well.
        return fingerprint(self.func, self.data_type, self._call_shape())

    @property
    def version(self) -> str:
        """Return the user's version, or the fingerprint where none was given."""
        return self.declared_version or self.fingerprint

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of its calls: those of its manifest, and over them its own."""
        return {**getattr(self.manifest, "env_vars", {}), **self.env}

    @property
    def error_handling(self) -> ErrorPolicy:
        """What is done about rows that fail, by another name."""
        return self.on_error

    def explain_version(self) -> VersionExplanation:
        """Return what is in the version: `print` shows the functions and values that count."""
        taken, parts = fingerprint_parts(self.func, self.data_type, self._call_shape())
        return VersionExplanation(
            name=self.name,
            version=self.version,
            fingerprint=self.pinned_fingerprint or taken,
            is_declared=self.declared_version is not None,
            is_pinned=self.pinned_fingerprint is not None,
            parts=(*parts, VersionPart(0, "type", "value", str(self.data_type))),
        )

    def _call_shape(self) -> str:
        arity = -1 if self.arg_type is UDFArgType.RECORD_BATCH else len(self.input_columns or ())
        shape = f"{self.arg_type.value}/{arity}{'/prepared' if self.cpu_workers else ''}"
        if not any(self.python_inputs):
            return shape
        # What a parameter is annotated as is what it gets.
        return "/".join(
            [shape, *("" if kind is None else kind.__name__ for kind in self.python_inputs)]
        )

    @property
    def first_step(self) -> str:
        """Name the method of a class that takes the inputs."""
        return PREPARE if self.cpu_workers else "__call__"

    def whole(self, live: Any) -> Callable[..., Any]:
        """Return the working object as a function of the inputs, whatever its steps."""
        return two_steps(live) if self.cpu_workers else live

    def with_inputs(self, columns: Sequence[str]) -> UDF:
        """Return this UDF fed from other columns, by position. The version stays as it is.

        More or fewer columns than it had feed other parameters, those with a default: that is
        another function, as it is with `udf(input_columns=...)`.
        """
        names = checked_names(self.name, columns)
        if self.input_columns is None or len(names) == len(self.input_columns):
            return dataclasses.replace(self, input_columns=list(names))
        try:
            if self.arg_type not in (UDFArgType.SCALAR, UDFArgType.ARRAY):
                raise InvalidUDFError("its inputs are no parameters")
            call_shape(self.name, self.func, names, self.first_step)
        except InvalidUDFError as error:
            raise InvalidUDFError(
                f"UDF '{self.name}' takes {len(self.input_columns)} input columns "
                f"{list(self.input_columns)}, but {len(names)} were given: {list(names)}."
            ) from error
        return dataclasses.replace(
            self,
            input_columns=list(names),
            file_inputs=file_parameters(self.func, len(names), self.first_step),
            python_inputs=python_parameters(self.func, len(names), self.first_step),
            pinned_fingerprint=None,
        )

    def test(self, table: Any, n: int = 5, *, where: str | None = None) -> Any:
        """Try the function on `n` rows of a table, in this process: `table.preview(udf, n)`."""
        return table.preview(self, n, where=where)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it was written; for a decorated class, bind its arguments."""
        if not isinstance(self.func, StatefulCallable):
            return self.func(*args, **kwargs)
        if self.func.is_bound:
            if self.cpu_workers:
                return self.whole(self.func.live())(*args, **kwargs)
            return self.func(*args, **kwargs)
        bound = self.func.bound_to(args, kwargs)
        return dataclasses.replace(self, func=bound, pinned_fingerprint=None)

    if not TYPE_CHECKING:  # a misspelt name is to be an error for type checkers

        def __getattr__(self, name: str) -> Any:
            """Return what a decorated class has: `Embed.DIM`."""
            return class_attribute(self, self.__dict__.get("func"), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Let a decorated class be extended; what is made of it is decorated on its own."""
        return class_to_extend(self, self.func)

    def __repr__(self) -> str:
        """Show the name, the inputs and the type."""
        inputs = "?" if self.input_columns is None else ", ".join(self.input_columns)
        version = f", version={self.declared_version!r}" if self.declared_version else ""
        made = self.data_type
        if self.unpacks:
            made = f"columns {', '.join(f'{f.name}: {f.type}' for f in self.outputs)}"
        shown = f"{self.name}({inputs}) -> {made}, {self.arg_type.value}{version}"
        return f"<UDF {plain(shown)}>"

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
        if serializing.get():
            return super().__reduce_ex__(protocol)
        data = serialize_udf(self)
        return deserialize_udf, (data, udf_digest(data))


class Attribute(NamedTuple):
    """What `attrs.evolve` asks of a field."""

    name: str
    alias: str
    init: bool = True


def _evolvable(kind: type[UDF]) -> None:
    """Let `attrs.evolve(udf, version=..., input_columns=...)` copy a UDF, with or without attrs.

    The version that a user gives is kept apart from the one that is found, so that it has two
    names: `version` is also a word of the constructor. So is `error_handling`.
    """
    plain_init = kind.__init__

    def init(self: UDF, **given: Any) -> None:
        if "version" in given:
            given["declared_version"] = given.pop("version")
        if "error_handling" in given:
            given["on_error"] = policy_of(given.pop("error_handling"))
        plain_init(self, **given)

    kind.__init__ = init  # type: ignore[method-assign]
    aliases = {"declared_version": "version"}
    kind.__attrs_attrs__ = attributes_of(  # type: ignore[attr-defined]
        Attribute(item.name, aliases.get(item.name, item.name)) for item in dataclasses.fields(kind)
    )


def attributes_of(attributes: Iterable[Attribute]) -> tuple[Attribute, ...]:
    """The fields of a class by place and by name: `attrs.fields(UDF).version`."""
    listed = list(attributes)
    kind: Any = namedtuple("Attributes", [item.alias for item in listed])  # type: ignore[misc]
    made: tuple[Attribute, ...] = kind(*listed)
    return made


_evolvable(UDF)


class UDFOptions(TypedDict, total=False):
    """The options of `udf`, for type checkers."""

    data_type: pa.DataType | pa.Field | str | None
    output_schema: OutputSchema | None
    version: str | int | uuid.UUID | None
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
    on_error: OnError
    timeout: float | None
    memoize: bool
    cpu_workers: int | None
    rate_limit: RateLimit | None
    max_failed_rows: int | None
    max_failed_fraction: float | None
    error_handling: Any
    manifest: Any
    cuda: bool
    auto_backfill: bool
    env: Mapping[str, str] | None


@overload
def udf(func: Callable[..., Any], **options: Unpack[UDFOptions]) -> UDF: ...


@overload
def udf(**options: Unpack[UDFOptions]) -> Callable[[Callable[..., Any]], UDF]: ...


def udf(
    func: Callable[..., Any] | None = None,
    *,
    data_type: pa.DataType | pa.Field | str | None = None,
    output_schema: OutputSchema | None = None,
    version: str | int | uuid.UUID | None = None,
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
    on_error: OnError = None,
    timeout: float | None = None,
    memoize: bool = False,
    cpu_workers: int | None = None,
    rate_limit: RateLimit | None = None,
    max_failed_rows: int | None = None,
    max_failed_fraction: float | None = None,
    error_handling: Any = None,
    manifest: Any = None,
    cuda: bool = False,
    auto_backfill: bool = False,
    env: Mapping[str, str] | None = None,
    **unknown: Any,
) -> UDF | Callable[[Callable[..., Any]], UDF]:
    """Make a UDF of a function, a callable object or a callable class; also a decorator.

    Inputs are the parameters without a default, by name, or `input_columns`, by position: a
    parameter with a default is fed only when `input_columns` is long enough to reach it. All
    parameters annotated `pa.Array`: called once per batch with arrays. One parameter annotated
    `pa.RecordBatch`: called once per batch with that. Otherwise called once per row.

    Annotated `-> geneva.Columns[T]`, with T a NamedTuple, a dataclass or a TypedDict, one call
    fills a column per field of T. `output_schema` says the same without an annotation: for
    functions of batches that return a RecordBatch, and for those that return dicts.

    An `async def`, or a class whose `__call__` is one, has many calls waiting at the same time
    (`intra_applier_concurrency` of `backfill`, 32 by default), in one event loop per worker.

    `on_error` says what to do when a row fails (`geneva.udf.policy`), `timeout` how many seconds a
    call may take. Neither is part of what the function means: changing them computes nothing anew.

    `memoize=True` says that equal inputs have equal outputs: such rows of a run, or of the table,
    share one call. Without it each row has a call of its own, for a function may draw or sample.

    `cpu_workers=N` is for a class with a method `prepare`: that one takes the inputs of a batch, of
    N batches at once, in threads of their own, or, of a class with a method `setup_prepare`, in
    processes; `__call__` takes what it returned, in order. So N cores decode for one model.

    `manifest`, a `GenevaManifest`, says which packages and variables the function needs (see
    `Connection.context`). `cuda=True` is `num_gpus=1`. `auto_backfill` is kept, and does nothing.

    `env` are environment variables that are set where it runs. They are stored with the function,
    and count for nothing in its version. Keys are better given to `geneva.connect(env=...)`, which
    stores nothing.

    `rate_limit` says how often a service may be asked, by all workers of a job together.
    """
    check_options("A UDF", unknown, udf)
    _check_name(name)
    for flag, value in (("nullable", nullable), ("cuda", cuda), ("auto_backfill", auto_backfill)):
        check_flag(flag, value, InvalidUDFError)
    if cuda and num_gpus is None:
        num_gpus = 1
    if auto_backfill:
        warn_compatibility("udf(auto_backfill=True)", AUTO_BACKFILL)
    if error_handling is not None:
        if on_error is not None:
            raise InvalidUDFError("Give on_error or error_handling, not both.")
        on_error = error_handling
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
        "on_error": policy_of(on_error, max_failed_rows, max_failed_fraction),
        "timeout": timeout,
        "memoize": memoize,
        "cpu_workers": cpu_workers,
        "manifest": manifest,
        "auto_backfill": auto_backfill,
        "env": Secrets(checked_variables(env)),
        "rate_limit": rate_limit,
    }
    if rate_limit is not None and not isinstance(rate_limit, RateLimit):
        raise InvalidUDFError(f"rate_limit={rate_limit!r} must be a geneva.RateLimit(...).")

    def declare(function: Callable[..., Any]) -> UDF:
        if isinstance(function, UDF):
            raise InvalidUDFError(f"'{function.name}' is a UDF already: decorate it once.")
        target = callable_part(function)
        shown_name = name or name_of(target)
        declared = _declared_field(shown_name, data_type, nullable=nullable)
        if cpu_workers is not None:
            check_prepare(shown_name, target)
        first = "__call__" if cpu_workers is None else PREPARE
        arg_type, inputs = call_shape(shown_name, target, input_columns, first)
        if cpu_workers is not None and is_async(target):
            raise InvalidUDFError(
                f"UDF '{shown_name}': cpu_workers is for plain classes; the calls of an async "
                f"function overlap as they are."
            )
        if cpu_workers is not None and arg_type is UDFArgType.SCALAR:
            raise InvalidUDFError(
                f"UDF '{shown_name}': prepare(...) is called once per batch: annotate its "
                f"parameters pa.Array, or its only one pa.RecordBatch."
            )
        record = _declared_record(shown_name, target, declared, output_schema)
        if record is not None:
            declared = pa.field("", pa.struct([_as_bytes(f) for f in record.type]), nullable)
            if field_metadata:
                raise InvalidUDFError(
                    f"UDF '{shown_name}' fills several columns: say field_metadata by their "
                    f"fields, in output_schema=pa.schema([pa.field(..., metadata=...)])."
                )
        if declared is None:
            declared = pa.field("", inferred_type(shown_name, target, arg_type), nullable)
        declared = _as_bytes(declared)
        metadata = {k.decode(): v.decode() for k, v in (declared.metadata or {}).items()}
        return UDF(
            func=target,
            name=shown_name,
            data_type=declared.type,
            arg_type=arg_type,
            input_columns=None if inputs is None else list(inputs),
            nullable=declared.nullable,
            unpacks=record is not None,
            optional_fields=record.optional if record is not None else (),
            file_inputs=file_parameters(target, len(inputs or ()), first),
            python_inputs=python_parameters(target, len(inputs or ()), first),
            field_metadata=metadata | _metadata_texts(shown_name, field_metadata or {}),
            **options,
        )

    return declare if func is None else declare(func)


def _as_bytes(declared: pa.Field) -> pa.Field:
    """A blob as its bytes, which a function returns: how they are stored is up to the table."""
    if not is_blob_type(declared.type):
        return declared
    kept = declared.metadata or {}
    return declared.with_type(pa.large_binary()).with_metadata({**kept, BLOB_MARK: "true"})


def _declared_record(
    name: str, target: Any, data_type: pa.Field | None, schema: OutputSchema | None
) -> Record | None:
    """The record of a function that fills several columns; None for one that fills one."""
    annotated = annotated_record(name, annotations_of_call(target).get("return"))
    if data_type is not None and (schema is not None or annotated is not None):
        said = "output_schema" if schema is not None else "a return annotation Columns[...]"
        raise InvalidUDFError(
            f"UDF '{name}': data_type is the type of one column, and {said} names several. Give "
            f"one of them."
        )
    return annotated if schema is None else Record(declared_record("UDF", name, schema))


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
            f"such as pa.int64() or 'int64', not {data_type!r}. A Python type goes to the "
            "function's return annotation."
        )
    return pa.field("", data_type, nullable)


def _version_text(name: str, version: Any) -> str | None:
    """Return a version that was given as text: numbers and UUIDs have one form of it."""
    if version is None or isinstance(version, str):
        return version
    if isinstance(version, uuid.UUID | int) and not isinstance(version, bool):
        return str(version)
    raise InvalidUDFError(
        f"UDF '{name}': version={version!r} must be text, a whole number or a UUID."
    )


def _metadata_texts(name: str, given: Any) -> dict[str, str]:
    """Return field metadata as texts; refuse what Arrow can't keep with a field."""
    texts = {
        _text(key): _text(value)
        for key, value in (given.items() if isinstance(given, Mapping) else [(None, None)])
    }
    if all(isinstance(text, str) for pair in texts.items() for text in pair):
        return texts
    raise InvalidUDFError(
        f"UDF '{name}': field_metadata={given!r} must be a dict of texts, such as "
        '{"unit": "m"}: Arrow keeps nothing else with a field.'
    )


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _check_name(name: Any) -> None:
    if not isinstance(name, str | None):
        raise InvalidUDFError(f"A UDF's name must be text, not {name!r}.")


def _check_numbers(declared: UDF) -> None:
    """Refuse sizes and resources that can't be meant."""
    counts = ("memory", "batch_size", "checkpoint_size", "task_size", "cpu_workers")
    for option in (*counts, "min_checkpoint_size", "max_checkpoint_size"):
        value = getattr(declared, option)
        if value is not None and (type(value) is not int or value <= 0):
            _refuse_number(declared, option, "a whole number above 0")
    numbers = (("num_cpus", 1e-9, "above 0"), ("timeout", 1e-9, "above 0"))
    for option, minimum, meaning in (*numbers, ("num_gpus", 0, "0 or more")):
        value = getattr(declared, option)
        if value is None:
            continue
        if type(value) not in (int, float) or not minimum <= value <= TIMEOUT_MAX:
            _refuse_number(declared, option, f"a finite number, {meaning}")
    low, high = declared.min_checkpoint_size, declared.max_checkpoint_size
    if low is not None and high is not None and low > high:
        raise InvalidUDFError(
            f"UDF '{declared.name}': min_checkpoint_size={low} is above max_checkpoint_size={high}."
        )


def _check_types(udf: UDF) -> None:
    """Refuse types of columns that are no keys, of which functions and trials are kept."""
    for made in udf.outputs:
        kind = type(made.type)
        if kind.__hash__ is None:
            raise InvalidUDFError(
                f"UDF '{udf.name}' can't fill a column of type {made.type}: the class of that "
                f"type ({kind.__module__}.{kind.__qualname__}) can't be hashed. Declare another "
                "type, such as pa.float32() in place of bfloat16."
            )


def _check_manifest(declared: UDF) -> None:
    """Refuse what is no manifest: its variables would be set nowhere."""
    manifest = declared.manifest
    if manifest is None or hasattr(manifest, "compute_checksum"):
        return
    is_unfinished = hasattr(manifest, "build")
    how = "call its build()" if is_unfinished else "db.get_manifest(name) gives one by its name"
    kind = type(manifest).__name__
    raise InvalidUDFError(
        f"UDF '{declared.name}': manifest must be a GenevaManifest, not {kind}: {how}."
    )


@contextmanager
def declaring(kind: str, decorator: str) -> Iterator[None]:
    """Say of a function of another kind what is said of the UDF that it is made of."""
    try:
        yield
    except InvalidUDFError as error:
        text = str(error).replace("UDF '", f"{kind} '").replace("@udf(", f"@{decorator}(")
        raise InvalidUDFError(text) from None


def check_options(
    what: str,
    options: Mapping[str, Any],
    declare: Callable[..., Any],
    unfit: Iterable[str] = (),
) -> None:
    """Refuse options that neither `udf` has nor `declare`, which makes UDFs of another kind."""
    own = [
        p.name for p in inspect.signature(declare).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    known = [
        name for name in {**dict.fromkeys(own), **UDFOptions.__annotations__} if name not in unfit
    ]
    for name in options:
        if name not in known:
            raise UnknownOptionError(
                f"{what} has no option {name!r}.{did_you_mean(name, known)} Options are "
                f"{listed(known)}."
            )


def _refuse_number(declared: UDF, option: str, wanted: str) -> None:
    value = getattr(declared, option)
    raise InvalidUDFError(f"UDF '{declared.name}': {option}={value!r} must be {wanted}.")


_HEADER = b"geneva-udf/1 python="


def udf_digest(data: bytes) -> str:
    """Return the SHA-256 of a serialized UDF, in hex."""
    return hashlib.sha256(data).hexdigest()


def with_fingerprint(udf: UDF) -> UDF:
    """Return the UDF with what it means now, for a declaration that asks more than once."""
    return dataclasses.replace(udf, pinned_fingerprint=udf.fingerprint)


def serialize_udf(udf: UDF) -> bytes:
    """Return the UDF as bytes that a process without the user's source files can load."""
    stored = with_fingerprint(udf)
    twice: Sequence[type] = ()
    try:
        body = dumped(stored)
        if body.modules and not udf.modules:  # a stored function keeps those that it came with
            twice = body.classes_twice
            body = dumped(dataclasses.replace(stored, modules=body.modules))
    except Exception as error:  # the user's objects may raise anything
        raise InvalidUDFError(
            f"UDF '{udf.name}' can't be sent to workers: {culprit(udf.func) or error}. Create "
            f"it inside the function, or in setup() of a callable class, or pass its settings."
        ) from error
    _warn_of_classes_twice(udf, twice)
    return b"%s%s\n%s" % (_HEADER, platform.python_version().encode(), body.data)


def _warn_of_classes_twice(udf: UDF, classes: Sequence[type]) -> None:
    """Say of which classes `isinstance` would be False on workers, where it is True here."""
    if not classes:
        return
    names = listed([f"{cls.__module__}.{cls.__qualname__}" for cls in classes])
    modules = listed(dict.fromkeys(cls.__module__ for cls in classes))
    warn_user(
        f"UDF '{udf.name}': workers have {names} twice, once with the function, which refers to "
        f"it, and once in {modules}, which is imported when the function is called. Objects of the "
        "one are no instances of the other, and `except` doesn't catch them. Import the class "
        "where its module is imported: both at the top of the file, or both inside the function.",
        ClassTwiceWarning,
    )


_MOVED = {
    "geneva.chunker": "geneva.udf.chunker",
    "geneva.on_error": "geneva.udf.policy",
    "geneva.udf": "geneva.udf.declare",
    "geneva.udf_call": "geneva.udf.call",
    "geneva.udf_pickle": "geneva.udf.pickling",
}
"""Modules of 0.1 whose names stand in stored functions, and where their contents are now."""


_TRACKED = ("_make_skeleton_class", "_make_skeleton_enum", "_make_typevar")
"""What in cloudpickle makes a class again, or finds the one that this process has."""


class _Unpickler(pickle.Unpickler):
    """Loads what cloudpickle wrote, of this release and of earlier ones.

    Each function gets classes of its own. By itself cloudpickle takes a class that this process
    has already, the user's own or that of another function, and gives it the attributes that were
    stored: whoever uses it would go on with those of somebody else.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(_MOVED.get(module, module), name)
        if module == "cloudpickle.cloudpickle" and name in _TRACKED:
            return functools.partial(_made_anew, found)
        return found


def _made_anew(make: Callable[..., Any], *args: Any) -> Any:
    """Make a class; under its own number only if this process has no class of that number."""
    from cloudpickle import cloudpickle

    given = inspect.signature(make).bind(*args)
    if given.arguments["class_tracker_id"] in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID:
        given.arguments["class_tracker_id"] = None
    return make(*given.args, **given.kwargs)


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
        loaded = _Unpickler(io.BytesIO(body)).load()
    except Exception as error:  # the user's modules may raise anything
        needs = f" Module '{error.name}' is missing here." if isinstance(error, ImportError) else ""
        raise InvalidUDFError(
            f"The UDF (defined with Python {written_with}) can't be loaded here: "
            f"{type(error).__name__}: {error}.{needs} Install what it needs on every worker."
        ) from error
    if not isinstance(loaded, UDF):
        raise InvalidUDFError(f"The stored bytes hold {a_type(loaded)}, not a UDF.")
    return loaded
