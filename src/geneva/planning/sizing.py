"""How big the pieces of work are: tasks, batches, checkpoints, commits. Arithmetic only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from geneva.model.rows import RowRange
from geneva.model.tables import Sizes
from geneva.planning.backfill import Action, FragmentPlan
from geneva.planning.ranges import gaps

MAX_FRAGMENTS_PER_TASK = 256
_MIN_TASK_SECONDS = 0.15
"""A task shorter than this is mostly overhead."""
_SUBMIT_SECONDS = 0.010
"""What a driver needs to hand out a task: shorter ones for all of its slots keep it busy alone."""
_MAX_TASK_SECONDS = 15.0
"""A longer one is late: readers see a fragment when its task has reported it, and a slow slot is
waited for at the end. A shorter one costs a lone slot more than a hundredth of its time."""
_MAX_WHOLE_SECONDS = 60.0
"""A fragment that takes longer is split over several tasks, also where nobody waits for it."""
_FIRST_SECONDS = 0.25
"""After so long a first task, whose rows were cut blindly, is asked how long the rest takes ..."""
_FIRST_SECONDS_ALONE = 10.0
"""... and that of a slot that is alone: it has nobody to share with."""
_MAX_REST_SECONDS = 5.0
"""What takes no longer is not given back: a slot is idle between two tasks."""
_SHARES_AHEAD = 1.25
"""A task gets an even share of what is left, over this: so that the last tasks are small ones."""
_SPLIT_TOLERANCE = 1.5
"""A fragment up to this much over its share stays whole: splitting costs a second pass."""
_FEW_BATCHES = 32
"""So few batches per slot are handed out evenly at first: each may take minutes. A batch is one
row where its size is not given."""
_FRAGMENT_SECONDS = 0.002
"""What a fragment costs a task beside its rows: a file to read, and one to write."""
_MIN_PROBED_SLOTS = 4
"""On fewer slots a first task is not waited for alone."""
_FLUSH_SECONDS = 1.0
_FLUSH_COST_RATIO = 50
"""A checkpoint may cost one fiftieth of the work it protects."""
_COMMIT_SECONDS = 5.0
"""So soon readers see what is finished, where commits are cheap."""
_COMMIT_COST_RATIO = 20
"""Committing may cost one twentieth of a job's time, however large the table's manifest is."""
_GATHER_SECONDS = 0.25
"""What is due waits until no task has ended for so long: equal tasks end together ..."""
_MAX_GATHER_SECONDS = 1.0
"""... but not longer than this."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one fragment for one task. `whole`: it stages the fragment's file as well."""

    plan: FragmentPlan
    rows: RowRange
    whole: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """When a task ends before it has done everything that it was given, and gives back the rest."""

    seconds: float
    """After its function was called for the first time, ..."""
    max_rest: float
    """... if the rest takes more than so many seconds, by what it took so far."""
    in_fragments: bool = False
    """Whether it ends in the midst of a fragment, too, and not only before the next one."""


class WorkQueue:
    """The fragments still to be handed out, cut into tasks on demand.

    Tasks are cut when a slot is free, not in advance: by then the speed of the UDF is known. A
    large share first and ever smaller ones (guided self-scheduling) end all slots together.
    """

    def __init__(
        self,
        plans: Iterable[FragmentPlan],
        task_size: int | None,
        max_fragments: int = MAX_FRAGMENTS_PER_TASK,
        batch_size: int = 1,
        *,
        checkpoint_size: int | None = None,
        may_give_back: bool = True,
        expected_speed: float | None = None,
    ) -> None:
        """Queue the plans in their order. A task gets at most `max_fragments` of them.

        A fragment that is cut is cut at multiples of `batch_size`, so that batches stay full; and
        of `checkpoint_size` where a task has that many rows. `expected_speed`: rows per second that
        a task of an earlier job has computed. A `task_size` is made one of whole batches.
        """
        self._expected_speed = expected_speed
        self._batch_size, self._checkpoint_size = batch_size, checkpoint_size
        self.may_give_back = may_give_back
        """Whether a task may end in the midst of a fragment, and give the rest of it back."""
        ours = (Action.COMPUTE, Action.ADOPT)
        self._waiting = deque(plan for plan in plans if plan.action in ours)
        self._task_size, self._max_fragments = task_size, max_fragments
        self._started: dict[int, int] = {}
        """Per fragment that is handed out in parts, where the next one begins."""
        self._held: dict[int, FragmentPlan] = {}
        self._fragments = len(self._waiting)
        self.remaining_rows = self._all_rows = sum(plan.weight for plan in self._waiting)

    def hold(self, fragment_ids: Collection[int]) -> None:
        """Hand some fragments out only when they are asked for, or released."""
        held = {p.fragment_id: p for p in self._waiting if p.fragment_id in fragment_ids}
        self._waiting = deque(plan for plan in self._waiting if plan.fragment_id not in held)
        self._held.update(held)
        self.remaining_rows -= sum(plan.weight for plan in held.values())

    def release(self, fragment_id: int) -> None:
        """Queue a fragment that was held."""
        plan = self._held.pop(fragment_id)
        self._waiting.append(plan)
        self.remaining_rows += plan.weight

    def take_held(self, fragment_id: int) -> Part:
        """Hand a fragment out that was held."""
        plan = self._held.pop(fragment_id)
        return Part(plan, RowRange(0, plan.physical_rows), whole=True)

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._waiting)

    def share(self, slots: int, rows_per_second: float | None, per_job: int = 1) -> int:
        """How many rows the next task should compute, where `per_job` are handed out together."""
        if self._task_size is not None:
            return self._in_batches(self._task_size)
        if rows_per_second is None:
            # Nobody knows how long a row takes: an even share of everything, by the clock.
            tasks = slots if per_job == 1 else max_in_flight(slots, per_job)
            share = self._all_rows / min(tasks, self._tasks_worth_it)
            if self._waiting and self._is_whole_at_first(slots):
                share = max(share, self._waiting[0].weight)
        else:
            # One slot has nobody to end together with, and is idle between two tasks.
            share = self.remaining_rows / (_SHARES_AHEAD * slots if slots > 1 else 1)
            share = min(share, rows_per_second * _MAX_TASK_SECONDS)
            shortest = max(_MIN_TASK_SECONDS, _SUBMIT_SECONDS * slots / per_job)
            share = max(share, rows_per_second * shortest)
        return self._in_batches(share)

    def _in_batches(self, rows: float) -> int:
        """So many rows, rounded up to whole batches."""
        return max(1, math.ceil(rows / self._batch_size)) * self._batch_size

    @property
    def _tasks_worth_it(self) -> float:
        """How many tasks end soonest, if rows take as long as before; without end: all slots.

        One more shortens the work of each, and keeps the driver busy: of n tasks the work takes
        `seconds / n`, and to hand them out `n * _SUBMIT_SECONDS`. A whole number: shares are equal.
        With more tasks than fragments, some are cut, and put together by a task of their own.
        """
        if self._expected_speed is None:
            return math.inf
        whole, seconds = max(1, self._fragments), self._expected_seconds
        tasks = max(1, round(math.sqrt(seconds / _SUBMIT_SECONDS)))
        is_cut = tasks > whole and seconds / whole - seconds / tasks >= _MIN_TASK_SECONDS
        return tasks if is_cut else min(tasks, whole)

    @property
    def _expected_seconds(self) -> float:
        """What everything takes one slot, if rows take as long as before."""
        if self._expected_speed is None:
            return math.inf
        of_fragments = max(1, self._fragments) * _FRAGMENT_SECONDS
        return self._all_rows / self._expected_speed + of_fragments

    def is_soon_done(self, slots: int, rows_per_second: float | None) -> bool:
        """Whether the first tasks do everything in a moment, if rows take as long as before.

        Then nobody waits for the report of one of them to hand out another.
        """
        if rows_per_second is not None or self._task_size is not None:
            return False
        return self._expected_seconds <= min(slots, self._tasks_worth_it) * _FIRST_SECONDS

    def _is_whole_at_first(self, slots: int) -> bool:
        """Whether fragments stay whole while nobody knows how long a row takes.

        One that takes long comes back soon. So a slot without any waits for the first row, at most.
        """
        return self.may_give_back and self._all_rows >= _FEW_BATCHES * slots * self._batch_size

    def is_worth_a_probe(self, slots: int, rows_per_second: float | None) -> bool:
        """Whether to wait a moment for the first task: the others may be one, or one for each slot.

        To start a task for each of many slots takes longer than the rows of a quick function do.
        """
        blind = rows_per_second is None and self._task_size is None
        blind = blind and math.isinf(self._tasks_worth_it)
        return blind and slots >= _MIN_PROBED_SLOTS and not self._is_whole_at_first(slots)

    def limit(self, slots: int, rows_per_second: float | None) -> Limit | None:
        """By when the next task gives back what it has not done; None: it does all it has."""
        if rows_per_second is not None or self._task_size is not None:
            return None
        if slots == 1:
            return Limit(_FIRST_SECONDS_ALONE, _MAX_REST_SECONDS)
        # In the midst of a fragment, if other slots would wait for the rest of it.
        share = self._all_rows / slots * self._tolerance
        is_large = bool(self._waiting) and self._waiting[0].weight > share
        is_large = is_large or self._fragments < slots
        if self._tasks_worth_it < slots or (self._is_whole_at_first(slots) and is_large):
            # Rows may take longer than they did before.
            return Limit(_FIRST_SECONDS, _FIRST_SECONDS, in_fragments=self.may_give_back)
        return Limit(_FIRST_SECONDS, _MAX_REST_SECONDS)

    def put_back(self, plans: Sequence[FragmentPlan]) -> None:
        """Queue fragments again that a task was given, and has not begun with."""
        self._waiting.extend(plans)
        self.remaining_rows += sum(plan.weight for plan in plans)

    def put_back_rest(self, plan: FragmentPlan, start: int) -> None:
        """Queue the rows of a fragment from `start`, which a task was given and has not done."""
        rest = Part(plan, RowRange(start, plan.physical_rows), whole=False)
        self._waiting.appendleft(plan)
        self._started[plan.fragment_id] = start
        self.remaining_rows += rows_to_run(rest)

    def even_rows(self, slots: int, rows_per_second: float | None, in_flight: float) -> int:
        """How many rows each slot has to do, with those of tasks that are `in_flight`.

        Whoever takes a fragment of so many rows ends with the others, and needs no help with it.
        """
        if rows_per_second is None or self._task_size is not None:
            return 0
        rows = (self.remaining_rows + in_flight) / slots
        return int(min(rows, rows_per_second * _MAX_WHOLE_SECONDS))

    def next_task(
        self,
        slots: int,
        rows_per_second: float | None = None,
        in_flight: float = 0.0,
        per_job: int = 1,
    ) -> tuple[tuple[Part, ...], Limit | None]:
        """Cut the next task, for one of so many slots; also when it gives back the rest.

        `in_flight`: about how many rows are to be run by tasks that were handed out. `per_job`: how
        many are handed out together.
        """
        limit = self.limit(slots, rows_per_second)
        share = self.share(slots, rows_per_second, per_job)
        return self.take(share, self.even_rows(slots, rows_per_second, in_flight)), limit

    def take(self, rows: int, even_rows: int = 0) -> tuple[Part, ...]:
        """Cut the next task, of about `rows` rows to run, or a fragment of about `even_rows`."""
        parts: list[Part] = []
        room = rows
        while self._waiting and len(parts) < self._max_fragments:
            plan = self._waiting[0]
            started = plan.fragment_id in self._started
            most = max(room, 1 if parts else even_rows, 1) * self._tolerance
            if started or plan.rows_to_run > most:
                if not parts:
                    parts.append(self._cut(plan, rows))
                break
            self._waiting.popleft()
            parts.append(Part(plan, RowRange(0, plan.physical_rows), whole=True))
            room -= plan.weight
            if room <= 0:
                break
        self.remaining_rows -= sum(
            part.plan.weight if part.whole else rows_to_run(part) for part in parts
        )
        return tuple(parts)

    @property
    def _tolerance(self) -> float:
        return 1.0 if self._task_size is not None else _SPLIT_TOLERANCE

    def _cut(self, plan: FragmentPlan, rows: int) -> Part:
        """Take the next range of a fragment that is too big for one task."""
        start = self._started.pop(plan.fragment_id, 0)
        end = _end_of_share(plan, start, rows)
        rest = rows_to_run(Part(plan, RowRange(end, plan.physical_rows), whole=False))
        if rest <= rows * (self._tolerance - 1):
            end = plan.physical_rows
        else:
            end = _end_of_share(plan, start, self._full_checkpoints(rows))
        whole = start == 0 and end == plan.physical_rows
        if end == plan.physical_rows:
            self._waiting.popleft()
        else:
            self._started[plan.fragment_id] = end
        return Part(plan, RowRange(start, end), whole)

    def _full_checkpoints(self, rows: int) -> int:
        """As many of so many rows as fill checkpoints, where there is one; all, if asked for."""
        full = self._checkpoint_size
        if full is None or rows < full or self._task_size is not None:
            return rows
        return rows - rows % full


def max_in_flight(slots: int, per_job: int) -> int:
    """How many tasks to hand out, where `per_job` of them are handed out together.

    One more than there are slots, to bridge the gap until the next. Of several that were handed
    out together one hears when the last is done: until then as many others have to be at hand for
    slots that are free already. On 1,000 slots a job takes 1.9 times as long without them.
    """
    return slots + 1 if per_job == 1 else 2 * slots


def rows_to_run(part: Part) -> int:
    """Rows of a part for which the UDF will be called."""
    return sum(part.plan.to_run.slice(r).count for r in gaps(part.plan.covered, part.rows))


def _end_of_share(plan: FragmentPlan, start: int, rows: int) -> int:
    """Where a range from `start` ends that has `rows` rows to run."""
    left = rows
    for open_range in gaps(plan.covered, RowRange(start, plan.physical_rows)):
        members = plan.to_run.slice(open_range)
        if members.count >= left:
            return open_range.start + int(members.offsets()[left - 1]) + 1
        left -= members.count
    return plan.physical_rows


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How many rows go into one call of the UDF, and when results are made durable."""

    first: int
    max_rows: int
    checkpoint_rows: int | None
    """Exactly this many rows per checkpoint; None: by time."""
    min_checkpoint_rows: int
    max_checkpoint_rows: int | None
    flush_seconds: float
    flush_is_asked_for: bool = False
    """Whether the user set the interval: then it holds, whatever a checkpoint costs."""

    @classmethod
    def of(cls, sizes: Sizes, window: int, flush_seconds: float | None) -> BatchRule:
        """Work out the rule from what the user set and how many rows are read at once.

        A checkpoint size is the largest, whatever the bounds; without bounds it is exact. A batch
        size is kept, whatever the window; batches of our own choice are no larger than that.
        """
        fixed = sizes.checkpoint_size
        batch = sizes.batch_size or fixed
        low, high = sizes.min_checkpoint_size, sizes.max_checkpoint_size
        bounded = low is not None or high is not None
        if fixed is not None:
            high = min(high, fixed) if high is not None else fixed
            fixed = None if bounded else fixed
        if low is not None and high is not None:
            low = min(low, high)
        bounds = (batch, high, None if sizes.batch_size is not None else window)
        max_rows = max(1, min(bound for bound in bounds if bound is not None))
        adaptive = batch is None or (sizes.batch_size is None and low is not None)
        return cls(
            first=min(max_rows, max(low or 1, 1)) if adaptive else max_rows,
            max_rows=max_rows,
            checkpoint_rows=fixed,
            min_checkpoint_rows=low or 1,
            max_checkpoint_rows=high,
            flush_seconds=_FLUSH_SECONDS if flush_seconds is None else flush_seconds,
            flush_is_asked_for=flush_seconds is not None,
        )

    def batch_rows(self, wanted: int | None) -> int:
        """The size of the next batch, within the bounds; `wanted` by speed, None: not known yet."""
        return self.first if wanted is None else max(self.first, min(self.max_rows, wanted))

    @property
    def largest_checkpoint(self) -> int | None:
        """How many rows a checkpoint has at most; None: any number."""
        return self.checkpoint_rows or self.max_checkpoint_rows

    def is_due(self, rows: int, seconds: float, last_cost_seconds: float, rest: int | None) -> bool:
        """Whether results of `rows` rows and `seconds` of work should be made durable now.

        `rest`: how many more rows there are before a checkpoint ends in any case; None: it doesn't,
        as there is no `largest_checkpoint`.
        """
        if rest is not None and rest <= 0:
            return True
        if self.checkpoint_rows is not None:
            return False
        pause = self.flush_seconds
        if not self.flush_is_asked_for:
            pause = max(pause, last_cost_seconds * _FLUSH_COST_RATIO)
        # The one behind it is not to be too small, either.
        smaller = rows if rest is None else min(rows, rest)
        return smaller >= self.min_checkpoint_rows and seconds >= pause


@dataclass(frozen=True, slots=True)
class CommitRule:
    """When finished files are published.

    A commit costs as much as the table's manifest is long, however few files it publishes: groups
    of a fixed size would cost n fragments O(n^2). What waits is durable: a crash doesn't lose it.
    """

    files: int | None = None
    """Exactly so many files per commit; None: all that are finished, by time."""

    def is_due(
        self, ready: int, seconds: float, last_cost_seconds: float, quiet_seconds: float
    ) -> bool:
        """Whether to publish `ready` files, `seconds` after the last commit, or the beginning.

        The last one of them came `quiet_seconds` ago.
        """
        if self.files is not None:
            return ready >= self.files
        late = seconds - max(_COMMIT_SECONDS, last_cost_seconds * _COMMIT_COST_RATIO)
        gathered = quiet_seconds >= _GATHER_SECONDS or late >= _MAX_GATHER_SECONDS
        return ready > 0 and late >= 0 and gathered
