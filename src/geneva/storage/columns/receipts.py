"""Receipts: beside each computed value, a digest of what it was computed from and of the value.

A receipt is 64 bits: 47 of the digest of (column, function's version, input values), one that says
whether the value was taken over as it was found (a person wrote it) instead of computed, and 16 of
the value. A value's 16 bits are 0 where the function failed on the row. Receipts move with their
row through everything that Lance does: no history is needed to see whether a value is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from geneva.model.digests import Digests, digest_values
from geneva.model.rows import Mask

RECEIPT_TYPE = pa.int64()
"""Lance writes it faster than the unsigned kind; the bits are the same."""
_VALUE_MASK = np.uint64(0xFFFF)
_ADOPTED = np.uint64(0x10000)
_INPUT_SHIFT = np.uint64(17)


def receipts_for(
    digests: Digests,
    outputs: Sequence[pa.Array],
    *,
    failed: Sequence[int] = (),
    adopted: bool = False,
) -> pa.Array:
    """The receipts of rows by the digests of their inputs.

    `failed` are rows that the function failed on; `adopted`: the values are as they were found.
    """
    values = digest_values(outputs, len(digests))
    if len(failed):
        values[np.asarray(failed, dtype=np.int64)] = 0
    receipts = digests & ~(_VALUE_MASK | _ADOPTED)
    receipts |= values
    if adopted:
        receipts |= _ADOPTED
    return pa.array(receipts.view(np.int64), RECEIPT_TYPE)


def receipt_bits(receipts: pa.Array) -> Digests:
    """The bits of receipts; 0 where there is none."""
    filled = receipts.fill_null(0) if receipts.null_count else receipts
    bits: Digests = np.asarray(filled).view(np.uint64)
    return bits


def input_part(receipts: npt.NDArray[np.uint64]) -> Digests:
    """What of receipts, or of digests, is about the inputs."""
    return receipts >> _INPUT_SHIFT


def is_adopted(receipts: pa.Array) -> Mask:
    """Rows whose receipt says that a person wrote the value."""
    found: Mask = (receipt_bits(receipts) & _ADOPTED) != 0
    return found


def is_result(receipts: pa.Array) -> Mask:
    """Rows whose receipt says that the function computed the value, or failed on the row."""
    found: Mask = np.asarray(receipts.is_valid()) & ~is_adopted(receipts)
    return found


def is_failed(receipts: pa.Array) -> Mask:
    """Rows whose receipt says that the function failed on them."""
    bits = receipt_bits(receipts)
    found: Mask = np.asarray(receipts.is_valid()) & ((bits & _VALUE_MASK) == 0)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class StoredReceipts:
    """Receipts as they stand in a table, and which of their values are still those they are for."""

    present: Mask
    """Rows that have a receipt."""
    has_value: Mask
    """Rows whose value is not NULL."""
    intact: Mask
    """Rows with a receipt whose value is the one that it is for."""
    failed: Mask
    """Rows whose receipt says that the function failed on them, and which have no value since."""
    bits: npt.NDArray[np.uint64]
    """The receipts; 0 where there is none."""

    @property
    def supplied(self) -> Mask:
        """Rows whose value a person wrote: without a receipt, or in place of another value."""
        return self.has_value & ~self.intact

    @property
    def emptied(self) -> Mask:
        """Rows whose receipt is for a value, in whose place somebody wrote NULL."""
        return self.present & ~self.has_value & ~self.intact


def read_receipts(
    receipts: pa.Array, outputs: Sequence[pa.Array] | None, *, null_structs: bool = True
) -> StoredReceipts:
    """Compare receipts with their values; without `outputs`, each value counts as intact.

    Without `null_structs`, as in Lance's format 2.0, a struct of NULLs counts as no value.
    """
    rows = len(receipts)
    present = np.asarray(receipts.is_valid())
    bits = receipt_bits(receipts)
    failed = present & ((bits & _VALUE_MASK) == 0)
    if outputs is None:
        return StoredReceipts(
            present=present, has_value=present & ~failed, intact=present, failed=failed, bits=bits
        )
    has_value = np.zeros(rows, dtype=np.bool_)
    for output in outputs:
        has_value |= _has_value(output, null_structs=null_structs)
    intact = present & ((bits & _VALUE_MASK) == digest_values(outputs, rows))
    failed &= ~has_value
    return StoredReceipts(
        present=present, has_value=has_value, intact=intact | failed, failed=failed, bits=bits
    )


def _has_value(array: pa.Array, *, null_structs: bool) -> Mask:
    present: Mask = np.array(array.is_valid())
    if null_structs or not pa.types.is_struct(array.type):
        return present
    below = np.zeros(len(array), dtype=np.bool_)
    for child in array.flatten():
        below |= _has_value(child, null_structs=False)
    return present & below


def concat_receipts(parts: Sequence[StoredReceipts]) -> StoredReceipts:
    """What was read in parts, as one."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return read_receipts(pa.nulls(0, RECEIPT_TYPE), [])
    return StoredReceipts(
        present=np.concatenate([part.present for part in parts]),
        has_value=np.concatenate([part.has_value for part in parts]),
        intact=np.concatenate([part.intact for part in parts]),
        failed=np.concatenate([part.failed for part in parts]),
        bits=np.concatenate([part.bits for part in parts]),
    )
