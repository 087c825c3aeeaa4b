"""A job that is too large to run here, played through: `python -m benchmarks.simulate`.

The queue that cuts tasks and the rule that says when to commit are the engine's own
(`geneva.planning.sizing`). Everything else is a cost that was measured; see docs/scale.md. There is
no clock and no chance in it: the same numbers come out every time.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from geneva.execution.backfill.dispatch import MAX_JOBS_IN_FLIGHT
from geneva.model.rows import RowSet
from geneva.model.tables import Reason
from geneva.planning.backfill import Action, FragmentPlan
from geneva.planning.sizing import (
    CommitRule,
    Limit,
    Part,
    WorkQueue,
    max_in_flight,
    rows_to_run,
)


@dataclass(frozen=True)
class Costs:
    """Seconds and requests, as measured."""

    row_seconds: float = 0.001
    """Of the user's function."""
    task_seconds: float = 0.05
    """What a task costs besides its rows: Spark, a report, a record."""
    fragment_seconds: float = 0.12
    """Opening, reading and writing a fragment on an object store: 4 requests of 30 ms."""
    driver_fragment_seconds: float = 0.00016
    """Planning, shipping and booking a fragment."""
    commit_seconds: float = 0.3
    """At 10,000 fragments, on an object store."""
    checkpoint_seconds: float = 1.5
    """Work between two checkpoints: fifty times what saving one takes."""
    spread: float = 0.2
    """How much the speed of tasks varies: standard deviation over mean."""
    slow_slots: float = 0.01
    """Share of slots that take three times as long."""


@dataclass(frozen=True)
class Job:
    """What is to be done, and on what."""

    rows: int = 1_000_000_000
    fragments: int = 10_000
    slots: int = 1_000
    jobs_in_flight: int = MAX_JOBS_IN_FLIGHT
    """Spark jobs at once; each of them carries several tasks, and ends with its last one."""
    commit_granularity: int | None = None
    waits_for_batches: bool = False
    """Whether nothing is at hand for slots that are free while others of their batch still run."""

    @property
    def per_job(self) -> int:
        return max(1, self.slots // self.jobs_in_flight)

    @property
    def max_in_flight(self) -> int:
        return max_in_flight(self.slots, 1 if self.waits_for_batches else self.per_job)


@dataclass
class Result:
    """What came out."""

    seconds: float = 0.0
    ideal_seconds: float = 0.0
    driver_seconds: float = 0.0
    tasks: int = 0
    commits: list[float] = field(default_factory=list)
    """When each commit was."""
    commit_seconds: float = 0.0
    last_tenth_seconds: float = 0.0
    """From when a tenth of the slots had nothing to do, to the end."""
    requests: dict[str, int] = field(default_factory=dict)


def simulate(job: Job, costs: Costs, seed: int = 0) -> Result:
    """Play a job through, task by task."""
    rng = random.Random(seed)
    speeds = [3.0 if i < costs.slow_slots * job.slots else 1.0 for i in range(job.slots)]
    queue = WorkQueue(_plans(job), None)
    result, rule = Result(), CommitRule(job.commit_granularity)
    result.driver_seconds = now = job.fragments * costs.driver_fragment_seconds
    free = [(now, speed) for speed in speeds]  # when each slot is free next
    heapq.heapify(free)
    batches: list[tuple[float, int, list[_Ran]]] = []  # by when they end
    in_flight = ready = number = 0
    last_end, last_cost, speed_known = now, 0.0, None
    left = dict.fromkeys(range(job.fragments), job.rows // job.fragments)
    split: set[int] = set()
    while queue or batches:
        while queue and in_flight < job.max_in_flight:
            waiting = sum(task.rows_left(now) for _, _, ran in batches for task in ran)
            tasks = [
                _run(parts, limit, free, now, costs, rng)
                for parts, limit in _batch(queue, job, speed_known, waiting)
            ]
            heapq.heappush(batches, (max(task.end for task in tasks), number, tasks))
            number, in_flight = number + 1, in_flight + len(tasks)
            result.tasks += len(tasks)
        end, _, tasks = heapq.heappop(batches)
        now = max(now, end)
        in_flight -= len(tasks)
        speed_known = 1 / costs.row_seconds
        for task in tasks:
            queue.put_back([part.plan for part in task.given_back])
        for part in (part for task in tasks for part in task.done):
            now += costs.driver_fragment_seconds
            result.driver_seconds += costs.driver_fragment_seconds
            left[part.plan.fragment_id] -= len(part.rows)
            if not part.whole:
                split.add(part.plan.fragment_id)
            if left[part.plan.fragment_id] == 0:
                ready += 1
        is_last = not queue and not batches
        # The driver is not held up while it waits for tasks to end: it is as if it knew.
        quiet = batches[0][0] - now if batches else 0.0
        while ready and (is_last or rule.is_due(ready, now - last_end, last_cost, quiet)):
            last_cost, ready = costs.commit_seconds, max(0, ready - (rule.files or ready))
            now = last_end = now + last_cost
            result.commits.append(now)
            result.commit_seconds += last_cost
            result.driver_seconds += last_cost
    busy = sorted(when for when, _ in free)
    result.seconds = now
    result.last_tenth_seconds = now - busy[job.slots // 10]
    result.ideal_seconds = job.rows * costs.row_seconds / job.slots
    result.requests = _requests(job, costs, result, len(split))
    return result


def _plans(job: Job) -> Iterator[FragmentPlan]:
    size = job.rows // job.fragments
    for i in range(job.fragments):
        yield FragmentPlan(
            fragment_id=i,
            physical_rows=size,
            action=Action.COMPUTE,
            reason=Reason.NEW,
            outputs=(),
            compute=RowSet.full(size),
            valid_after=RowSet.full(size),
            complete=True,
            keeps_old=False,
            adopt=RowSet.empty(size),
        )


def _batch(
    queue: WorkQueue, job: Job, speed: float | None, in_flight: float
) -> Iterator[tuple[tuple[Part, ...], Limit | None]]:
    """The tasks of one Spark job, as the dispatcher takes them."""
    for _ in range(job.per_job):
        if not queue:
            return
        yield queue.next_task(job.slots, speed, in_flight, job.per_job)


@dataclass(frozen=True)
class _Ran:
    """A task: what it does, what it gives back, and when."""

    done: Sequence[Part]
    given_back: Sequence[Part]
    start: float
    end: float
    rows: int

    def rows_left(self, now: float) -> float:
        """About how many rows are still to be run."""
        return self.rows * min(1.0, max(0.0, self.end - now) / (self.end - self.start))


def _run(
    parts: Sequence[Part],
    limit: Limit | None,
    free: list[tuple[float, float]],
    now: float,
    costs: Costs,
    rng: random.Random,
) -> _Ran:
    """Run a task on the slot that is free first. It has as many fragments as slots at least."""
    at, slowness = heapq.heappop(free)
    start = max(at, now)
    luck = max(0.2, rng.gauss(1.0, costs.spread))
    left = sum(map(rows_to_run, parts))
    worked, rows, done = 0.0, 0, 0
    while done < len(parts):
        rest = worked / rows * left if rows else 0.0
        if limit is not None and worked > limit.seconds and rest > limit.max_rest:
            break
        own = rows_to_run(parts[done])
        worked += costs.fragment_seconds + own * costs.row_seconds * luck * slowness
        rows, left, done = rows + own, left - own, done + 1
    end = start + costs.task_seconds + worked
    heapq.heappush(free, (end, slowness))
    return _Ran(parts[:done], parts[done:], start, end, rows)


def _requests(job: Job, costs: Costs, result: Result, split: int) -> dict[str, int]:
    """Requests to the object store, by kind of price."""
    checkpoints = int(job.rows * costs.row_seconds / costs.checkpoint_seconds)
    return {
        # A file, its checkpoints, a record per task; a commit is two objects and one of history.
        "PUT": job.fragments + checkpoints + result.tasks + 3 * len(result.commits),
        # Inputs of every part, checkpoints of split fragments once more when they are put together.
        "GET": 2 * (job.fragments + split) + checkpoints * split // job.fragments,
        # Checkpoints and records; a store asks no money for it.
        "DELETE": checkpoints + result.tasks,
        "LIST": int(result.seconds / 2) + 4 * len(result.commits),
    }


def price(requests: dict[str, int]) -> float:
    """Dollars, by the public prices of S3: PUT and LIST 5 for a million, GET 0.40."""
    dear = requests["PUT"] + requests["LIST"]
    return dear * 5e-6 + requests["GET"] * 0.4e-6


CASES = {
    "1,000 slots": Job(),
    "without tasks at hand": Job(waits_for_batches=True),
    "a commit per 64 fragments": Job(commit_granularity=64),
    "1,000 Spark jobs at once": Job(jobs_in_flight=1_000),
    "100 slots": Job(slots=100),
    "100,000 fragments": Job(fragments=100_000),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--row-seconds", type=float, default=Costs().row_seconds)
    arguments = parser.parse_args()
    costs = replace(Costs(), row_seconds=arguments.row_seconds)
    print("case|seconds|of ideal|first commit s|driver s|tasks|commits|tail s|requests|dollars")
    for name, job in CASES.items():
        result = simulate(job, costs)
        print(
            f"{name} | {result.seconds:,.0f} | {result.seconds / result.ideal_seconds:.2f}x | "
            f"{result.commits[0]:,.0f} | {result.driver_seconds:,.0f} | {result.tasks:,} | "
            f"{len(result.commits):,} | {result.last_tenth_seconds:,.0f} | "
            f"{sum(result.requests.values()):,} | {price(result.requests):.2f}"
        )


if __name__ == "__main__":
    main()
