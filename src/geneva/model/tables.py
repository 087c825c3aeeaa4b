"""The nouns that several rooms share: where a table is, what a column is, what is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa

from geneva.secret_values import Secrets as Secrets


@dataclass(frozen=True, slots=True)
class TableRef:
    """Where a table is, and what it takes to open it. Pickles; opens nothing by itself."""

    name: str
    """As `geneva.model.uris.TableName` says it: a branch has its own."""
    uri: str
    """Its folder; of a branch the one inside the table's, with all that is the branch's own."""
    storage_options: Secrets = field(default_factory=Secrets)
    branch: str | None = None

    @property
    def root(self) -> str:
        """The folder of the table, which has those of its branches inside."""
        return self.uri if self.branch is None else self.uri.removesuffix(f"/tree/{self.branch}")

    @property
    def is_remote(self) -> bool:
        """Whether it is in an object store, where each request takes its time."""
        return is_remote(self.uri)


def is_remote(uri: str) -> bool:
    """Whether something is in an object store, where each request takes its time."""
    return "://" in uri and not uri.startswith("file://")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How big the pieces of work are, in rows. None: chosen by the engine."""

    batch_size: int | None = None
    """Rows handed to one call of a batch UDF."""
    checkpoint_size: int | None = None
    """Rows a batch checkpoint holds, exactly; None: by time, between the two bounds below."""
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    task_size: int | None = None
    """Rows a worker task computes."""

    def overridden_by(self, other: Sizes) -> Sizes:
        """These sizes, except where `other` says something."""
        return Sizes(
            *(
                theirs if theirs is not None else mine
                for mine, theirs in (
                    (self.batch_size, other.batch_size),
                    (self.checkpoint_size, other.checkpoint_size),
                    (self.min_checkpoint_size, other.min_checkpoint_size),
                    (self.max_checkpoint_size, other.max_checkpoint_size),
                    (self.task_size, other.task_size),
                )
            )
        )


class CommitId(NamedTuple):
    """A commit: a table that is made anew has the same versions, and none of the commits."""

    version: int
    """The version of the table that it made."""
    uuid: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """An input of which nobody can tell which column it is: others have moved columns."""

    path: str
    """What it is called in the definition."""
    candidates: tuple[str, ...]
    """The columns that it may be; of several such inputs, those of all of them."""
    readings: tuple[tuple[str, ...], ...] = ()
    """What all inputs may be: first by names, where these are columns, then by ids. Empty: there
    are too many ways to read it."""
    by_name: bool = False
    """Whether the first reading is the one by names."""
    overwritten: bool = False
    """Whether the table was overwritten, at a moment when nobody knows what was called how."""


@dataclass(frozen=True, slots=True)
class ColumnDefinition:
    """A computed column, as its field metadata defines it. Reading one runs no user code."""

    name: str
    arrow_field: pa.Field
    uuid: str
    """Identity: field ids are reused by Lance, this never is."""
    udf_name: str
    udf_version: str
    udf_digest: str
    """SHA-256 of the pickled function: checked before it is ever loaded."""
    inputs: tuple[str, ...]
    """Column paths, in the order of the function's parameters."""
    input_names: tuple[str, ...] = ()
    """The paths that they had when the function was declared; empty: those that they have."""
    reads_all: bool = False
    """Whether no inputs were named: they are all columns that there were when it was declared."""
    input_fields: tuple[tuple[int, str], ...] = ()
    """Each input's own field id and its type, which outlive a renaming."""
    inputs_changed: bool = False
    """Whether it may have read other columns before: then receipts may be of these."""
    group: str = ""
    """Identity of the columns that one call fills together; empty: it fills this one alone."""
    output: str = ""
    """Which field of the function's record it holds; empty: the function's value itself."""
    prefix: str = ""
    """What the names of the group's columns begin with, before the names of the fields."""
    nullable: bool = True
    """Whether the function may return NULL."""
    overrides: bool = False
    """Whether the UDF is one for a single run, and not the column's own."""
    former_versions: tuple[str, ...] = ()
    """Versions of the UDFs that the column had before, the latest last; their values are stale."""
    kept_versions: tuple[str, ...] = ()
    """Versions of other UDFs whose values count as right, the latest last."""
    right_before: tuple[str, ...] = ()
    """All versions whose values counted as right before the change to this UDF."""
    own_field: int | None = None
    """The column's own field id: as long as it has that, ids mean what they meant."""
    fields_at: CommitId | None = None
    """The commit that the ids are of; None: nobody wrote it down."""
    doubt: Doubt | None = None
    """Which column to read, where nobody can tell: jobs ask. Found out, and never stored."""
    assumed: tuple[tuple[str, str], ...] = ()
    """Inputs whose names are gone, and what is read for them, because nothing else can be meant.
    Found out, and never stored."""
    has_receipts: bool = False
    """Whether the column had receipts from the day it was declared."""
    sizes: Sizes = field(default_factory=Sizes)
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    on_error: str = ""
    """The policy for rows that fail, as JSON; empty: fail fast."""
    timeout: float | None = None
    """Seconds a call of the function may take."""
    memoize: bool | None = None
    """Whether rows with equal inputs share one call."""
    auto_backfill: bool | None = None
    """Asked for by the user, for services that compute by themselves."""
    manifest: str | None = None
    """What the function needs, as of when it was declared: a `GenevaManifest` as JSON."""
    declaration: str = ""
    """What was claimed when it was declared, and who signed that (`geneva.trust.claims`)."""

    def __repr__(self) -> str:
        """Show at a glance what it is, and what computes it."""
        return (
            f"ColumnDefinition({self.name!r}, {self.arrow_field.type}, "
            f"{self.udf_name}({', '.join(self.inputs)}), version={self.udf_version!r})"
        )

    @property
    def computation_id(self) -> str:
        """The identity of what computes it: its own, or that of its group."""
        return self.group or self.uuid


class Reason(StrEnum):
    """Why rows of a fragment have to be computed."""

    NEW = "new"
    UDF_CHANGED = "UDF changed"
    INPUT_CHANGED = "input changed"
    PARTIAL = "not computed yet"
    NULL = "value is NULL"
    ASKED = "asked for"
    FAILED = "failed before"
    LOST = "its data file is gone"
    UNPROVEN = "unproven"
    UPSTREAM = "its input is to be computed first"
    UP_TO_DATE = "up to date"


class Unproven(StrEnum):
    """What to do with values from before their column had receipts."""

    COMPUTE = "compute"
    KEEP = "keep"


class Upstream(StrEnum):
    """What to do about computed inputs that are not right themselves."""

    COMPUTE = "compute"
    """Bring them up to date first, in the same job."""
    REFUSE = "refuse"
    IGNORE = "ignore"
    """Compute from what is there."""


class OnMissing(StrEnum):
    """What `load_columns` does with rows whose key is not in the source."""

    CARRY = "carry"
    """Keep the value that they have; NULL in a new column."""
    NULL = "null"
    ERROR = "error"
    """Refuse to load anything."""
