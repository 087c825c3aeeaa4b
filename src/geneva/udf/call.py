"""How a callable is called: once per row or once per batch, with which inputs, made when."""

from __future__ import annotations

import collections.abc
import copy
import enum
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from geneva.errors import InvalidUDFError
from geneva.udf.types import (
    UnclearTypeError,
    annotations_of,
    arrow_type_of,
    is_blob_file,
    unresolved_arrow,
    without_optional,
)


class UDFArgType(enum.Enum):
    """How a UDF is called."""

    SCALAR = "scalar"  # once per row, with Python values
    ARRAY = "array"  # once per batch, with one pa.Array per input
    RECORD_BATCH = "record_batch"  # once per batch, with the pa.RecordBatch of its inputs
    QUERY = "query"  # once per partition, with a query over its rows


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
        self._making = _async_lock()

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
                instance = self.made_to_prepare()
                getattr(instance, "setup", _nothing)()
                self._instance = instance
            live: Callable[..., Any] = self._instance
            return live

    @property
    def prepares_apart(self) -> bool:
        """Whether `prepare` needs nothing of `setup`, and so can run in processes of its own."""
        return hasattr(self.target, SETUP_PREPARE)

    def made_to_prepare(self) -> Any:
        """Return a new object whose `prepare` can be called."""
        instance = self._made()
        getattr(instance, SETUP_PREPARE, _nothing)()
        return instance

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

    async def live_async(self) -> Callable[..., Any]:
        """Return the working object of coroutines: its `setup()` may be one, too.

        It is made inside the event loop, as clients of services want to be.
        """
        async with self._making:
            if self._instance is None:
                instance = self._made()
                await _awaited(getattr(instance, "setup", _nothing)())
                self._instance = instance
            live: Callable[..., Any] = self._instance
            return live

    async def close_async(self) -> None:
        """Call the object's `close()`, which may be a coroutine, inside the event loop."""
        instance, self._instance = self._instance, None
        if instance is not None:
            await _awaited(getattr(instance, "close", _nothing)())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the working object; of coroutines, return one to await."""
        if is_async(self):
            return self._call_async(*args, **kwargs)
        return self.live()(*args, **kwargs)

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        return await (await self.live_async())(*args, **kwargs)

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
        return {**self.__dict__, "_instance": None, "_lock": None, "_making": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the declaration over, with locks of this process."""
        self.__dict__.update(state, _lock=threading.Lock(), _making=_async_lock())


_NOT_THERE = object()


def class_attribute(declared: Any, function: Any, name: str) -> Any:
    """Return what a decorated class has by a name, for whoever asks what was made of it.

    What an instance has is not there: it is made where the function runs.
    """
    target = function.target if isinstance(function, StatefulCallable) else None
    if not inspect.isclass(target) or name.startswith("__"):
        raise AttributeError(
            f"{type(declared).__name__!r} object has no attribute {name!r}", name=name, obj=declared
        )
    found = getattr(target, name, _NOT_THERE) if function.is_bound else getattr(target, name)
    is_method = inspect.isfunction(found) and not isinstance(
        inspect.getattr_static(target, name), staticmethod
    )
    if function.is_bound and (found is _NOT_THERE or is_method or isinstance(found, property)):
        raise AttributeError(
            f"{target.__name__}(...) is made where it runs, so that it has no {name!r} here: call "
            f"it, or ask an object of the class itself, {target.__name__}.__wrapped__(...).",
            name=name,
            obj=declared,
        )
    return found


def class_to_extend(declared: Any, function: Any) -> tuple[type, ...]:
    """Return what a class statement takes for a decorated class: the class as it was written."""
    target = function.target if isinstance(function, StatefulCallable) else function
    if inspect.isclass(target):
        return (target,)
    raise InvalidUDFError(f"{declared!r} is a decorated function: a class can't be made of it.")


def _async_lock() -> Any:
    import asyncio  # slow to import: only where a class is declared or used

    return asyncio.Lock()


def _nothing() -> None:
    """Stand in for a setup() or close() that the user did not write."""


async def _awaited(result: Any) -> None:
    """Wait for what a setup() or close() returned, if it is to be waited for."""
    if inspect.isawaitable(result):
        await result


def is_async(target: Any) -> bool:
    """Whether calls of it are to be awaited: an `async def`, or an object of a class with one."""
    called = called_function(target)
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def called_function(target: Any) -> Any:
    """The code that runs when a callable is called: of an object or a class, its __call__."""
    if isinstance(target, StatefulCallable):
        target = target.target
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target):
        return target.__call__
    return target if inspect.isroutine(target) else type(target).__call__


def _refuse_unawaited(function: Callable[..., Any]) -> None:
    """Refuse a setup() or close() that is a coroutine where nothing else is."""
    for hook in ("setup", "close"):
        if inspect.iscoroutinefunction(getattr(function, hook, None)) and not is_async(function):
            raise InvalidUDFError(
                f"UDF '{name_of(function)}': its {hook}() is a coroutine, but its __call__ is not: "
                f"nothing would await it. Make both `async def`, or neither."
            )


def callable_part(function: Callable[..., Any], *, may_yield: bool = False) -> Callable[..., Any]:
    """Return what is to be called: the function itself, or a callable that is made lazily."""
    if not callable(function):
        raise InvalidUDFError(f"A UDF needs a callable, not {type(function).__name__}.")
    is_class = inspect.isclass(function)
    if is_class and not inspect.isfunction(getattr(function, "__call__", None)):  # noqa: B004
        raise InvalidUDFError(f"Class {function.__name__} has no __call__: it can't be a UDF.")
    _refuse_unawaited(function)
    called = called_function(function)
    yields = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    if yields and not may_yield:
        raise InvalidUDFError(
            f"UDF '{name_of(function)}' is a generator; a UDF is a function, or a coroutine "
            f"(`async def`), that returns one value per row. @chunker makes several rows of one."
        )
    if is_class:
        return StatefulCallable(function, is_bound=False)
    if any(hasattr(function, name) for name in ("setup", "close", PREPARE)):
        return StatefulCallable(function, is_bound=True)
    return function


def name_of(target: Any) -> str:
    """Return the name that people know a callable by."""
    target = target.target if isinstance(target, StatefulCallable) else target
    target = getattr(target, "func", target)  # functools.partial
    found = getattr(target, "__name__", None) or type(target).__name__
    return "lambda" if found == "<lambda>" else str(found)


PREPARE = "prepare"
"""The method that takes the inputs, where a function has two steps; __call__ takes its result."""
SETUP_PREPARE = "setup_prepare"
"""The method that sets up what `prepare` needs, wherever that runs."""


def signature_of(target: Any, method: str = "__call__") -> inspect.Signature | None:
    """Return the signature without self; None for a builtin that has none."""
    if isinstance(target, StatefulCallable):
        target = target.target
    try:
        if inspect.isclass(target):
            whole = inspect.signature(getattr(target, method))
            if isinstance(inspect.getattr_static(target, method), staticmethod):
                return whole
            return whole.replace(parameters=list(whole.parameters.values())[1:])
        return inspect.signature(target if method == "__call__" else getattr(target, method))
    except (ValueError, TypeError):
        return None


def annotations_of_call(target: Any, method: str = "__call__") -> dict[str, Any]:
    """Return the annotations of what is called, for a class those of its __call__."""
    return annotations_of(_annotated_part(target, method))


def _annotated_part(target: Any, method: str) -> Any:
    if not isinstance(target, StatefulCallable):
        return target
    is_class = inspect.isclass(target.target) or method != "__call__"
    return getattr(target.target, method) if is_class else target.target


def two_steps(live: Any) -> Callable[..., Any]:
    """Return an object with `prepare` as one function of the inputs."""
    return lambda *args: live(live.prepare(*args))


def check_prepare(name: str, target: Any) -> None:
    """Refuse `cpu_workers` for what has no `prepare`."""
    if not isinstance(target, StatefulCallable) or not callable(
        getattr(target.target, PREPARE, None)
    ):
        raise InvalidUDFError(
            f"UDF '{name}': cpu_workers is for classes with a method prepare(...), which takes the "
            f"inputs of a batch; __call__ takes what it returned."
        )


def file_parameters(target: Any, count: int, method: str = "__call__") -> tuple[bool, ...]:
    """Which of the first parameters are annotated `lance.blob.BlobFile`: they get files."""
    return tuple(is_blob_file(kind) for kind in _first_annotations(target, count, method))


def python_parameters(
    target: Any, count: int, method: str = "__call__"
) -> tuple[type[Any] | None, ...]:
    """Which of the first parameters are annotated with a container of Python's own, and which one.

    They get that: a list is no numpy array then.
    """
    return tuple(_container(kind) for kind in _first_annotations(target, count, method))


def _first_annotations(target: Any, count: int, method: str) -> list[Any]:
    signature = signature_of(target, method)
    annotations = annotations_of_call(target, method)
    names = [] if signature is None else [*signature.parameters][:count]
    found = [without_optional(annotations.get(name)) for name in names]
    return [*found, *[None] * (count - len(found))]


def _container(annotation: Any) -> type[Any] | None:
    kind = typing.get_origin(annotation) or annotation
    if not inspect.isclass(kind):
        return None
    if issubclass(kind, dict) or kind in (collections.abc.Mapping, collections.abc.MutableMapping):
        return dict
    if kind is tuple or kind is list:
        return kind
    return list if kind in _SEQUENCES else None


_SEQUENCES = (
    *(collections.abc.Sequence, collections.abc.MutableSequence),
    *(collections.abc.Collection, collections.abc.Iterable),
)


def call_shape(
    name: str, target: Any, input_columns: Sequence[str] | None, method: str = "__call__"
) -> tuple[UDFArgType, tuple[str, ...] | None]:
    """Work out how the function, or its first step, is called and which columns it reads."""
    given = None if input_columns is None else checked_names(name, input_columns)
    signature = signature_of(target, method)
    if signature is None:
        if given is None:
            raise InvalidUDFError(
                f"UDF '{name}' has no signature to read its inputs from: pass input_columns=[...]."
            )
        return UDFArgType.SCALAR, given
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    annotations = {n: without_optional(a) for n, a in annotations_of_call(target, method).items()}
    if [annotations.get(p.name) for p in required] == [pa.RecordBatch]:
        return UDFArgType.RECORD_BATCH, given
    fed = _fed_parameters(name, parameters, positional, required, given)
    unclear = unresolved_arrow(_annotated_part(target, method))
    for parameter in (p.name for p in fed if p.name in unclear):
        raise InvalidUDFError(
            f"UDF '{name}': parameter '{parameter}' is annotated {unclear[parameter]!r}, which "
            f"can't be resolved here, so that nobody knows whether it gets one value or a batch. "
            f"Import what it names where Python sees it, for example `import pyarrow as pa` at the "
            f"top of the module, and not for type checkers only."
        )
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


_ARRAYS = (pa.Array, pa.ChunkedArray)


def _kind_of(name: str, fed: list[tuple[str, Any]]) -> UDFArgType:
    """Return SCALAR or ARRAY; refuse mixtures and table-like parameters."""
    arrays = [p for p, a in fed if isinstance(a, type) and issubclass(a, _ARRAYS)]
    for parameter, annotation in fed:
        tables = isinstance(annotation, type) and (
            issubclass(annotation, (pa.RecordBatch, pa.Table)) or _is_pandas(annotation)
        )
        if tables:
            hint = " Its to_pandas() is what you want." if _is_pandas(annotation) else ""
            raise InvalidUDFError(
                f"UDF '{name}': parameter '{parameter}' is a {annotation.__name__}. Take one "
                f"pa.RecordBatch and nothing else, or one pa.Array per column.{hint}"
            )
    if arrays and len(arrays) < len(fed):
        others = [p for p, _ in fed if p not in arrays]
        raise InvalidUDFError(
            f"UDF '{name}' mixes pa.Array parameters {arrays} with others {others}: annotate all "
            f"of them pa.Array (called once per batch) or none (called once per row)."
        )
    return UDFArgType.ARRAY if arrays else UDFArgType.SCALAR


def _is_pandas(annotation: type) -> bool:
    named = annotation.__name__ in ("Series", "DataFrame")
    return named and annotation.__module__.partition(".")[0] == "pandas"


def inferred_type(name: str, target: Any, arg_type: UDFArgType) -> pa.DataType:
    """Return the column's type as the return annotation says it, or ask for data_type."""
    annotation = annotations_of_call(target).get("return")
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


def checked_names(name: str, columns: Any, what: str = "input columns") -> tuple[str, ...]:
    """Return columns as a tuple of names; refuse anything else."""
    names = tuple(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else ()
    if not names or not all(isinstance(column, str) and column for column in names):
        raise InvalidUDFError(
            f"UDF '{name}': {what} must be a list of one or more names, not {columns!r}."
        )
    return names
