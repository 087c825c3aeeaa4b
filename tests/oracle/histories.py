"""Random histories: which steps there are, how often each comes, and how one is replayed."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from oracle.functions import Function, Recorder, recording, some_value
from oracle.model import State, Value
from oracle.world import (
    Backfill,
    NotPredictable,
    Restore,
    SetFailing,
    Setup,
    Step,
    Where,
    World,
    initial_values,
)
from oracle.writes import (
    LANCE,
    LANCEDB,
    OURS,
    AddPlain,
    Alter,
    Append,
    Cast,
    Cleanup,
    Compact,
    Delete,
    DropAndAdd,
    DropIndex,
    Index,
    Optimize,
    Overwrite,
    Recompute,
    Rename,
    ReplaceInput,
    Tag,
    Update,
    Upsert,
    Values,
    Write,
)

W = TypeVar("W")
S = TypeVar("S")

_FRESH_NAMES = {"x": "x_old", "y": "y_old", "a": "a_new", "u": "u_new"}


def random_setup(rng: random.Random) -> Setup:
    """Draw what a history begins with."""
    version = rng.choice(["2.0", "2.1", "2.2"])
    # A table of 2.0 can't hold a NULL struct, so none can stand there before it is computed.
    kinds = ["text", "pair", "ratio"] + (["record"] if version != "2.0" else [])
    functions = {"a": Function("half"), "b": Function("tens", batches=rng.random() < 0.3)}
    if rng.random() < 0.6:
        functions["c"] = Function(rng.choice(kinds), batches=rng.random() < 0.3)
    if rng.random() < 0.4:
        functions["d"] = Function("flaky")
    return Setup(
        fragments=tuple(rng.randint(2, 8) for _ in range(rng.randint(1, 5))),
        storage_version=version,
        stable_row_ids=rng.random() < 0.5,
        functions=functions,
    )


@dataclass
class Draw:
    """Draws the next step, given what the table is now."""

    rng: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(100))

    def step(self, state: State, *, failing: bool) -> Step:
        """Draw a step of any kind."""
        draws: list[tuple[int, Callable[[State], Step | None]]] = [
            (22, self._backfill),
            (4, self._backfill_with_writer),
            (3, self._killed),
            (5, self._append),
            (3, self._delete),
            (6, self._update),
            (5, self._correction),
            (9, self._upsert),
            (3, self._index),
            (5, self._layout),
            (3, self._restore),
            (1, self._tag),
            (2, self._schema_change),
            (2, self._alter),
            (1, self._overwrite),
        ]
        if "d" in state.columns:
            draws.append((2, lambda _: SetFailing(not failing)))
        weights = [weight for weight, _ in draws]
        while True:
            _, draw = self.rng.choices(draws, weights)[0]
            if (step := draw(state)) is not None and applicable(state, step):
                return step

    def _backfill(self, state: State) -> Step:
        role = self._computed(state)
        if self.rng.random() < 0.5:
            return Backfill(role)
        return Backfill(
            role,
            where=self._where(state, role) if self.rng.random() < 0.4 else None,
            num_frags=self.rng.randint(1, 2) if self.rng.random() < 0.2 else None,
            upstream=self._upstream(role),
            retry_failed=role == "d" and self.rng.random() < 0.5,
            checkpoint_size=self._checkpoint_size(),
        )

    def _upstream(self, role: str) -> str | None:
        if role != "b" or self.rng.random() < 0.6:
            return None
        return self.rng.choice(["compute", "ignore", "refuse"])

    def _checkpoint_size(self) -> int | None:
        return self.rng.choice([1, 2, 3]) if self.rng.random() < 0.2 else None

    def _where(self, state: State, role: str) -> Where:
        kind = self.rng.choice(["ids", "even", "null"])
        return Where(kind, self._ids(state) if kind == "ids" else ())

    def _killed(self, state: State) -> Step:
        role = self.rng.choice([r for r in state.columns if r != "d"])
        kill = self.rng.choice(["commit", "call"])
        at = self.rng.randint(1, 6) if kill == "call" else self.rng.randint(1, 2)
        granularity = self.rng.choice([1, None])
        size = self._checkpoint_size()
        return Backfill(
            role, kill=kill, checkpoint_size=size, commit_granularity=granularity, at_call=at
        )

    def _backfill_with_writer(self, state: State) -> Step:
        role = self._computed(state)
        at_role, writer = role, self._writer(state)
        if role == "b" and self.rng.random() < 0.4:
            writer = (self._input_upsert(state, "x"), Recompute("a"))
        elif role == "b" and self.rng.random() < 0.5:
            at_role = "a"
        elif self.rng.random() < 0.1:
            writer = (Recompute(role),)
        return Backfill(
            role,
            where=self._where(state, role) if self.rng.random() < 0.2 else None,
            checkpoint_size=self.rng.choice([1, 2, 2, None]),
            commit_granularity=self.rng.choice([1, None]),
            writer=writer,
            at_call=self.rng.randint(1, 8),
            at_role=at_role,
        )

    def _writer(self, state: State) -> tuple[Write, ...]:
        draws = (self._append, self._delete, self._update, self._upsert, self._layout)
        weights = (2, 2, 3, 6, 2)
        chosen = self.rng.choices(draws, weights, k=self.rng.randint(1, 2))
        writes = (draw(state) for draw in chosen)
        # Nobody may delete files that a running job has not committed yet.
        return tuple(Cleanup() if isinstance(w, Cleanup) else w for w in writes)

    def _append(self, state: State) -> Append:
        values = {k: self._values(state) for k in self._new_ids(self.rng.randint(1, 5))}
        supplied = self._some(list(state.columns), 0.25)
        for role in supplied:
            for row in values.values():
                row[role] = self._supplied(state, role) if self.rng.random() < 0.7 else None
        return Append(values, self._via())

    def _delete(self, state: State) -> Delete:
        return Delete(self._ids(state), self.rng.choice([OURS, LANCEDB]))

    def _update(self, state: State) -> Update:
        role = self.rng.choice(["x", "x", "y", "u"])
        return Update(self._ids(state), role, self._number(), self.rng.choice([OURS, LANCEDB]))

    def _correction(self, state: State) -> Step:
        """Somebody writes a computed value: another one, the one that is there, or NULL."""
        role, ids = self._computed(state), self._ids(state)
        draw = self.rng.random()
        if draw < 0.2:
            (row, *_) = state.rows[ids[0]]
            value = row.value(role)
        else:
            value = None if draw < 0.35 else self._supplied(state, role)
        if state.columns[role].function.kind in ("pair", "record") or self.rng.random() < 0.5:
            return Upsert({key: {role: value} for key in ids}, insert=False, via=self._via())
        return Update(ids, role, value, self.rng.choice([OURS, LANCEDB]))

    def _upsert(self, state: State) -> Upsert:
        inputs = self.rng.choice([["x"], ["u"], ["x", "y"], ["x", "y", "u", "w", "v"]])
        supplied = self._some(list(state.columns), 0.15)
        values: Values = {
            key: {
                **{role: value for role, value in self._values(state).items() if role in inputs},
                **{role: self._supplied(state, role) for role in supplied},
            }
            for key in [*self._ids(state), *self._new_ids(self.rng.choice([0, 0, 1, 2]))]
        }
        return Upsert(values, insert=self.rng.random() < 0.7, via=self._via())

    def _input_upsert(self, state: State, role: str) -> Upsert:
        return Upsert({key: {role: self._number()} for key in self._ids(state)}, insert=False)

    def _index(self, state: State) -> Step:
        if self.rng.random() < 0.2:
            return DropIndex("id")
        choices = [("id", "btree")] * 6 + [("u", "btree"), ("w", "fts"), ("v", "vector")]
        choices += [("x", "btree"), ("a", "btree")]
        return Index(*self.rng.choice(choices))

    def _layout(self, state: State) -> Write:
        draw = self.rng.random()
        if draw < 0.3:
            return Optimize(self.rng.choice([OURS, LANCEDB]))
        if draw < 0.55:
            return Cleanup(delete_unverified=self.rng.random() < 0.2)
        options = {
            "target_rows_per_fragment": self.rng.choice([2, 5, 10, 1000]),
            "materialize_deletions": self.rng.random() < 0.7,
            "materialize_deletions_threshold": self.rng.choice([0.0, 0.1, 0.5]),
        }
        return Compact(options, self.rng.choice([OURS, LANCE]))

    def _restore(self, state: State) -> Restore:
        return Restore(self.rng.randint(1, 12))

    def _tag(self, state: State) -> Tag:
        return Tag(f"tag{next(self.numbers)}", branch=self.rng.random() < 0.3)

    def _schema_change(self, state: State) -> Step | None:
        via = self.rng.choice([OURS, LANCEDB])
        match self.rng.choice(["rename", "rename", "plain", "cast", "replace", "drop"]):
            case "rename":
                role = self.rng.choice(["x", "y", "a", "u"])
                back = role in state.names and state.names[role] != role
                return Rename(role, role if back else _FRESH_NAMES[role], via)
            case "plain":
                role = self.rng.choice(["x", "y"])
                return AddPlain(f"new {role}", role, via)
            case "cast":
                role = self.rng.choice(["x", "y"])
                return Cast(role, self.rng.choice(["int32", "int64"]), via)
            case "replace":
                return ReplaceInput(self.rng.choice(["x", "y"]), self.rng.randint(0, 3))
            case _:
                role = self._computed(state)
                return DropAndAdd(role, LANCEDB if role == "a" else via)

    def _alter(self, state: State) -> Alter:
        return Alter(self._computed(state), self.rng.choice([1, 2]))

    def _overwrite(self, state: State) -> Step:
        values = {key: self._values(state) for key in self._new_ids(self.rng.randint(2, 9))}
        keep = self.rng.random() < 0.6
        for role in self._some(list(state.columns), 0.3) if keep else ():
            for row in values.values():
                row[role] = self._supplied(state, role) if self.rng.random() < 0.7 else None
        return Overwrite(values, keep_columns=keep)

    def _computed(self, state: State) -> str:
        roles = list(state.columns)
        return self.rng.choice([*roles, roles[-1]])

    def _ids(self, state: State) -> tuple[int, ...]:
        ids = list(state.rows) or [0]
        return tuple(self.rng.sample(ids, min(len(ids), self.rng.randint(1, 4))))

    def _new_ids(self, number: int) -> list[int]:
        return [next(self.numbers) for _ in range(number)]

    def _values(self, state: State) -> dict[str, Value]:
        own = {**initial_values(next(self.numbers)), "x": self._number(), "y": self._number()}
        return {role: value for role, value in own.items() if role in state.names}

    def _number(self) -> int | None:
        return None if self.rng.random() < 0.08 else self.rng.randint(0, 12)

    def _supplied(self, state: State, role: str) -> Value:
        return some_value(state.columns[role].function.kind, self.rng.randint(0, 9))

    def _some(self, roles: list[str], likely: float) -> list[str]:
        return [role for role in roles if self.rng.random() < likely]

    def _via(self) -> str:
        return self.rng.choice([OURS, LANCEDB, LANCE])


def applicable(state: State, step: Step) -> bool:
    """Whether a step makes sense now. What was drawn does; a shrunk history may have lost it."""
    match step:
        case Rename():
            follows = step.via == OURS or step.role not in state.loose
            known = step.role in state.names and follows
            return known and step.name not in state.names.values()
        case AddPlain():
            return step.role not in state.names and step.name not in state.names.values()
        case Cast() | ReplaceInput():
            return state.names.get(step.role) == step.role
        case DropAndAdd():
            return state.names[step.role] == step.role and _inputs_known(state, step.role)
        case Alter():
            return _inputs_known(state, step.role)
        case Overwrite():
            return all(role == name for role, name in state.names.items())
        case Append():
            return bool(step.values) and step.values.keys().isdisjoint(state.rows)
        case Upsert() | Index() | Update():
            return _has_roles(state, step)
        case Delete():
            return not state.rows.keys() <= set(step.ids)
        case Backfill():
            return bool(state.rows) and all(applicable(state, write) for write in step.writer)
        case _:
            return True


def _inputs_known(state: State, role: str) -> bool:
    return all(r in state.names for r in state.columns[role].inputs)


def _has_roles(state: State, step: Upsert | Index | Update) -> bool:
    roles = next(iter(step.values.values())) if isinstance(step, Upsert) else [step.role]
    return all(role in state.names for role in roles)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is such a place: histories write many small files."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class History(Generic[W, S]):
    """How a kind of history begins, and which steps make sense in it."""

    start: Callable[[Path, Recorder], W]
    do: Callable[[W, S], None]
    makes_sense: Callable[[W, S], bool]
    title: str
    """How to say its beginning in Python."""

    def run(self, steps: Callable[[W], Iterator[S]]) -> tuple[int, Failure[W, S] | None]:
        """Do steps; return how many were done, and how it failed, if it did."""
        done: list[S] = []
        with scratch() as folder, recording() as recorder:
            try:
                world = self.start(folder, recorder)
                for step in steps(world):
                    if self.makes_sense(world, step):
                        done.append(step)
                        self.do(world, step)
            except NotPredictable:
                pass
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - also a panic of Lance
                return len(done), Failure(self, tuple(done), error)
        return len(done), None

    def replay(self, steps: Sequence[S]) -> Failure[W, S] | None:
        """Do these steps again; leave out those that make no sense where they come."""
        _, failure = self.run(lambda _: iter(steps))
        return failure


@dataclass(frozen=True)
class Failure(Generic[W, S]):
    """A history that ended badly, and how."""

    history: History[W, S]
    steps: tuple[S, ...]
    error: BaseException

    @property
    def kind(self) -> tuple[object, ...]:
        """What a shrunk history must have in common with it: error, first words, last step."""
        words = re.sub(r"\d+", "0", str(self.error)).split()[:3]
        return type(self.error), *words, *map(type, self.steps[-1:])

    def __str__(self) -> str:
        """Say it as Python that can be run again."""
        error = f"{type(self.error).__name__}: {self.error}"
        lines = [f"    {step!r}," for step in self.steps]
        return "\n".join([error, f"{self.history.title}.replay([", *lines, "])"])

    def shrunk(self, most_runs: int = 300) -> Failure[W, S]:
        """Leave out steps, greedily, for as long as the history fails in the same way."""
        failure, runs, size = self, 0, max(1, len(self.steps) // 2)
        while size:
            position = 0
            while position < len(failure.steps) and runs < most_runs:
                fewer = (*failure.steps[:position], *failure.steps[position + size :])
                found = self.history.replay(fewer)
                runs += 1
                if found is not None and found.kind == failure.kind:
                    failure = found
                else:
                    position += size
            size //= 2
        return failure


def of_table(setup: Setup) -> History[World, Step]:
    """Histories of a table that begins like this."""
    return History(
        start=lambda folder, recorder: World(folder, setup, recorder),
        do=World.do,
        makes_sense=lambda world, step: applicable(world.state, step),
        title=f"of_table({setup!r})",
    )


def run_history(seed: int, steps: int) -> tuple[int, Failure[World, Step] | None]:
    """Run a random history of a table."""
    rng = random.Random(seed)
    setup, draw = random_setup(rng), Draw(rng)

    def drawn(world: World) -> Iterator[Step]:
        if rng.random() < 0.4:
            yield Index("id")
        for _ in range(steps):
            yield draw.step(world.state, failing=world.recorder.failing)

    return of_table(setup).run(drawn)
