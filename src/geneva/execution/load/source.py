"""What columns are loaded from, and staging it by its keys, with the workers of a job."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from geneva.errors import (
    ColumnNotFoundError,
    DuplicateKeyError,
    GenevaError,
    NullKeyError,
    TypeMismatchError,
    UnreadableSourceError,
    UserInputError,
)
from geneva.execution.runner import Runner
from geneva.model.computation import StagedKeys
from geneva.model.tables import Secrets, TableRef
from geneva.storage.loads.files import FilePart, Files, open_files, read_part
from geneva.storage.loads.staging import (
    Block,
    Slice,
    SourceSchema,
    blocks_from_text,
    blocks_to_text,
    open_folder,
    partitions_for,
    slices_of,
    stage_blocks,
    stage_index,
)

_POLL_SECONDS = 0.5
_STOP_SECONDS = 30.0
_Item = TypeVar("_Item")
_ERRORS: dict[str, type[GenevaError]] = {
    kind.__name__: kind
    for kind in (
        NullKeyError,
        TypeMismatchError,
        ColumnNotFoundError,
        UserInputError,
        UnreadableSourceError,
    )
}
"""What is wrong with a source, by the name that a worker reports."""

CheckStop: TypeAlias = Callable[[], None]
"""Raises what ends the job, when it was cancelled or has no time left."""


@dataclass(frozen=True, slots=True)
class StagedSource:
    """Where the rows of a source are to go, and which of its columns."""

    ref: TableRef
    """The table whose folder they are staged in."""
    folder: str
    columns: SourceSchema


@dataclass(frozen=True, slots=True)
class StagingJob:
    """What runs the tasks that stage a source."""

    runner: Runner
    check_stop: CheckStop = lambda: None
    concurrency: int | None = None
    """Tasks at once; None: as many as there are slots."""

    def run(self, function: Callable[[_Item], str], items: Sequence[_Item]) -> list[str]:
        """Call a function on every item, on workers; stop when the job has to."""
        at_once = self.concurrency or max(1, len(items))
        groups = (items[start : start + at_once] for start in range(0, len(items), at_once))
        return [text for group in groups for text in self._run(function, group)]

    def _run(self, function: Callable[[_Item], str], items: Sequence[_Item]) -> list[str]:
        return self.wait(self.runner.submit(function, items), self.runner.cancel)

    def wait(self, running: Future[list[str]], cancel: Callable[[], None]) -> list[str]:
        """Wait for tasks; cancel them when the job has to stop."""
        try:
            while not running.done():
                self.check_stop()
                wait([running], timeout=_POLL_SECONDS)
        except BaseException:
            cancel()
            wait([running], timeout=_STOP_SECONDS)
            raise
        return running.result()


class LoadSource(Protocol):
    """Rows with keys, wherever they are."""

    @property
    def name(self) -> str:
        """What messages and the job history call it."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that it has."""

    @property
    def rows(self) -> int | None:
        """How many rows it has; None: nobody knows."""

    @property
    def fingerprint(self) -> str:
        """The same as long as its rows are; of what can't be known again, a new one each time."""

    @property
    def can_be_known_again(self) -> bool:
        """Whether a later load can tell that it is the same source."""

    def stage(self, target: StagedSource, job: StagingJob) -> list[Block]:
        """Stage its rows as blocks. A source that can't be used is an error of its own."""


# ---------------------------------------------------------------------------- on workers, by part


@dataclass(frozen=True, slots=True)
class PartToStage:
    """A part of some files, for one task."""

    target: StagedSource
    name: str
    part: FilePart


def stage_part(item: PartToStage) -> str:
    """Stage a part; return its blocks, or what is wrong with it. This is shipped to workers.

    What can't be read is read once more: its store may have failed.
    """
    for _ in range(2):
        batches = read_part(item.part, item.target.columns.names)
        text = stage_as_text(item.target, item.name, batches, item.part.uri)
        if not isinstance(_problem(text), UnreadableSourceError):
            break
    return text


def stage_as_text(
    target: StagedSource, name: str, batches: Iterable[pa.RecordBatch], where: str
) -> str:
    """Stage rows; return the blocks, or what is wrong with them: Spark would try that again."""
    try:
        folder = open_folder(target.ref, target.folder)
        return blocks_to_text(stage_blocks(folder, name, target.columns, batches, where))
    except tuple(_ERRORS.values()) as error:
        return json.dumps({"error": type(error).__name__, "message": str(error)})


def blocks_of(texts: Iterable[str]) -> list[Block]:
    """The blocks that tasks have staged; raise what one of them found wrong."""
    blocks: list[Block] = []
    for text in texts:
        problem = _problem(text)
        if problem is not None:
            raise problem
        blocks += blocks_from_text(text)
    return blocks


def _problem(text: str) -> GenevaError | None:
    """What a task found wrong; None: it has staged all of its rows."""
    if not text.startswith("{"):
        return None
    found = json.loads(text)
    return _ERRORS[found["error"]](found["message"])


@dataclass(frozen=True, slots=True)
class FileSource:
    """Files of one format. They are staged by tasks of the job."""

    files: Files
    can_be_known_again: bool = True

    @property
    def name(self) -> str:
        """Where they are."""
        return self.files.name

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self.files.schema

    @property
    def rows(self) -> int | None:
        """By their footers."""
        return self.files.rows

    @property
    def fingerprint(self) -> str:
        """Of their names, sizes and times."""
        return self.files.fingerprint

    def stage(self, target: StagedSource, job: StagingJob) -> list[Block]:
        """A task for each part."""
        items = [
            PartToStage(target, f"part-{number}", part)
            for number, part in enumerate(self.files.parts)
        ]
        return blocks_of(job.run(stage_part, items))


@dataclass(frozen=True, slots=True, eq=False)
class BatchSource:
    """Rows in the memory of this process, or that it is handed one batch after the other."""

    reader: pa.RecordBatchReader
    rows: int | None
    name: str = "the rows given"
    fingerprint: str = field(default_factory=lambda: uuid.uuid4().hex)
    can_be_known_again: bool = False

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches."""
        return self.reader.schema

    def stage(self, target: StagedSource, job: StagingJob) -> list[Block]:
        """Here: nobody else has them."""
        names = target.columns.names

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in self.reader:
                job.check_stop()
                yield batch.select(names)

        return blocks_of([stage_as_text(target, "part-0", batches(), self.name)])


def refuse_format(source: Any, source_format: str | None) -> None:
    """Refuse a format for what is no file."""
    if source_format is not None:
        raise UserInputError(
            f"source_format says what files are stored as, and the source is a "
            f"{type(source).__name__}: leave it out."
        )


def open_source(source: Any, source_format: str | None, storage_options: Secrets) -> LoadSource:
    """What a user gave as a source: files, or anything that hands over Arrow batches."""
    if not hasattr(source, "__arrow_c_stream__"):
        if isinstance(source, pa.RecordBatch):
            source = pa.Table.from_batches([source])
        else:
            return FileSource(open_files(source, source_format, storage_options))
    refuse_format(source, source_format)
    rows = source.num_rows if isinstance(source, pa.Table) else None
    return BatchSource(pa.RecordBatchReader.from_stream(source), rows)


# ------------------------------------------------------------------------------------- the index


@dataclass(frozen=True, slots=True)
class IndexToStage:
    """One file of the index, for one task."""

    target: StagedSource
    blocks: tuple[str, ...]
    slices: tuple[Slice, ...]
    partition: int


def stage_partition(item: IndexToStage) -> str:
    """Stage a file of the index; return keys that are there twice. This is shipped to workers."""
    target = item.target
    folder = open_folder(target.ref, target.folder)
    key = target.columns.key.name
    twice = stage_index(folder, key, item.blocks, item.slices, item.partition)
    return json.dumps([repr(found) for found in twice])


def stage_source(source: LoadSource, target: StagedSource, job: StagingJob) -> StagedKeys:
    """Stage a source and the index of its keys; DuplicateKeyError where one is there twice."""
    blocks = source.stage(target, job)
    names = tuple(block.name for block in blocks)
    partitions = partitions_for(blocks)
    items = [
        IndexToStage(target, names, slices_of(blocks, partition, partitions), partition)
        for partition in range(partitions)
    ]
    twice: list[Any] = [key for text in job.run(stage_partition, items) for key in json.loads(text)]
    if twice:
        key, more = target.columns.key.name, " and more" if len(twice) > 1 else ""
        raise DuplicateKeyError(
            f"Several rows of {source.name} have the same {key!r}: {', '.join(twice[:5])}{more}. "
            "Which of their values is right can't be known: leave all but one of them out. "
            "Nothing was loaded."
        )
    return StagedKeys(
        folder=target.folder,
        blocks=names,
        partitions=partitions,
        nbytes=sum(block.nbytes for block in blocks),
    )
