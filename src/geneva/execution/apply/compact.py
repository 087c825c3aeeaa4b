"""Arrays as functions take them for granted: offset zero, and no values but their own.

A slice shares the buffers of the array that it is cut from: its `.values` and `.buffers()` are
those of the whole, and some of Arrow's own kernels make garbage of strings that begin further on.
"""

from __future__ import annotations

from weakref import ref

import pyarrow as pa
import pyarrow.types as pt


def compact(array: pa.Array) -> pa.Array:
    """The same values in buffers that hold nothing else; a copy only where that is not so yet."""
    return array if is_compact(array) else copied(array)


def copied(array: pa.Array) -> pa.Array:
    """The same values in memory of their own."""
    return pa.concat_arrays([array, array[:0]])


_KNOWN: dict[int, ref[pa.RecordBatch]] = {}
"""Batches that are compact, by their ids: the reader looks ahead, so that a call need not."""


def compact_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same for all columns of a batch."""
    known = _KNOWN.get(id(batch))
    if known is not None and known() is batch:
        return batch
    columns = batch.columns
    compacted = [compact(column) for column in columns]
    if not all(new is old for new, old in zip(compacted, columns, strict=True)):
        batch = pa.RecordBatch.from_arrays(compacted, schema=batch.schema)
    key = id(batch)
    _KNOWN[key] = ref(batch, lambda gone: _forget(key, gone))
    return batch


def _forget(key: int, gone: ref[pa.RecordBatch]) -> None:
    """Forget a batch that is no more, unless another one has its id by now."""
    if _KNOWN.get(key) is gone:
        del _KNOWN[key]


def is_compact(array: pa.Array) -> bool:
    """Whether an array, and all below it, begins and ends with its buffers.

    To the byte: `np.frombuffer` takes all that is in one. Lance and Arrow make them so.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return is_compact(array.storage)
    if array.offset:
        return False
    buffers = array.buffers()
    if not _fits(buffers[0], len(array)):
        return False
    if pt.is_dictionary(kind):
        return is_compact(array.indices)
    if pt.is_struct(kind):
        return all(is_compact(array.field(i)) for i in range(kind.num_fields))
    if pt.is_fixed_size_list(kind):
        return len(array.values) == len(array) * kind.list_size and is_compact(array.values)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        wide = pt.is_large_list(kind)
        return _ends(array, 8 if wide else 4) == len(array.values) and is_compact(array.values)
    if _has_offsets(kind):
        wide = pt.is_large_string(kind) or pt.is_large_binary(kind)
        return _ends(array, 8 if wide else 4) == (0 if buffers[2] is None else buffers[2].size)
    if len(buffers) < 2:
        return True
    try:
        bits = kind.bit_width
    except ValueError:  # views of strings: their buffers are shared by design
        return True
    return _fits(buffers[1], bits * len(array))


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(
        pt.is_string(kind)
        or pt.is_large_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_binary(kind)
    )


def _ends(array: pa.Array, width: int) -> int | None:
    """Where the values below an array end, by its offsets; None: they are not just its own."""
    offsets = array.buffers()[1]
    if offsets is None or not offsets.size:
        return 0
    if offsets.size != width * (len(array) + 1):
        return None
    first, last = (
        int.from_bytes(offsets[at : at + width].to_pybytes(), "little")
        for at in (0, width * len(array))
    )
    return None if first else last


def _fits(buffer: pa.Buffer | None, bits: int) -> bool:
    """Whether a buffer has no more than so many bits, but for the rest of a byte."""
    return buffer is None or bool(buffer.size <= (bits + 7) // 8)
