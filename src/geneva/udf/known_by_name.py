"""Objects of the user's that pickle knows by their name alone, written so that they travel.

`pickle` takes a `NewType`, a `ParamSpec`, a `type X = ...` and every object whose `__reduce__`
returns text by the name that they have in their module. The modules of the user's are on no
worker: a script is another program there.
"""

from __future__ import annotations

import builtins
import enum
import types
import typing
from collections.abc import Callable, Container, Mapping
from typing import Any

from geneva.udf.identity.user_code import is_user_class, is_user_module
from geneva.udf.identity.value_meaning import own_attributes

Reduced = tuple[Any, ...]
"""What `__reduce__` returns: how an object is made again."""


def reduced_by_value(
    value: Any, registered: Container[type], protocol: int, *, unless_found: bool = False
) -> Reduced | None:
    """Return how to make an object of the user's that says how it is pickled; None for others.

    What says more than a name is left as it says it. The types that are `registered` have a way to
    be pickled that comes before their own. `unless_found`: but for objects of classes of modules,
    which a worker may be able to import.
    """
    kind = type(value)
    if kind in registered or not (_says_how(kind) and _is_of_user(value)):
        return None
    if unless_found and is_user_class(kind) and kind.__module__ != "__main__":
        return None
    reduced = value.__reduce_ex__(protocol)
    return _by_contents(value) if isinstance(reduced, str) else reduced


def _says_how(kind: type) -> bool:
    """Say whether a class has its own word on how its objects are pickled."""
    is_code = issubclass(kind, type)  # which cloudpickle writes
    return not is_code and any(getattr(kind, name) is not theirs for name, theirs in _EVERY.items())


_EVERY: Mapping[str, Any] = {n: getattr(object, n) for n in ("__reduce__", "__reduce_ex__")}


def _is_of_user(value: Any) -> bool:
    """Say whether an object would be looked for in a module of the user's."""
    if type(value).__module__ in ("typing", "typing_extensions"):
        return is_user_module(getattr(value, "__module__", None))
    return is_user_class(type(value))


def _by_contents(value: Any) -> Reduced | None:
    """Return how to make an object from what is in it; None where it can't be made so."""
    kind = type(value)
    if isinstance(value, enum.Enum):  # of `enum.global_enum`
        return kind, (value._value_,)
    of_typing = "" if is_user_class(kind) else kind.__name__
    if of_typing == "TypeAliasType":
        name, stands_for = value.__name__, _stands_for(value)
        # It may be a part of itself, and can't be made before what it stands for.
        meaning = name if _leads_to(stands_for, value, []) else stands_for
        return made_in, (value.__module__, alias, kind, name, meaning, value.__type_params__)
    if of_typing in ("ParamSpec", "TypeVarTuple"):
        return made_in, (value.__module__, parameter, kind, value.__name__)
    try:
        bare(kind)
    except TypeError:  # a number or a text, say, or written in C
        return None
    return bare, (kind,), own_attributes(value), None, None, fill


def _stands_for(made: Any) -> Any:
    """Return what a `type X = ...` stands for: its name, where that can't be found out."""
    try:
        return made.__value__
    except Exception:  # noqa: BLE001 - it is evaluated now: its names may be there for checkers only
        return made.__name__


def _leads_to(annotation: Any, wanted: Any, seen: list[Any]) -> bool:
    """Say whether an alias is a part of an annotation, or of other aliases in it."""
    if annotation is wanted or any(annotation is known for known in seen):
        return annotation is wanted
    seen.append(annotation)
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    if type(annotation) is type(wanted):
        parts = (_stands_for(annotation),)
    return any(_leads_to(part, wanted, seen) for part in parts)


# ------------------------------------------------------------------------- named in what is stored


def bare(cls: type) -> Any:
    """Return an object without attributes."""
    return object.__new__(cls)


def fill(made: Any, attributes: Mapping[str, Any]) -> None:
    """Give an object its attributes, whatever its class says to that."""
    for name, value in attributes.items():
        object.__setattr__(made, name, value)


def made_in(module: str, make: types.FunctionType, *args: Any) -> Any:
    """Call a function as if it were one of a module: what `typing` makes is its caller's."""
    known = {"__name__": module, "__builtins__": builtins}
    return types.FunctionType(make.__code__, known)(*args)


def alias(kind: Callable[..., Any], name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Return what `type name[parameters] = value` makes."""
    return kind(name, value, type_params=parameters)


def parameter(kind: Callable[[str], Any], name: str) -> Any:
    """Return a `ParamSpec` or a `TypeVarTuple`."""
    return kind(name)
