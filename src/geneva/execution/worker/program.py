"""What a worker calls on a batch: a UDF, or the carrying over of columns of another table."""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import pyarrow as pa

from geneva.errors import SQLExecutionError, UDFError
from geneva.execution.apply.ahead import CallsAhead, Flight
from geneva.execution.apply.batch import Applied, Applier
from geneva.execution.apply.timeouts import Guard
from geneva.execution.worker.surroundings import enter_function
from geneva.execution.worker.task import ColumnWork
from geneva.model.computation import Carry, Udf
from geneva.model.view_query import IS_SET
from geneva.planning.batching import CallCost
from geneva.storage.columns.functions import load_udf


class Program(Protocol):
    """Turns a batch of inputs into as many values."""

    cost: CallCost
    """What its calls cost in this process, learned as they are made."""
    is_async: bool
    """Whether its calls overlap: then `ahead` makes them."""
    prepares: int
    """How many batches should be prepared, or on their way to it, while one is run."""

    def prepare(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Future[Any] | None:
        """Begin to prepare a batch for `run`, in another thread; None: there is nothing to."""

    def warm(self, batch: pa.RecordBatch) -> None:
        """Set up what is needed for batches like this one, if that was not done yet."""

    def run(
        self,
        batch: pa.RecordBatch,
        guard: Guard | None = None,
        prepared: Future[Any] | None = None,
    ) -> Applied:
        """Compute the values of one batch; say which rows failed."""

    def ahead(
        self, batch: pa.RecordBatch, guard: Guard | None = None, flight: Flight | None = None
    ) -> CallsAhead | None:
        """The calls for rows that are wanted one after the other; None: they are made by `run`."""

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """Apply the policy to a row whose worker died or hung."""

    def close(self) -> None:
        """Release what is held."""


class Carrier:
    """Carries columns over as they are."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        """Carry these columns; the one that says that a row is filled is added."""
        self._fields = fields
        self.cost, self.is_async, self.prepares = CallCost(), False, 0

    def prepare(self, batch: pa.RecordBatch, guard: Guard | None = None) -> None:
        """Need nothing."""

    def warm(self, batch: pa.RecordBatch) -> None:
        """Need nothing."""

    def run(
        self,
        batch: pa.RecordBatch,
        guard: Guard | None = None,
        prepared: Future[Any] | None = None,
    ) -> Applied:
        """Put the batch's columns side by side."""
        columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        is_set = pa.repeat(pa.scalar(True), batch.num_rows)
        arrays = [
            is_set if field.name == IS_SET else _carried(columns[field.name], field)
            for field in self._fields
        ]
        return Applied(tuple(arrays))

    def ahead(
        self, batch: pa.RecordBatch, guard: Guard | None = None, flight: Flight | None = None
    ) -> None:
        """There is nothing to wait for."""

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """There is no policy: carrying over has to work."""
        raise error

    def close(self) -> None:
        """Hold nothing."""


def _carried(values: pa.Array, field: pa.Field) -> pa.Array:
    """Values of the source in the view's type, which was the source's when the view was made."""
    try:
        return values.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        altered = SQLExecutionError(
            f"the source's column is {values.type} by now, and a value of it does not fit the "
            f"view's {field.type} ({error}). Create the view anew, to give it the new type"
        )
        altered.column = field.name
        raise altered from error


_LIVE: OrderedDict[tuple[object, ...], Program] = OrderedDict()
_MAX_LIVE = 4
_LOCK = threading.Lock()


@atexit.register
def close_programs() -> None:
    """Close all programs: at the end of the process, or earlier on request."""
    with _LOCK:
        while _LIVE:
            _LIVE.popitem()[1].close()


def live_program(work: ColumnWork) -> Program:
    """The program, made once per worker process: a model is loaded once for any number of tasks."""
    computation = work.computation
    key = (
        work.ref,
        computation.program,
        computation.outputs,
        computation.input_paths,
        work.threads,
    )
    if isinstance(computation.program, Udf):
        enter_function(load_udf(work.ref, computation.program.digest, work.permit))
    with _LOCK:
        program = _LIVE.get(key)
        if program is None:
            program = _LIVE[key] = _make(work)
        _LIVE.move_to_end(key)
        if len(_LIVE) > _MAX_LIVE:
            _LIVE.popitem(last=False)[1].close()
    return program


def _make(work: ColumnWork) -> Program:
    computation = work.computation
    match computation.program:
        case Carry():
            return Carrier([pa.field(output.name, output.type) for output in computation.outputs])
        case Udf(digest=digest, nullable=nullable):
            udf = load_udf(work.ref, digest, work.permit).with_inputs(list(computation.input_paths))
            fields = tuple(output.field for output in computation.outputs) if udf.unpacks else None
            kind = udf.data_type if udf.unpacks else computation.outputs[0].type
            arrow_field = pa.field(computation.name, kind, nullable=nullable)
            return Applier(udf, arrow_field, threads=work.threads, fields=fields)
