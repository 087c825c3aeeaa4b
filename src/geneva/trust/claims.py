"""What a declaration claims: which bytes compute which column, of what type, from what inputs.

The claim is stored beside the definition, and is what a key signs. Reading one runs no user code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from geneva.model.computation import Computation, Udf
from geneva.model.tables import ColumnDefinition
from geneva.trust.keys import SigningKey, VerifyingKey
from geneva.udf.types import value_type

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """What one declaration means. A signature is good for this, and for nothing else."""

    column: str
    """The column's UUID, which no other column has."""
    digest: str
    """SHA-256 of the pickled function."""
    type: str
    """The type of what it returns."""
    inputs: tuple[str, ...]
    """The columns that it reads, in order."""
    input_fields: tuple[int, ...] = ()
    """Their field ids when it was declared: a column that was renamed since is the same one."""
    by: str = ""
    """Who declared it, as that process said."""
    at: str = ""
    """When, as that process said; ISO 8601."""

    @property
    def id(self) -> str:
        """Identifies what would run where, whoever says so: for the list of accepted ones."""
        meaning = [_FORMAT, self.column, self.digest, self.type, *self.inputs]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()

    def text(self) -> str:
        """The claim as it is stored and signed."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Claim | None:
        """Read a claim; None where this is none."""
        try:
            found: dict[str, Any] = json.loads(text)
            if found.pop("format") != _FORMAT:
                return None
            return cls(
                **{
                    **found,
                    "inputs": tuple(map(str, found["inputs"])),
                    "input_fields": tuple(map(int, found["input_fields"])),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def type_text(kind: pa.DataType) -> str:
    """A type as claims name it: the same as declared and as the table gives it back.

    Lance keeps neither the names of list items, nor the order of dictionaries, nor views.
    """
    match kind:
        case pa.ListType() | pa.LargeListType():
            return f"list<{type_text(kind.value_type)}>"
        case pa.FixedSizeListType():
            return f"list<{type_text(kind.value_type)}>[{kind.list_size}]"
        case pa.DictionaryType():
            return f"dictionary<{type_text(kind.value_type)}, {kind.index_type}>"
        case pa.StructType():
            fields = (kind.field(i) for i in range(kind.num_fields))
            return f"struct<{', '.join(f'{f.name}: {type_text(f.type)}' for f in fields)}>"
        case pa.MapType():
            return f"map<{type_text(kind.key_type)}, {type_text(kind.item_type)}>"
        case _:
            return str(value_type(kind)).replace("_view", "")


def claim_of_definition(definition: ColumnDefinition, by: str, at: str) -> Claim:
    """What a declaration claims that is about to be stored."""
    return Claim(
        column=definition.uuid,
        digest=definition.udf_digest,
        type=type_text(definition.arrow_field.type),
        inputs=definition.inputs,
        input_fields=tuple(node for node, _ in definition.input_fields),
        by=by,
        at=at,
    )


def claims_of(computation: Computation) -> tuple[Claim, ...]:
    """What would run, as the table says now, for each column: the claims that have to be proven."""
    assert isinstance(computation.program, Udf)
    fields = [found.field_ids for found in computation.inputs]
    return tuple(
        Claim(
            column=output.column_id,
            digest=computation.program.digest,
            type=type_text(output.type),
            inputs=computation.input_paths,
            input_fields=tuple(ids[0] if len(ids) == 1 else -1 for ids in fields),
        )
        for output in computation.outputs
    )


def mismatch(signed: Claim, present: Claim) -> str | None:
    """What a claim was signed for and the table has otherwise now; None: it is all the same."""
    if signed.digest != present.digest:
        return f"it is of another function, {signed.digest[:12]}"
    if signed.column != present.column:
        return "it is of another column"
    if signed.type != present.type:
        return f"it is for type {signed.type}, and the column is {present.type}"
    renamed = present.input_fields == signed.input_fields and -1 not in present.input_fields
    if signed.inputs != present.inputs and not (renamed and present.input_fields):
        return f"it is for inputs {list(signed.inputs)}, and those are {list(present.inputs)} now"
    return None


@dataclass(frozen=True, slots=True)
class Declaration:
    """A claim as it is stored: its very text, and who signed that."""

    text: str
    key: str = ""
    signature: bytes = b""

    @property
    def claim(self) -> Claim | None:
        """What is claimed; None where nothing is, or nothing that can be read."""
        return Claim.parse(self.text)

    def is_signed_by(self, key: VerifyingKey) -> bool:
        """Whether a key has signed the text."""
        return bool(self.signature) and key.verify(self.text.encode(), self.signature)

    def to_json(self) -> str:
        """As field metadata."""
        signed = base64.b64encode(self.signature).decode()
        return json.dumps({"claim": self.text, "key": self.key, "signature": signed})

    @classmethod
    def parse(cls, stored: str) -> Declaration:
        """Read what is stored; an empty one where it is damaged, or there is none."""
        try:
            found = json.loads(stored)
            signature = base64.b64decode(found["signature"], validate=True)
            return cls(str(found["claim"]), str(found["key"]), signature)
        except (ValueError, TypeError, KeyError, binascii.Error, RecursionError):
            return cls("")


def signed(claim: Claim, key: SigningKey | None) -> Declaration:
    """A declaration of a claim, signed where there is a key."""
    text = claim.text()
    if key is None:
        return Declaration(text)
    return Declaration(text, key.name, key.sign(text.encode()))
