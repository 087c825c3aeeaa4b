"""How a column's data file says what it holds: in short in its name, in full in its metadata.

Data and provenance are published by the same commit, so that they can't disagree.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lance.file import LanceFileReader

from geneva.model.computation import MIXED, Computation
from geneva.model.rows import RowSet
from geneva.model.tables import Secrets, TableRef
from geneva.storage.lance.damage import is_damage
from geneva.storage.lance.dataset import FileFacts, FragmentFacts

PROVENANCE_METADATA = "geneva.provenance"
NULLS_PREFIX = "geneva-nulls-"
"""How files are called that hold nothing but NULLs, for fields that had no file."""
_MIXED = "0000"
"""How the digest of a mixture of versions begins; that of a version may do so by chance."""
_NAME = re.compile(
    r"^geneva-(?P<extent>full|part)-(?P<column>[0-9a-f]{8})-(?P<udf>[0-9a-f]{12})"
    r"-(?P<inputs>[0-9a-f]{12})-[0-9a-f]{12}\.lance$"
)


def nulls_file_name() -> str:
    """A fresh name for a data file that holds nothing but NULLs."""
    return f"{NULLS_PREFIX}{uuid.uuid4().hex}.lance"


def is_nulls_file(path: str) -> bool:
    """Whether a data file holds nothing but NULLs, by its name."""
    return path.startswith(NULLS_PREFIX)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made the values of one column in one fragment, and which of its rows it made."""

    column_uuid: str
    udf_version: str
    inputs: tuple[str, ...]
    """The data files and fields that the values were computed from (`input_signature`)."""
    valid: RowSet
    """Rows whose value is right, given the above. The others hold older values or NULL."""
    failed: RowSet | None = None
    """Rows on which the function failed, and which were skipped: NULL, and not computed."""
    computed: RowSet | None = None
    """Rows that were computed for this very file; None: all that are right."""

    @property
    def made(self) -> RowSet:
        """The right rows that were computed for this very file, and not kept from before."""
        return self.valid if self.computed is None else self.valid.intersect(self.computed)

    def file_name(self, *, complete: bool) -> str:
        """A fresh data file name, from which the manifest alone shows this provenance."""
        extent = "full" if complete else "part"
        return f"geneva-{extent}-{self.digests()}-{uuid.uuid4().hex[:12]}.lance"

    def digests(self) -> str:
        """Short digests of column, UDF and inputs, as they stand in the file name."""
        name = named(self.column_uuid, self.udf_version, self.inputs)
        return "-".join((name.column, name.udf, name.inputs))

    def to_text(self) -> str:
        """The whole provenance, for the file's metadata."""
        return json.dumps(
            {
                "column": self.column_uuid,
                "udf": self.udf_version,
                "inputs": list(self.inputs),
                "valid": self.valid.encode(),
                **({"failed": self.failed.encode()} if self.failed else {}),
                **({} if self.computed is None else {"computed": self.computed.encode()}),
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Provenance:
        """The provenance that `to_text` wrote; ValueError or KeyError for anything else."""
        record: dict[str, Any] = json.loads(text)
        return cls(
            column_uuid=record["column"],
            udf_version=record["udf"],
            inputs=tuple(record["inputs"]),
            valid=RowSet.decode(record["valid"]),
            failed=RowSet.decode(record["failed"]) if "failed" in record else None,
            computed=RowSet.decode(record["computed"]) if "computed" in record else None,
        )


@dataclass(frozen=True, slots=True)
class NamedProvenance:
    """What is known from a data file's name alone."""

    complete: bool
    column: str
    udf: str
    inputs: str

    @property
    def may_be_mixed(self) -> bool:
        """Whether the file may hold values of several versions of the function."""
        return self.udf.startswith(_MIXED)


def parse_file_name(path: str) -> NamedProvenance | None:
    """Read a data file's name; None when it was not written by Geneva."""
    match = _NAME.match(path)
    if match is None:
        return None
    return NamedProvenance(
        match["extent"] == "full", match["column"], match["udf"], match["inputs"]
    )


def named_inputs(inputs: tuple[str, ...]) -> str:
    """An input signature as it stands in a file name."""
    return _digest("\n".join(inputs), 12)


def named(column_uuid: str, udf_version: str, inputs: tuple[str, ...]) -> NamedProvenance:
    """What the name of a complete file of this provenance says."""
    return NamedProvenance(
        True, _digest(column_uuid, 8), _named_udf(udf_version), named_inputs(inputs)
    )


def _named_udf(version: str) -> str:
    return _MIXED + _digest(version, 8) if version.startswith(MIXED) else _digest(version, 12)


def read_provenance(ref: TableRef, path: str) -> Provenance | None:
    """The provenance of a data file in the table's own folder; None when there is none."""
    return provenance_at(f"{ref.uri}/data/{path}", ref.storage_options)


def provenance_at(uri: str, storage_options: Secrets) -> Provenance | None:
    """The provenance in a data file's metadata; None when there is none or the file is gone."""
    try:
        reader = LanceFileReader(uri, storage_options=storage_options.plain())
        text = (reader.metadata().schema.metadata or {}).get(PROVENANCE_METADATA.encode())
        return Provenance.from_text(text.decode()) if text is not None else None
    except BaseException as error:
        if not is_damage(error):
            raise
        return None


def input_signature(fragment: FragmentFacts, inputs: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Which files and fields a fragment's input values come from.

    `inputs` are the field ids of each input, in order: f(a, b) is not f(b, a). Names are left out
    on purpose: a renamed input is the same input.
    """
    signature: list[str] = []
    for position, field_ids in enumerate(inputs):
        wanted = frozenset(field_ids)
        files = fragment.files_of(wanted)
        left = wanted
        for file in sorted(files, key=_path) if len(files) > 1 else files:
            held = wanted & file.fields
            left -= held
            signature.append(f"{position}:{file.path}:{_listed(held)}")
        if files and left:
            # A struct that got a child since: its values are others now.
            signature.append(f"{position}::{_listed(left)}")
    return tuple(signature)


def signature_of(computation: Computation, fragment: FragmentFacts) -> tuple[str, ...]:
    """What the values of a fragment are computed from now: files and fields, or a source.

    A column that was renamed is the same input. A struct whose fields were is another one.
    """
    if computation.source is not None:
        return (computation.source.signature,)
    inputs = computation.inputs
    kinds = (f"{place} {found.kind}" for place, found in enumerate(inputs) if found.kind)
    return (*input_signature(fragment, [found.field_ids for found in inputs]), *kinds)


def adoption_signature(
    computation: Computation, fragment: FragmentFacts, output_ids: Iterable[int] | None = None
) -> tuple[str, ...]:
    """What receipts are of that stand in another file than their values: of those values too.

    `output_ids` are the fields of the values that the file has receipts of; None: of all.
    """
    fields = computation.output_ids if output_ids is None else output_ids
    values = (f"values:{file.path}" for file in fragment.files_of(fields))
    return (*signature_of(computation, fragment), *sorted(values))


def output_file(computation: Computation, fragment: FragmentFacts) -> str | None:
    """The file that holds the values; several as one text: of several outputs, of a grown struct.

    One of NULLs alone holds none: it is only there for Lance (`publish.add_missing_fields`).
    """
    files = fragment.files_of(computation.output_ids)
    return "\n".join(file.path for file in files if not is_nulls_file(file.path)) or None


def _path(file: FileFacts) -> str:
    return file.path


def _listed(field_ids: frozenset[int]) -> str:
    return ",".join(map(str, sorted(field_ids)))


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
