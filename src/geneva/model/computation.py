"""What is computed: one noun for a UDF's column, for what a view carries over, and for a load.

A `Computation` is bound to one version of a table: its columns are known by field ids. Planner,
worker and commit need to know nothing else about what they work on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import TypeAlias

import pyarrow as pa

from geneva.model.digests import seed_of
from geneva.model.partitions import Keyed
from geneva.model.tables import OnMissing, Sizes, TableRef

RECEIPT_PREFIX = "__receipt_"
"""How the hidden columns of receipts are called, before part of their column's UUID."""


def receipt_name(column_id: str) -> str:
    """The hidden column that holds the receipts of a computed column."""
    return f"{RECEIPT_PREFIX}{column_id[:12]}"


_JOINT = ", "


def joined_name(names: Sequence[str]) -> str:
    """What columns that are filled together are called, in plans and in the history of jobs."""
    return _JOINT.join(names)


def is_named(name: str, column: str) -> bool:
    """Whether a name is that of a column, or of columns that it is filled together with."""
    return name == column or column in name.split(_JOINT)


MIXED = "mixed-"
"""How the version of a file begins that may hold values of several versions of a function."""


def mixed_version(versions: Sequence[str]) -> str:
    """The version of a file that may hold values of several ones, in whatever order."""
    every = sorted(set(versions))
    if len(every) == 1:
        return every[0]
    return f"{MIXED}{hashlib.sha256(chr(10).join(every).encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Output:
    """A column that is filled."""

    name: str
    field_ids: tuple[int, ...]
    """The ids that data files list for it."""
    type: pa.DataType = dataclass_field(default_factory=pa.null)
    column_id: str = ""
    """The column's own identity; empty for columns that no function fills."""
    field: str = ""
    """The field of the function's record that it holds; empty: the function's value itself."""
    declaration: str = dataclass_field(default="", compare=False)
    """What was claimed when it was declared, and who signed that (`geneva.trust.claims`)."""


@dataclass(frozen=True, slots=True)
class Input:
    """A column that is read, by its path."""

    path: str
    field_ids: tuple[int, ...] = ()
    """The ids that data files list for it; empty where it is in another table."""
    declared: str = ""
    """The path that it had when the function was declared; empty: the one that it has."""
    kind: str = ""
    """Its type as text, where there are structs in it: a function knows their fields by name."""


@dataclass(frozen=True, slots=True)
class Source:
    """Another table that the inputs are read from, row by row, at one version."""

    ref: TableRef
    version: int
    expressions: tuple[tuple[str, str], ...]
    """What to read of each row: names and Lance SQL, in order."""
    address: str = ""
    """What provenance calls it, the same when the database was moved; empty: by its URI."""
    keyed: Keyed | None = None
    """Read a key and a digest of each row, instead of what the expressions say."""

    @property
    def signature(self) -> str:
        """What the values were computed from."""
        return source_signature(self.address or self.ref.uri, self.version)


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """The rows that partitions are of: some of a table's, at one version."""

    source: Source
    where: str | None = None
    seed: int | None = None
    offset: int | None = None
    limit: int | None = None
    """A partition that lists no rows has all that these say, in the order that they say."""


def source_signature(address: str, version: int) -> str:
    """One version of a source, as the provenance of a view's files names it."""
    return f"{address}@{version}"


@dataclass(frozen=True, slots=True)
class Udf:
    """A function of the user's."""

    name: str
    digest: str
    """SHA-256 of the pickled function: checked before it is ever loaded."""
    nullable: bool = True
    """Whether it may return NULL."""
    on_error: str = ""
    """The policy for rows that fail, as JSON; empty: fail fast."""
    memoize: bool = False
    """Whether rows with equal inputs share one call."""
    manifest: tuple[str, str | None] | None = None
    """The name and the checksum of the manifest that it brings along, for the job's record."""


@dataclass(frozen=True, slots=True)
class Permit:
    """The driver's word that a function may run. A worker loads none without it."""

    digest: str


@dataclass(frozen=True, slots=True)
class Carry:
    """Columns and SQL expressions of a source, taken over as they are."""


@dataclass(frozen=True, slots=True)
class StagedKeys:
    """A source by its keys, staged in a table's folder: blocks of rows, and an index of them."""

    folder: str
    """Its name among the table's staged sources."""
    blocks: tuple[str, ...] = ()
    """The files that hold keys and values, in the order that the index counts them."""
    partitions: int = 1
    """Files of the index, each of a range of hashes; a power of two."""
    nbytes: int = 0
    """The size of keys and values in memory."""


@dataclass(frozen=True, slots=True)
class Load:
    """Values that are looked up elsewhere, by the key of each row."""

    keys: StagedKeys
    on_missing: OnMissing


Program: TypeAlias = Udf | Carry | Load


@dataclass(frozen=True, slots=True)
class Resources:
    """What one task needs. A runner leaves out what its cluster can't promise.

    `num_cpus` and `num_gpus` are counts per task; `memory` is in bytes.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Computation:
    """Everything that planner, worker and commit need to know of what is computed."""

    id: str
    """Identity: never reused, while names and field ids are."""
    name: str
    """What people call it: the column's name, or those of all its columns (`joined_name`)."""
    version: str
    """Fingerprint of the function's meaning, or what the user gave as such."""
    outputs: tuple[Output, ...]
    """The columns that are filled together."""
    program: Program
    inputs: tuple[Input, ...] = ()
    receipts: tuple[Output, ...] = ()
    """The hidden columns of receipts, one for each output: what each value was computed from. None
    of them is there, or all are."""
    source: Source | None = None
    """Where the inputs are, when not in the table itself."""
    partition_rows: PartitionRows | None = None
    """Of a table function: where the rows of the partitions are that its inputs describe. Then the
    last column that is read is no input, but the rows of the partition."""
    filled_flag: Output | None = None
    """The boolean column that says whether a row is filled, where there are no receipts."""
    former_versions: tuple[str, ...] = ()
    """Versions that the column had before, and whose values are stale."""
    kept_versions: tuple[str, ...] = ()
    """Other versions of the function whose values count as right: the user said to keep them."""
    older_than_receipts: bool = False
    """Whether values may have been computed before the column had receipts."""
    is_override: bool = False
    """Whether the function is one for a single run, and not the column's own."""
    assumed: tuple[tuple[str, str], ...] = dataclass_field(default=(), compare=False)
    """Inputs whose names are gone, and what is read for them, though nothing proves it."""
    sizes: Sizes = dataclass_field(default_factory=Sizes)
    resources: Resources = dataclass_field(default_factory=Resources)

    @property
    def written(self) -> tuple[Output, ...]:
        """The columns of its data files: what is computed, and the receipts."""
        return (*self.outputs, *self.receipts)

    @property
    def receipt_names(self) -> tuple[str, ...]:
        """What its receipts are called, also where the table has no columns of them yet."""
        return tuple(receipt_name(output.column_id) for output in self.outputs if output.column_id)

    @property
    def facets(self) -> tuple[Computation, ...]:
        """One computation for each output whose values are right or not by themselves.

        Columns that a view carries over are judged together.
        """
        if len(self.outputs) == 1 or isinstance(self.program, Carry):
            return (self,)
        every = ((receipt,) for receipt in self.receipts)
        receipts: list[tuple[Output, ...]] = [*every] or [()] * len(self.outputs)
        return tuple(
            replace(self, name=output.name, outputs=(output,), receipts=own)
            for output, own in zip(self.outputs, receipts, strict=True)
        )

    def facet(self, column: str) -> Computation:
        """The one of an output, or the only one."""
        facets = self.facets
        return next((found for found in facets if found.name == column), facets[0])

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The field ids of what is computed."""
        return tuple(i for output in self.outputs for i in output.field_ids)

    @property
    def written_ids(self) -> tuple[int, ...]:
        """The field ids of its data files."""
        return tuple(i for output in self.written for i in output.field_ids)

    @property
    def input_paths(self) -> tuple[str, ...]:
        """The paths of the inputs, in the order of the function's parameters."""
        return tuple(found.path for found in self.inputs)

    @property
    def declared_paths(self) -> tuple[str, ...]:
        """The same as they were when the function was declared: what it calls its inputs."""
        return tuple(found.declared or found.path for found in self.inputs)

    @property
    def read_paths(self) -> tuple[str, ...]:
        """What is read of the table for each row: the inputs, and values that may stay."""
        carries = isinstance(self.program, Load) and self.program.on_missing is OnMissing.CARRY
        return (*self.input_paths, *(output.name for output in self.outputs if carries))

    @property
    def runs_user_code(self) -> bool:
        """Whether a function of the user's is called."""
        return isinstance(self.program, Udf)

    @property
    def memoizes(self) -> bool:
        """Whether rows with equal inputs share one call."""
        return isinstance(self.program, Udf) and self.program.memoize

    @property
    def program_name(self) -> str:
        """What the program is called, in keys and in plans."""
        match self.program:
            case Udf(name=name):
                return name
            case Load():
                return "load_columns"
            case Carry():
                return self.name

    @property
    def error_policy(self) -> str:
        """The policy for rows that fail, as JSON; empty: fail fast."""
        return self.program.on_error if isinstance(self.program, Udf) else ""

    @property
    def file_version(self) -> str:
        """The version that its data files are named after.

        Where values of other versions are kept, a file may hold a mixture of them: then it is named
        after all of them, and not taken for one of a single version when they are kept no longer.
        """
        return mixed_version((self.version, *self.kept_versions))

    def receipted(self, read: pa.RecordBatch) -> list[pa.Array]:
        """The inputs among the columns that were read: what a receipt is made of."""
        columns: list[pa.Array] = read.columns
        return columns if self.partition_rows is None else columns[:-1]

    def receipt_seed(self, version: str | None = None) -> int:
        """What a receipt begins with: the column and the version of its function."""
        return seed_of(f"{self.id}\n{self.version if version is None else version}")


MakePermit: TypeAlias = Callable[[TableRef, Computation], Permit | None]
"""Lets the function of a computation run, or raises UntrustedFunctionError."""


def permit_any(ref: TableRef, computation: Computation) -> Permit | None:
    """Let any function run."""
    program = computation.program
    return Permit(program.digest) if isinstance(program, Udf) else None
