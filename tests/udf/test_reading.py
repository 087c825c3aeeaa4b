"""Reading a function without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from geneva import udf
from geneva.udf.reading import returns_only_none


def forgets(a: int) -> Any:
    a * 2


def forgets_in_loops(a: int) -> Any:
    for i in range(a):
        try:
            if i > 2:
                return
        finally:
            str(i)


def forgets_in_a_block(a: int) -> Any:
    with Path(str(a)).open() as file:
        file.read()

    def inner() -> int:
        return a

    inner()


def checks(a: int) -> Any:
    if a > 2:
        raise ValueError("too large")


async def forgets_to_wait_for(a: int) -> Any:
    a * 2


def says_so(a: int) -> Any:
    return None


class Forgets:
    def __call__(self, a: int) -> Any:
        a * 2

    def method(self, a: int) -> Any:
        a * 2


def sometimes(a: int) -> Any:
    if a > 2:
        return a
    return None


def one_of_two(a: int) -> Any:
    return a if a > 2 else None


def in_a_block(a: int) -> Any:
    with Path(str(a)).open() as file:
        return file.read()


def after_a_failure(a: int) -> Any:
    try:
        return None
    except ValueError:
        return a


def stub(a: int) -> Any:
    raise NotImplementedError


def endless(a: int) -> Any:
    while True:
        str(a)


def called_by(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(a: int) -> Any:
        return function(a)

    return call


class Returns:
    def __call__(self, a: int) -> int:
        return a


def makes(function: Any) -> Any:
    return udf(function, data_type=pa.int64())


@pytest.mark.parametrize(
    "function",
    [
        *(forgets, forgets_in_loops, forgets_in_a_block, checks, forgets_to_wait_for, says_so),
        *(lambda a: None, Forgets, Forgets(), Forgets().method, functools.partial(forgets)),
    ],
)
def test_a_function_that_is_seen_to_return_none(function: Any) -> None:
    assert returns_only_none(makes(function))


@pytest.mark.parametrize(
    "function",
    [
        *(sometimes, one_of_two, in_a_block, after_a_failure, stub, endless, lambda a: a),
        *(called_by(forgets), Returns, Returns()),
    ],
)
def test_a_function_that_may_return_something_or_cannot_be_seen_into(function: Any) -> None:
    assert not returns_only_none(makes(function))


def test_what_is_not_called_by_row_or_can_have_nothing_else() -> None:
    def batch(a: pa.Array) -> Any:
        """Return nothing."""

    assert not returns_only_none(udf(batch, data_type=pa.int64()))
    assert not returns_only_none(udf(forgets, data_type=pa.null()))
