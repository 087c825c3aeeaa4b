"""A table and its model, side by side: a step is done to both, and then they are compared."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from geneva import Table
from geneva.errors import GenevaError
from geneva.execution.runner import InProcessRunner
from oracle.functions import PAIR, Call, Function, Killed, Recorder
from oracle.model import (
    Bill,
    Column,
    Job,
    Mismatch,
    Outcome,
    Outcomes,
    Row,
    State,
    Verdict,
    new_row,
    reconcile,
    verdict,
)
from oracle.writes import NAME, Recompute, Tables, Write, selecting, udf_of, write_patiently
from support import connect


@dataclass(frozen=True)
class Setup:
    """What a history begins with. The columns x, y and u are there; `functions` are computed."""

    fragments: tuple[int, ...] = (4, 3)
    storage_version: str = "2.2"
    stable_row_ids: bool = False
    functions: Mapping[str, Function] = field(
        default_factory=lambda: {"a": Function("half"), "b": Function("tens")}
    )


INPUTS = {"a": ("x",), "b": ("a",), "c": ("x", "y"), "d": ("y",)}


@dataclass(frozen=True)
class Restore:
    """Go back to the version before this many steps, as far as it is known."""

    steps_back: int


@dataclass(frozen=True)
class SetFailing:
    """From now on the flaky function fails on its bad rows, or does no more."""

    failing: bool


@dataclass(frozen=True)
class Where:
    """A condition, as SQL and as Python."""

    kind: str
    ids: tuple[int, ...] = ()

    def sql(self, state: State, role: str) -> str:
        match self.kind:
            case "ids":
                return selecting(self.ids)
            case "even":
                return f"{state.names['y']} % 2 = 0"
            case _:
                return f"{state.names[role]} IS NULL"

    def selects(self, role: str) -> Callable[[Row], bool]:
        def selected(row: Row) -> bool:
            match self.kind:
                case "ids":
                    return row.value("id") in self.ids
                case "even":
                    y = row.value("y")
                    return isinstance(y, int) and y % 2 == 0
                case _:
                    return row.value(role) is None

        return selected


@dataclass(frozen=True)
class Backfill:
    """A job. `kill` ends it in the middle; `writer` is done inside one of its calls."""

    role: str
    where: Where | None = None
    num_frags: int | None = None
    upstream: str | None = None
    retry_failed: bool = False
    checkpoint_size: int | None = None
    commit_granularity: int | None = None
    kill: str | None = None
    writer: tuple[Write, ...] = ()
    at_call: int = 1
    at_role: str | None = None


Step = Write | Restore | SetFailing | Backfill


class World:
    """A table, its model, and the versions that both can go back to."""

    def __init__(self, path: Path, setup: Setup, recorder: Recorder) -> None:
        self.tables = Tables(connect(path, InProcessRunner))
        self.recorder = recorder
        self.paid: set[Call] = set()
        self.state = _created(self.tables, setup)
        self.versions: dict[int, State] = {}
        self._observe()

    def do(self, step: Step) -> None:
        """Do a step to the table and to the model, and compare them."""
        match step:
            case SetFailing():
                self.recorder.failing = step.failing
            case Restore():
                self._restore(step)
            case Backfill():
                self._backfill(step)
            case _:
                step.write(self.tables, self.state)
                self.state = step.applied(self.state)
                self._observe()

    def _observe(self) -> None:
        """Compare after something that computes nothing."""
        still = {k: frozenset(Outcome(r) for r in rows) for k, rows in self.state.rows.items()}
        self._settle(still)
        if calls := self.recorder.taken():
            raise Mismatch(f"a function ran: {calls}")

    def _settle(self, possible: Mapping[int, Outcomes]) -> Bill:
        """Compare with the table, and take over what agrees."""
        rows, bill = reconcile(possible, self.tables.rows(self.state))
        self.state = replace(self.state, rows=rows)
        dataset = self.tables.lance()
        self.versions[dataset.version] = self.state
        return bill

    def _restore(self, step: Restore) -> None:
        dataset = self.tables.lance()
        left = {v["version"] for v in dataset.versions()} & self.versions.keys()
        version = sorted(left)[-1 - min(step.steps_back, len(left) - 1)]
        dataset.checkout_version(version).restore()
        self.state = self.versions[version]
        self._observe()

    def _backfill(self, step: Backfill) -> None:
        if step.upstream == "refuse" and self._refuses(step):
            return
        if step.kill is not None:
            self._killed(step)
        elif step.writer:
            self._with_writer(step)
        else:
            self._plain(step)

    def _plain(self, step: Backfill) -> None:
        """A job that nobody disturbs: right values, the least calls, and the plan knew them."""
        job = self._job(step)
        planned, guessed = self._planned(step), self._has_stale_inputs(step)
        self._run(step)
        calls = self.recorder.taken()
        whole = step.num_frags is None
        bill = self._settle(self._possible(job.run if whole else job.may_run))
        if not whole:
            bill = replace(bill, least=Counter())
        bill.check(calls, self.paid)
        if guessed and calls and not planned:
            raise Mismatch(f"the plan was empty, and there were calls: {_by_role(calls)}")
        if not guessed:
            self._check_plan(step, planned, calls, bill.least - calls)
        if step.checkpoint_size is not None:
            self.paid |= calls.keys()

    def _check_plan(
        self, step: Backfill, planned: int, calls: Counter[Call], saved: Counter[Call]
    ) -> None:
        """The plan knew the calls; it need not know what was saved by an earlier, killed job."""
        own = _by_role(calls)[step.role]
        if not own <= planned <= own + _by_role(saved)[step.role]:
            raise Mismatch(f"the plan said {planned} calls, and there were {_by_role(calls)}")

    def _has_stale_inputs(self, step: Backfill) -> bool:
        """Whether inputs must be computed first: how many rows change with them, nobody knows."""
        *upstream, _ = self._job(step).chain
        everyone = [row for rows in self.state.rows.values() for row in rows]
        return any(verdict(row, column) is Verdict.CALL for column in upstream for row in everyone)

    def _killed(self, step: Backfill) -> None:
        """A job that dies: it may have done anything between nothing and all."""
        job = self._job(step)
        dying = dying_commits if step.kill == "commit" else self._dying_calls
        died = False
        with dying(self.tables.uri, step.at_call) as fuse:
            try:
                self._run(step)
            except Exception:
                if not fuse.blown:
                    raise
                died = True
        calls = self.recorder.taken()
        outcomes = self._possible(job.run)
        upper = _most(outcomes)
        whole = step.num_frags is None and not died
        self._settle(self._possible(job.run if whole else job.may_run))
        if extra := calls - upper:
            raise Mismatch(f"called without need before it died: {dict(extra)}")
        self.paid |= calls.keys()

    @contextmanager
    def _dying_calls(self, _: str, number: int) -> Iterator[Fuse]:
        fuse = Fuse()

        def die() -> None:
            fuse.blown = True
            raise Killed("the worker is gone")

        self.recorder.at_call(number, None, die)
        try:
            yield fuse
        finally:
            self.recorder.cancel_hook()

    def _with_writer(self, step: Backfill) -> None:
        """A job during which somebody writes; then one more, after which all must be right."""
        job, before = self._job(step), self.state
        again = Backfill(step.role)
        afterwards = self._job(again)
        bound = self._bound(job) + (self._bound(afterwards) if step.where else Counter())
        nested = self._bound_of_others(step)
        bound += nested
        happened = self._run_with_writer(step)
        calls = self.recorder.taken()
        self._settle(self._after_writer(step, job, happened=happened))
        self.paid |= calls.keys()
        self._run(again)
        second = self.recorder.taken()
        bill = self._settle(self._possible(afterwards.run))
        bill.check(second, self.paid)
        touched = len({key for write in step.writer for key in write.touched}) + nested.total()
        touched = touched if happened else 0
        slack = 2 * step.checkpoint_size if step.checkpoint_size else len(before.rows)
        for role, number in _by_role(calls + second).items():
            most = bound[role] + touched + (slack if happened else 0)
            if number > most:
                raise Mismatch(
                    f"{number} calls of {role}: at most {bound[role]} were needed before, "
                    f"{touched} rows were touched, and {slack} were in flight"
                )

    def _run_with_writer(self, step: Backfill) -> bool:
        errors: list[BaseException] = []

        def hook() -> None:
            state = self.state
            try:
                for write in step.writer:
                    write_patiently(write, self.tables, state)
                    state = write.applied(state)
            except BaseException as error:  # noqa: BLE001 - it is raised again, outside the job
                errors.append(error)

        self.recorder.at_call(step.at_call, step.at_role, hook)
        try:
            self._run(step)
        finally:
            happened = self.recorder.cancel_hook()
            if errors:
                raise errors[0]
        return happened

    def _after_writer(self, step: Backfill, job: Job, *, happened: bool) -> Mapping[int, Outcomes]:
        """What may be there: the writer came before, between or after what the job did to a row."""
        whole = step.where is None and step.num_frags is None and not step.retry_failed
        if not happened:
            return self._possible(job.run if step.num_frags is None else job.may_run)
        old = self.state
        enlarged = {
            key: frozenset(o.row for row in rows for o in job.may_run(row))
            for key, rows in old.rows.items()
        }
        self.state = replace(old, rows=enlarged)
        for write in step.writer:
            self.state = write.applied(self.state)
        touched = {key for write in step.writer for key in write.touched}
        selected = {key for key, rows in old.rows.items() if any(map(job.selects, rows))}

        def run(key: int) -> Callable[[Row], Outcomes]:
            if key in old.rows and whole:
                return job.run_again if key in touched else job.run
            # Whether it was selected before the writer came or after is all the same.
            return job.may_run if job.where is None else job.selecting(selected).may_run

        return {key: _union(rows, run(key)) for key, rows in self.state.rows.items()}

    def _bound(self, job: Job) -> Counter[str]:
        return _by_role(_most(self._possible(job.run)))

    def _bound_of_others(self, step: Backfill) -> Counter[str]:
        """The calls of the jobs that run during this one, before anybody writes."""
        roles = [write.role for write in step.writer if isinstance(write, Recompute)]
        return sum((self._bound(self._job(Backfill(role))) for role in roles), Counter())

    def _possible(self, run: Callable[[Row], Outcomes]) -> dict[int, Outcomes]:
        return {key: _union(rows, run) for key, rows in self.state.rows.items()}

    def _job(self, step: Backfill) -> Job:
        chain = self.state.chain(step.role, upstream=step.upstream in (None, "compute"))
        where = None if step.where is None else step.where.selects(step.role)
        return Job(chain, self.recorder.failing, where, step.retry_failed, frozenset(self.paid))

    def _options(self, step: Backfill) -> dict[str, Any]:
        options = {
            "where": step.where and step.where.sql(self.state, step.role),
            "num_frags": step.num_frags,
            "checkpoint_size": step.checkpoint_size,
            "commit_granularity": step.commit_granularity,
            "retry_failed": step.retry_failed or None,
            "upstream": step.upstream,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _planned(self, step: Backfill) -> int:
        """Return how many calls the plan wants, of inputs too; planning calls nothing."""
        table = self.tables.ours()
        plan = table.plan_backfill(self.state.names[step.role], **self._options(step))
        if calls := self.recorder.taken():
            raise Mismatch(f"planning called {calls}")
        return sum(step.rows_to_run for step in (plan, *plan.upstream))

    def _run(self, step: Backfill) -> None:
        table = self.tables.ours()
        result = table.backfill(self.state.names[step.role], **self._options(step))
        if str(result.status) not in ("DONE", "JobStatus.DONE"):
            raise Mismatch(f"the job ended {result.status}")

    def _refuses(self, step: Backfill) -> bool:
        """Whether the job must be refused because an input is stale; then see that it is."""
        *upstream, _ = self.state.chain(step.role, upstream=True)
        job = self._job(step)
        verdicts = [
            {verdict(row, column) for row in rows}
            for column in upstream
            for rows in self.state.rows.values()
            if any(map(job.selects, rows))
        ]
        if not any(Verdict.CALL in found for found in verdicts):
            return False
        must = any(found == {Verdict.CALL} for found in verdicts)
        try:
            self._run(step)
        except GenevaError:
            self._observe()
            return True
        if must:
            raise Mismatch(f"{step} was not refused, though an input is stale")
        raise NotPredictable


class NotPredictable(Exception):
    """The model can't say what a step does; the history ends here."""


@dataclass
class Fuse:
    blown: bool = False


@contextmanager
def dying_commits(uri: str, number: int) -> Iterator[Fuse]:
    """Let the commits of the table fail from this one on, as if the driver had died."""
    original = lance.LanceDataset.commit
    fuse, made = Fuse(), itertools.count(1)

    def commit(target: Any, *args: Any, **kwargs: Any) -> Any:
        ours = str(getattr(target, "uri", target)).rstrip("/").endswith(uri.rsplit("/", 1)[1])
        if ours and next(made) >= number:
            fuse.blown = True
            raise OSError("the driver is gone")
        return original(target, *args, **kwargs)

    lance.LanceDataset.commit = staticmethod(commit)
    try:
        yield fuse
    finally:
        lance.LanceDataset.commit = original


def _union(rows: frozenset[Row], run: Callable[[Row], Outcomes]) -> Outcomes:
    return frozenset(itertools.chain.from_iterable(map(run, rows)))


def _most(possible: Mapping[int, Outcomes]) -> Counter[Call]:
    total: Counter[Call] = Counter()
    for outcomes in possible.values():
        most: Counter[Call] = Counter()
        for outcome in outcomes:
            most |= Counter(outcome.calls)
        total += most
    return total


def _by_role(calls: Counter[Call]) -> Counter[str]:
    numbers: Counter[str] = Counter()
    for call, number in calls.items():
        numbers[call.role] += number
    return numbers


def initial_values(key: int) -> dict[str, Any]:
    return {"x": key % 7, "y": key % 5, "u": key, "w": f"word {key}", "v": (1.0, float(key))}


def _created(tables: Tables, setup: Setup) -> State:
    """Make the table, declare its columns, and return its model."""
    ids = itertools.count()
    values: dict[int, dict[str, Any]] = {}
    for position, size in enumerate(setup.fragments):
        keys = list(itertools.islice(ids, size))
        values |= {key: initial_values(key) for key in keys}
        lance.write_dataset(
            _arrow(keys, values),
            tables.uri,
            mode="append" if position else "create",
            data_storage_version=setup.storage_version,
            enable_stable_row_ids=setup.stable_row_ids,
        )
    rows = {key: frozenset({new_row({"id": key, **row})}) for key, row in values.items()}
    columns = {role: Column(role, f, INPUTS[role]) for role, f in setup.functions.items()}
    names = {role: role for role in ("id", "x", "y", "u", "w", "v", *columns)}
    state = State(rows, columns, names)
    table: Table = tables.db.open_table(NAME)
    for column in columns.values():
        table.add_columns({column.role: udf_of(state, column)})
    return state


def _arrow(keys: Sequence[int], values: Mapping[int, Mapping[str, Any]]) -> pa.Table:
    types = {"x": pa.int64(), "y": pa.int64(), "u": pa.int64(), "w": pa.string(), "v": PAIR}
    data = {"id": pa.array(keys, pa.int64())}
    for role, kind in types.items():
        column = [values[key][role] for key in keys]
        data[role] = pa.array([list(v) if role == "v" else v for v in column], kind)
    return pa.table(data)
