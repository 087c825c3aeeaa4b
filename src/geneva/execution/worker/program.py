"""What a worker calls on a batch: a UDF, the carrying over of columns, or a look-up by key."""

from __future__ import annotations

import atexit
import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from geneva.errors import SQLExecutionError, UDFError, UnmatchedKeyError
from geneva.execution.apply.ahead import CallsAhead, Flight
from geneva.execution.apply.batch import Applied, Applier
from geneva.execution.apply.call import Kept
from geneva.execution.apply.timeouts import Guard
from geneva.execution.worker.partition_queries import PartitionQueries
from geneva.execution.worker.surroundings import enter_function, variables_of_job
from geneva.execution.worker.task import ColumnWork
from geneva.model.computation import Carry, Load, Udf
from geneva.model.tables import OnMissing
from geneva.model.view_query import IS_SET
from geneva.planning.batching import CallCost
from geneva.storage.columns.functions import forget_functions, load_udf
from geneva.storage.lance.casts import cast_batch
from geneva.storage.lance.pieces import concat_batches, no_room, null_rows
from geneva.storage.loads.lookup import Found, open_lookup
from geneva.udf.job_modules import forget_modules, job_modules
from geneva.udf.picking import picked
from geneva.udf.shipped_modules import forget_shipped


class Program(Protocol):
    """Turns a batch of inputs into as many values."""

    cost: CallCost
    """What its calls cost in this process, learned as they are made."""
    is_async: bool
    """Whether its calls overlap: then `ahead` makes them."""
    prepares: int
    """How many batches should be prepared, or on their way to it, while one is run."""

    @property
    def function(self) -> object:
        """What it calls, which is set up once for all programs that call it; None: nothing."""

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

    def call(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Applied | Kept:
        """The same, but for what may be left for later."""

    def ahead(
        self, batch: pa.RecordBatch, guard: Guard | None = None, flight: Flight | None = None
    ) -> CallsAhead | None:
        """The calls for rows that are wanted one after the other; None: they are made by `run`."""

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """Apply the policy to a row whose worker died or hung."""

    def close(self, *, keep_function: bool = False) -> None:
        """Release what is held, but for the function if others call it, too."""


class OwnProgram:
    """A function of Geneva's own over batches: nothing to set up, to wait for, or to forgive."""

    def __init__(self, values: Callable[[pa.RecordBatch], Applied]) -> None:
        """Call nothing yet."""
        self._values = values
        self.cost, self.is_async, self.prepares = CallCost(), False, 0
        self.function: object = None

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
        """Call the function."""
        return self._values(batch)

    def call(self, batch: pa.RecordBatch, guard: Guard | None = None) -> Applied:
        """Leave nothing for later."""
        return self._values(batch)

    def ahead(
        self, batch: pa.RecordBatch, guard: Guard | None = None, flight: Flight | None = None
    ) -> None:
        """There is nothing to wait for."""

    def settle(self, error: UDFError, batch: pa.RecordBatch, attempt: int) -> Applied:
        """There is no policy: it has to work."""
        raise error

    def close(self, *, keep_function: bool = False) -> None:
        """Hold nothing."""


def _carry(fields: Sequence[pa.Field], batch: pa.RecordBatch) -> Applied:
    """The columns of a batch side by side, with the one that says that a row is filled."""
    columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    is_set = pa.repeat(pa.scalar(True), batch.num_rows)
    arrays = [
        is_set if field.name == IS_SET else _carried(columns[field.name], field) for field in fields
    ]
    return Applied(tuple(arrays))


class Loader:
    """Looks values up by key in a staged source."""

    def __init__(self, work: ColumnWork, program: Load) -> None:
        """Look nothing up yet."""
        outputs = work.computation.outputs
        self._schema = pa.schema([(output.name, output.type) for output in outputs])
        self._lookup = open_lookup(work.ref, program.keys)
        self._on_missing = program.on_missing

    def values(self, batch: pa.RecordBatch) -> Applied:
        """The values of the keys in the first column; the others are the values that may stay."""
        keys, rows = batch.column(0), batch.num_rows
        found = self._lookup.find(keys)
        if found.values is None or found.values.num_rows < rows:
            if self._on_missing is OnMissing.ERROR:
                raise self._unmatched(keys, found)
            values = self._filled(batch, found)
        else:
            values = self._typed(found.values)
        return Applied(tuple(values.columns), unmatched=rows - int(found.matched.sum()))

    def _typed(self, values: pa.RecordBatch) -> pa.RecordBatch:
        """Values as the table has them: dictionaries are staged without encoding."""
        return cast_batch(values, self._schema, "the source")

    def _filled(self, batch: pa.RecordBatch, found: Found) -> pa.RecordBatch:
        """The values that were found, and in all other rows the old ones or NULL."""
        places = np.flatnonzero(found.matched)
        if self._on_missing is OnMissing.CARRY:
            base = batch.select(range(1, batch.num_columns))
            indices = np.arange(batch.num_rows, dtype=np.int64)
        else:
            base = null_rows(self._schema, 1)
            indices = np.zeros(batch.num_rows, dtype=np.int64)
        base = self._typed(base)
        indices[places] = base.num_rows + np.arange(len(places), dtype=np.int64)
        parts = [base] if found.values is None else [base, self._typed(found.values)]
        return picked(concat_batches(parts), indices)

    def _unmatched(self, keys: pa.Array, found: Found) -> UnmatchedKeyError:
        row = int(np.flatnonzero(~found.matched)[0])
        return UnmatchedKeyError(
            f"The key {keys[row].as_py()!r} is not in the source, and on_missing is 'error'. The "
            "row came while others were loaded, which are kept."
        )


def _carried(values: pa.Array, field: pa.Field) -> pa.Array:
    """Values of the source in the view's type, which was the source's when the view was made."""
    try:
        return values.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if _differ_in_indices(values.type, field.type):
            raise no_room(field.type, field.name) from error
        altered = SQLExecutionError(
            f"the source's column is {values.type} by now, and a value of it does not fit the "
            f"view's {field.type} ({error}). Create the view anew, to give it the new type"
        )
        altered.column = field.name
        raise altered from error


def _differ_in_indices(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types are dictionaries of the same values."""
    if not (pa.types.is_dictionary(one) and pa.types.is_dictionary(other)):
        return False
    return bool(one.value_type == other.value_type)


_LIVE: OrderedDict[tuple[object, ...], Program] = OrderedDict()
_MAX_LIVE = 4
_LOG = logging.getLogger("geneva")
_LOCK = threading.Lock()
_made_with: Mapping[str, str | None] = {}
"""The variables of the jobs that the live programs, and their functions, were loaded for."""


@atexit.register
def close_programs() -> None:
    """Close all programs: at the end of the process, or earlier on request."""
    with _LOCK:
        _close_all()


def live_program(work: ColumnWork) -> Program:
    """The program, made once per worker process: a model is loaded once for any number of tasks.

    Once more for a job with other variables: a client was made with the key that it found, and a
    model from the folder.
    """
    _forget_other_variables()
    computation = work.computation
    key = (
        work.ref,
        computation.program,
        computation.outputs,
        computation.declared_paths,
        computation.partition_rows,
        work.threads,
        job_modules(),
    )
    if isinstance(computation.program, Udf):
        enter_function(load_udf(work.ref, computation.program.digest, work.permit))
    with _LOCK:
        program = _LIVE.get(key)
        if program is None:
            program = _LIVE[key] = _make(work)
        _LIVE.move_to_end(key)
        if len(_LIVE) > _MAX_LIVE:
            _close(_LIVE.popitem(last=False)[1])
    return program


def _forget_other_variables() -> None:
    """Let go of what was made for a job with other variables: objects, functions, modules."""
    global _made_with
    with _LOCK:
        if variables_of_job() == _made_with:
            return
        was_any_made = bool(_LIVE)
        _close_all()
        forget_functions()
        forget_shipped()
        forget_modules()
        _made_with = variables_of_job()
        if was_any_made:
            _free()


def _free() -> None:
    """Free what was let go of: the next model needs the memory.

    Modules and functions refer to each other in circles, and those of the first task are frozen.
    """
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


def _close_all() -> None:
    while _LIVE:
        _close(_LIVE.popitem()[1])


def _close(program: Program) -> None:
    """Close a program that is no longer live. A model that others call stays loaded.

    If it can't be closed, that is not the fault of the job that needs its place.
    """
    shared = any(other.function is program.function for other in _LIVE.values())
    try:
        program.close(keep_function=shared)
    except Exception:  # noqa: BLE001  the user's code may raise anything
        _LOG.exception("A function could not be closed")


def share_surroundings(works: Sequence[ColumnWork]) -> bool:
    """Whether the functions of some columns came with the same modules and variables."""
    udfs = [
        load_udf(work.ref, work.computation.program.digest, work.permit)
        for work in works
        if isinstance(work.computation.program, Udf)
    ]
    return all(
        udf.modules == udfs[0].modules and udf.variables == udfs[0].variables for udf in udfs[1:]
    )


def _make(work: ColumnWork) -> Program:
    computation = work.computation
    match computation.program:
        case Carry():
            carried = [pa.field(o.name, o.type) for o in computation.outputs]
            return OwnProgram(partial(_carry, carried))
        case Load() as program:
            return OwnProgram(Loader(work, program).values)
        case Udf(digest=digest, nullable=nullable):
            udf = load_udf(work.ref, digest, work.permit).with_inputs(computation.declared_paths)
            fields = tuple(output.field for output in computation.outputs) if udf.unpacks else None
            kind = udf.data_type if udf.unpacks else computation.outputs[0].type
            arrow_field = pa.field(computation.name, kind, nullable=nullable)
            rows = computation.partition_rows
            queries = PartitionQueries(rows, work.job_id) if rows is not None else None
            return Applier(udf, arrow_field, threads=work.threads, queries=queries, fields=fields)
