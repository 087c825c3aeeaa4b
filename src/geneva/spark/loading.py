"""A Spark data frame as a source to load columns from: its own tasks stage its rows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from geneva.errors import TypeMismatchError
from geneva.execution.load.source import StagedSource, StagingJob, blocks_of, stage_as_text
from geneva.spark.runner import SparkRunner
from geneva.spark.source.types import arrow_schema
from geneva.storage.loads.staging import Block

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True, eq=False)
class FrameSource:
    """The rows of a data frame."""

    frame: DataFrame
    schema: pa.Schema
    name: str = "the data frame"
    rows: int | None = None
    fingerprint: str = field(default_factory=lambda: uuid.uuid4().hex)
    can_be_known_again: bool = False

    @classmethod
    def of(cls, frame: DataFrame) -> FrameSource:
        """A data frame, if its columns have types that Arrow knows."""
        from pyspark.errors import PySparkException

        try:
            return cls(frame, arrow_schema(frame.schema))
        except PySparkException as error:
            raise TypeMismatchError(f"The data frame can't be loaded: {error}") from None

    def stage(self, target: StagedSource, job: StagingJob) -> list[Block]:
        """Stage the rows of each partition where they are; only names of files come back."""
        from pyspark.sql.functions import col

        where = self.name

        def stage(batches: Iterator[pa.RecordBatch]) -> str:
            # A name of its own for each attempt: a second one may see other rows.
            return stage_as_text(target, f"frame-{uuid.uuid4().hex}", batches, where)

        columns = [col("`" + name.replace("`", "``") + "`") for name in target.columns.names]
        runner = SparkRunner(self.frame.sparkSession)
        tasks = runner.submit_frame(self.frame.select(*columns), stage)
        return blocks_of(job.wait(tasks, runner.cancel))
