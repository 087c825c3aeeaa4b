"""Values that lie in memory one after the other: numbers, and lists of a fixed size of them.

Arrow's own functions do what is done here for any type. They look at much more for it, and let go
of the interpreter, which a thread that reads or writes takes then: between two calls a device
stands idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

_MAX_HELD_BYTES = 8 * 1024 * 1024
"""What is copied while all other threads wait."""


Memory: TypeAlias = bytes | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the values of a type lie in memory, where none of them is NULL."""

    dtype: np.dtype[Any]
    """That of the numbers."""
    shape: tuple[int, ...]
    """That of one value: none of a plain number."""
    count: int
    """How many numbers a value has."""
    numbers: pa.DataType
    lists: tuple[pa.DataType, ...]
    """The types of the lists around the numbers, the innermost first."""

    @classmethod
    def of(cls, kind: pa.DataType) -> Layout | None:
        """The layout of a type; None where its values lie otherwise."""
        lists: list[pa.DataType] = []
        while pt.is_fixed_size_list(kind) and kind.list_size:
            lists.append(kind)
            kind = kind.value_type
        if not (pt.is_integer(kind) or pt.is_floating(kind)):
            return None
        shape = tuple(each.list_size for each in lists)
        dtype = np.dtype(kind.to_pandas_dtype())
        return cls(dtype, shape, int(np.prod(shape)), kind, tuple(reversed(lists)))

    def of_numpy(
        self, numbers: npt.NDArray[Any], rows: int, *, may_keep: bool = False
    ) -> Packed | None:
        """The values of an array of numpy; None where it is not laid out just so.

        They are in memory of their own, or in that of the array if we `may_keep` it.
        """
        if numbers.dtype != self.dtype or numbers.shape != (rows, *self.shape):
            return None
        if not (numbers.flags.c_contiguous and numbers.flags.aligned):
            return None
        return Packed(self, numbers if may_keep else _copied(numbers.data), rows)

    def of_arrow(self, array: pa.Array) -> Packed | None:
        """The values of an array of the type in memory of their own; None where some are NULL."""
        *valid, memory = array.buffers()
        if memory is None or any(buffer is not None for buffer in valid):
            return None
        rows, start, items = len(array), array.offset, array
        for kind in reversed(self.lists):
            items = items.values
            start = start * kind.list_size + items.offset
        width = self.dtype.itemsize
        first, size = start * width, rows * self.count * width
        if first + size > memory.size:
            return None
        return Packed(self, _copied(memoryview(memory.slice(first, size))), rows)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Values in memory of their own, of which no array of Arrow is made yet.

    That lets go of the interpreter, so it is left to a thread that no call waits for.
    """

    layout: Layout
    memory: Memory
    rows: int

    @property
    def nbytes(self) -> int:
        """The size of the values."""
        return self.rows * self.layout.count * self.layout.dtype.itemsize

    def array(self) -> pa.Array:
        """The values as an array."""
        layout, count = self.layout, self.rows * self.layout.count
        buffers = [None, pa.py_buffer(self.memory)]
        array = pa.Array.from_buffers(layout.numbers, count, buffers, 0)
        for kind in layout.lists:
            count //= kind.list_size
            array = pa.Array.from_buffers(kind, count, [None], 0, children=[array])
        return array


Values: TypeAlias = pa.Array | Packed
"""What a function gave for one column."""


def as_array(values: Values) -> pa.Array:
    """Values as an array, whatever they are by now."""
    return values.array() if isinstance(values, Packed) else values


def _copied(memory: memoryview) -> Memory:
    # Not into Arrow's memory: to get some lets go of the interpreter.
    is_held = memory.nbytes <= _MAX_HELD_BYTES
    return bytes(memory) if is_held else np.frombuffer(memory, np.uint8).copy()
