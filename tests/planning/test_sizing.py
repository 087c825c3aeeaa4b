"""Tasks cut on demand cover every row once; batches and checkpoints stay in their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva.model.rows import RowRange, RowSet
from geneva.model.tables import Reason, Sizes
from geneva.planning.backfill import Action, FragmentPlan, OutputPlan
from geneva.planning.batching import CallCost
from geneva.planning.ranges import disjoint, gaps
from geneva.planning.sizing import (
    MAX_FRAGMENTS_PER_TASK,
    BatchRule,
    CommitRule,
    Limit,
    Part,
    WorkQueue,
    max_in_flight,
    rows_to_run,
)


@st.composite
def fragment_plans(draw: st.DrawFn, fragment_id: int = 0) -> FragmentPlan:
    size = draw(st.integers(1, 40))
    compute = draw(st.one_of(st.just(set(range(size))), st.sets(st.integers(0, size - 1))))
    starts = draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, 10)), max_size=4))
    covered = disjoint([RowRange(s, min(s + n, size)) for s, n in starts], size)
    rows = RowSet.from_offsets(size, np.array(sorted(compute), dtype=np.int64))
    action = draw(st.sampled_from([Action.COMPUTE] * 4 + [Action.REUSE]))
    return replace(new_fragment(fragment_id, rows), action=action, covered=covered)


def new_fragment(fragment_id: int, rows: RowSet) -> FragmentPlan:
    """The plan of a fragment without values, of which these rows are computed."""
    return FragmentPlan(
        fragment_id=fragment_id,
        physical_rows=rows.size,
        action=Action.COMPUTE,
        reason=Reason.NEW,
        outputs=(OutputPlan(place=0, compute=rows, adopt=RowSet.empty(rows.size)),),
        compute=rows,
        valid_after=rows,
        complete=True,
        keeps_old=False,
        adopt=RowSet.empty(rows.size),
    )


@st.composite
def plan_lists(draw: st.DrawFn) -> list[FragmentPlan]:
    count = draw(st.integers(0, 8))
    return [draw(fragment_plans(i)) for i in range(count)]


def drain(queue: WorkQueue, shares: st.SearchStrategy[int], data: st.DataObject) -> list[Part]:
    parts: list[Part] = []
    while queue:
        task = queue.take(data.draw(shares))
        assert task, "a queue that is not empty hands something out"
        assert len(task) <= MAX_FRAGMENTS_PER_TASK
        parts.extend(task)
    assert queue.take(1) == ()
    return parts


@given(st.data(), plan_lists(), st.one_of(st.none(), st.integers(1, 50)))
def test_every_row_is_handed_out_once_whatever_the_shares(
    data: st.DataObject, plans: list[FragmentPlan], task_size: int | None
) -> None:
    queue = WorkQueue(plans, task_size)
    parts = drain(queue, st.integers(1, 60), data)
    for plan in plans:
        own = [part for part in parts if part.plan.fragment_id == plan.fragment_id]
        rows = [i for part in own for i in range(part.rows.start, part.rows.end)]
        wanted = list(range(plan.physical_rows)) if plan.action is Action.COMPUTE else []
        assert rows == wanted
        assert [part.whole for part in own] == [len(own) == 1] * len(own)
    assert queue.remaining_rows == 0


@given(st.data(), plan_lists(), st.integers(1, 50))
def test_a_task_size_is_kept_to(
    data: st.DataObject, plans: list[FragmentPlan], task_size: int
) -> None:
    queue = WorkQueue(plans, task_size)
    assert queue.share(2, None) == queue.share(64, 1e6) == task_size
    while queue:
        task = queue.take(task_size)
        assert sum(map(rows_to_run, task)) <= task_size


@given(fragment_plans(), st.data())
def test_rows_to_run_are_the_computed_ones_that_no_checkpoint_covers(
    plan: FragmentPlan, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, plan.physical_rows))
    rows = RowRange(start, data.draw(st.integers(start, plan.physical_rows)))
    open_rows = {i for g in gaps(plan.covered, rows) for i in range(g.start, g.end)}
    wanted = open_rows & set(plan.compute.offsets().tolist())
    assert rows_to_run(Part(plan, rows, whole=False)) == len(wanted)


@given(plan_lists(), st.integers(1, 64), st.one_of(st.none(), st.floats(0.01, 1e9)))
def test_a_share_is_at_least_one_row(
    plans: list[FragmentPlan], slots: int, speed: float | None
) -> None:
    assert WorkQueue(plans, None).share(slots, speed) >= 1


def test_many_small_fragments_share_a_task() -> None:
    plans = [new_fragment(i, RowSet.full(10)) for i in range(500)]
    queue = WorkQueue(plans, None)
    first = queue.take(queue.share(2, None))
    assert 100 <= len(first) <= MAX_FRAGMENTS_PER_TASK


@pytest.mark.parametrize("speed", [10.0, 12_345.6])
def test_shares_are_full_batches(speed: float) -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(100_000))], None, batch_size=64)
    cuts = []
    while queue:
        (part,) = queue.take(queue.share(3, speed))
        cuts.append(part.rows.end)
    assert len(cuts) > 3
    assert all(end % 64 == 0 for end in cuts[:-1])
    assert cuts[-1] == 100_000


def test_parts_of_a_fragment_end_with_a_checkpoint_of_a_given_size() -> None:
    plan = new_fragment(0, RowSet.full(1_050))
    queue = WorkQueue([plan], None, checkpoint_size=100, may_give_back=False)
    ends = []
    while queue:
        ends += [part.rows.end for part in queue.next_task(4)[0]]
    assert all(end % 100 == 0 for end in ends[:-1])
    assert ends[-1] == 1_050
    assert len(ends) >= 4, "every slot has its share"


@pytest.mark.parametrize(("rows", "speed"), [(1_900, None), (19_000, None), (1_900, 10_000.0)])
def test_whole_fragments_are_not_cut_for_the_size_of_a_checkpoint(
    rows: int, speed: float | None
) -> None:
    plans = [new_fragment(i, RowSet.full(rows)) for i in range(12)]
    queue = WorkQueue(plans, None, checkpoint_size=1_000)
    parts = [part for _ in range(4) for part in queue.next_task(12, speed)[0]]
    assert [part.plan.fragment_id for part in parts] == [0, 1, 2, 3]
    assert all(part.whole for part in parts)


def test_the_rest_of_a_fragment_that_one_task_can_do_is_not_cut_for_a_checkpoint() -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(5_700))], None, checkpoint_size=1_000)
    parts = [queue.take(1_900)[0] for _ in range(4)]
    assert [len(part.rows) for part in parts] == [1_000, 1_000, 1_000, 2_700]


@pytest.mark.parametrize(
    ("task_size", "batch_size", "rows"), [(100, 64, 128), (128, 64, 128), (10, 64, 64), (7, 1, 7)]
)
def test_a_task_size_is_rounded_up_to_whole_batches(
    task_size: int, batch_size: int, rows: int
) -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(300))], task_size, batch_size=batch_size)
    sizes = []
    while queue:
        task, _ = queue.next_task(2, 1e6)
        sizes.append(sum(map(rows_to_run, task)))
    *full, last = sizes
    assert set(full) == {rows}
    assert sum(sizes) == 300
    assert last <= rows


def test_a_task_size_that_was_asked_for_is_not_rounded_to_checkpoints() -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(5_000))], 1_900, checkpoint_size=1_000)
    assert len(queue.next_task(4)[0][0].rows) == 1_900


def test_tasks_are_smaller_than_a_checkpoint_where_slots_would_have_none() -> None:
    plan = new_fragment(0, RowSet.full(1_000))
    queue = WorkQueue([plan], None, checkpoint_size=900, may_give_back=False)
    (part,), _ = queue.next_task(4)
    assert part.rows.end == 250


def test_first_tasks_are_even_shares_by_the_clock() -> None:
    plans = [new_fragment(i, RowSet.full(100_000)) for i in range(16)]
    queue = WorkQueue(plans, None)
    assert queue.limit(2, None) == Limit(0.25, max_rest=5)
    assert [len(queue.take(queue.share(2, None))) for _ in range(2)] == [8, 8]
    assert not queue


def test_where_tasks_go_out_together_first_ones_are_at_hand_for_slots_that_are_free_early() -> None:
    queue = WorkQueue([new_fragment(i, RowSet.full(100)) for i in range(640)], None)
    tasks = [len(queue.take(queue.share(32, None, per_job=2))) for _ in range(64)]
    assert tasks == [10] * 64
    assert not queue


def test_a_fragment_that_ends_with_the_others_is_not_split() -> None:
    plan = new_fragment(0, RowSet.full(250))
    for in_flight, is_whole in ((250, True), (0, False)):
        queue = WorkQueue([plan], None)
        (part,) = queue.take(queue.share(2, 200.0), queue.even_rows(2, 200.0, in_flight))
        assert part.whole is is_whole


def test_a_fragment_stays_whole_until_it_is_known_how_long_rows_take() -> None:
    plan = new_fragment(0, RowSet.full(100))
    queue = WorkQueue([plan], None)
    assert queue.limit(2, None) == Limit(0.25, max_rest=0.25, in_fragments=True)
    assert queue.take(queue.share(2, None)) == (Part(plan, RowRange(0, 100), whole=True),)
    assert not queue
    queue.put_back_rest(plan, 20)
    assert queue.remaining_rows == 80
    assert queue.limit(2, 50.0) is None
    ranges = [queue.take(queue.share(2, 50.0)) for _ in range(4)]
    assert [part.rows.start for (part,) in ranges] == [20, 52, 72, 84]
    assert not any(part.whole for (part,) in ranges)


def test_so_few_rows_that_each_may_take_minutes_are_handed_out_evenly() -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(60))], None)
    limit = queue.limit(2, None)
    assert limit is not None
    assert not limit.in_fragments
    assert [len(part.rows) for _ in range(2) for part in queue.take(queue.share(2, None))] == [
        30
    ] * 2


def test_few_batches_of_a_given_size_are_handed_out_evenly() -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(256))], None, batch_size=128)
    tasks = [queue.next_task(2) for _ in range(2)]
    assert [len(part.rows) for parts, _ in tasks for part in parts] == [128, 128]


def test_one_large_fragment_among_small_ones_is_given_back() -> None:
    plans = [new_fragment(0, RowSet.full(1_000)), new_fragment(1, RowSet.full(100_000))]
    queue = WorkQueue([*plans, new_fragment(2, RowSet.full(1_000))], None)
    for is_large in (False, True, False):
        limit = queue.limit(2, None)
        assert limit is not None
        assert limit.in_fragments is is_large
        assert len(queue.take(queue.share(2, None))) == 1


def test_where_nothing_is_given_back_large_fragments_are_split_at_once() -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(1_000))], None, may_give_back=False)
    assert queue.limit(4, None) == Limit(0.25, max_rest=5)
    assert [len(queue.take(queue.share(4, None))[0].rows) for _ in range(4)] == [250] * 4


def test_tasks_are_at_hand_while_one_waits_for_others_of_its_batch() -> None:
    assert max_in_flight(2, 1) == 3
    assert max_in_flight(1_000, 62) == 2_000


def test_a_slot_that_is_alone_gets_everything_for_a_while_and_then_some_seconds_at_a_time() -> None:
    plans = [new_fragment(i, RowSet.full(100_000)) for i in range(8)]
    queue = WorkQueue(plans, None)
    assert queue.limit(1, None) == Limit(10, max_rest=5)
    everything = queue.take(queue.share(1, None))
    assert [part.plan for part in everything] == plans
    assert not queue
    queue.put_back(plans[2:])
    assert queue.remaining_rows == 600_000
    assert queue.limit(1, 20_000.0) is None
    assert [part.plan for part in queue.take(queue.share(1, 20_000.0))] == plans[2:5]
    assert len(queue.take(queue.share(1, 1_000_000.0))) == 3
    assert not queue


def test_a_fragment_of_a_minute_is_not_split_for_a_slot_that_is_alone() -> None:
    plans = [new_fragment(i, RowSet.full(60_000)) for i in range(3)]
    queue = WorkQueue(plans, None)
    speed = 1_000.0
    whole = queue.even_rows(1, speed, 0.0)
    assert whole == 60_000
    assert queue.share(1, speed) == 15_000
    (part,) = queue.take(queue.share(1, speed), whole)
    assert (part.plan, part.whole) == (plans[0], True)


def test_fragments_are_put_back_while_another_one_is_handed_out_in_parts() -> None:
    plans = [new_fragment(i, RowSet.full(100)) for i in range(3)]
    queue = WorkQueue(plans, None)
    queue.take(100)
    (first,) = queue.take(40)
    queue.put_back(plans[:1])
    (second,) = queue.take(60)
    assert (first.plan, second.plan) == (plans[1], plans[1])
    assert (first.rows, second.rows) == (RowRange(0, 40), RowRange(40, 100))
    assert [part.plan for part in queue.take(200)] == [plans[2], plans[0]]


@pytest.mark.parametrize(("slots", "task_size"), [(2, 7), (1, 10)])
def test_tasks_of_a_given_size_end_with_their_rows(slots: int, task_size: int | None) -> None:
    assert WorkQueue([], task_size).limit(slots, None) is None


# ------------------------------------------------------------------------------------- batches

COUNTS = st.one_of(st.none(), st.integers(1, 1_000))


@st.composite
def rules(draw: st.DrawFn) -> tuple[Sizes, int, BatchRule]:
    low, high = draw(COUNTS), draw(COUNTS)
    if low is not None and high is not None and low > high:
        low, high = high, low
    sizes = Sizes(draw(COUNTS), draw(COUNTS), low, high, None)
    window = draw(st.integers(1, 5_000))
    return sizes, window, BatchRule.of(sizes, window, None)


@given(rules(), st.lists(st.floats(0, 10), max_size=12))
def test_batches_stay_within_their_bounds(
    drawn: tuple[Sizes, int, BatchRule], seconds: list[float]
) -> None:
    sizes, window, rule = drawn
    size, cost = rule.first, CallCost()
    for took in [0.0, *seconds]:
        assert 1 <= size <= (sizes.batch_size or window)
        for bound in (sizes.batch_size, sizes.max_checkpoint_size, sizes.checkpoint_size):
            assert bound is None or size <= bound
        cost = cost.after(size, took)
        size = rule.batch_rows(cost.next_rows())


@given(rules(), st.integers(1, 2_000), st.floats(0, 100))
def test_a_checkpoint_is_due_at_its_largest_size(
    drawn: tuple[Sizes, int, BatchRule], rows: int, seconds: float
) -> None:
    sizes, _, rule = drawn
    bounds = [b for b in (sizes.checkpoint_size, sizes.max_checkpoint_size) if b is not None]
    assert rule.max_checkpoint_rows == min(bounds, default=None)
    if bounds and rows >= min(bounds):
        assert rule.largest_checkpoint == min(bounds)
        assert rule.is_due(rows, seconds, 0.0, rest=min(bounds) - rows)


@given(rules())
def test_a_batch_size_alone_is_honoured_as_given(drawn: tuple[Sizes, int, BatchRule]) -> None:
    sizes, window, _ = drawn
    if sizes.batch_size is not None:
        rule = BatchRule.of(Sizes(batch_size=sizes.batch_size), window, None)
        assert rule.first == rule.max_rows == min(sizes.batch_size, window)
        assert rule.batch_rows(1) == rule.batch_rows(99_999) == rule.first


@given(st.integers(1, 1_000), st.integers(1, 2_000), st.floats(0, 100))
def test_an_explicit_checkpoint_size_is_due_by_rows_alone(
    size: int, rows: int, seconds: float
) -> None:
    rule = BatchRule.of(Sizes(checkpoint_size=size), 65_536, None)
    assert rule.is_due(rows, seconds, 0.0, rest=size - rows) == (rows >= size)


@given(st.integers(1, 100), st.integers(0, 100), st.floats(0, 100), st.integers(1, 200))
def test_a_checkpoint_by_time_is_due_between_its_bounds(
    low: int, extra: int, seconds: float, rows: int
) -> None:
    rule = BatchRule.of(Sizes(min_checkpoint_size=low, max_checkpoint_size=low + extra), 1_000, 1.0)
    rest = low + extra - rows
    due = rule.is_due(rows, seconds, 0.0, rest)
    if rest <= 0:
        assert due
    elif rows < low or rest < low:  # the next one ends where it ends: it would be too small
        assert not due
    else:
        assert due == (seconds >= 1.0)


def test_a_dear_checkpoint_is_made_less_often() -> None:
    rule = BatchRule.of(Sizes(), 1_000, None)
    assert rule.is_due(10, 2.0, last_cost_seconds=0.001, rest=None)
    assert not rule.is_due(10, 2.0, last_cost_seconds=1.0, rest=None)
    asked = BatchRule.of(Sizes(), 1_000, 2.0)
    assert asked.is_due(10, 2.0, last_cost_seconds=1.0, rest=None), "unless somebody asked for it"


def commits(rule: CommitRule, seconds: float, cost: Callable[[int], float]) -> list[float]:
    """When a job that finishes ten files per second commits; the n-th commit takes `cost(n)`."""
    done, now, last_end, last_cost = list[float](), 0.0, 0.0, 0.0
    ready = 0
    while now < seconds:
        now, ready = now + 0.1, ready + 1
        if rule.is_due(ready, now - last_end, last_cost, quiet_seconds=0.1):
            last_cost = cost(len(done))
            now, ready = now + last_cost, 0
            last_end = now
            done.append(now)
    return done


@given(st.floats(0.001, 20.0), st.floats(0.0, 0.1))
def test_commits_by_time_cost_a_twentieth_and_come_soon(first: float, growth: float) -> None:
    def cost(number: int) -> float:
        return first + growth * number

    made = commits(CommitRule(), 1_000.0, cost)
    # Each one is paid for by the pause before the next.
    spent = sum(map(cost, range(len(made) - 1)))
    assert spent <= 0.05 * 1_000.0
    last = 0.0
    for number, at in enumerate(made):
        waited = at - cost(number) - last
        assert waited <= max(5.0, 20 * (cost(number - 1) if number else 0.0)) + 1.11
        last = at


def test_a_commit_size_that_was_asked_for_is_kept() -> None:
    rule = CommitRule(files=3)
    due = [rule.is_due(ready, 100.0, 0.0, 0.0) for ready in range(5)]
    assert due == [False] * 3 + [True] * 2
    assert rule.is_due(3, 0.0, last_cost_seconds=60.0, quiet_seconds=0.0)
    assert not CommitRule().is_due(0, 100.0, 0.0, 100.0), "there is nothing to commit"


def test_a_commit_that_is_due_waits_for_tasks_that_end_together() -> None:
    rule = CommitRule()
    assert not rule.is_due(1, 5.1, 0.0, quiet_seconds=0.1), "others may end now, too"
    assert rule.is_due(2, 5.4, 0.0, quiet_seconds=0.3)
    assert rule.is_due(9, 6.1, 0.0, quiet_seconds=0.01), "but not for ever"


def test_the_rest_of_a_fragment_is_no_crumb() -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(1_000))], None)
    sizes = []
    while queue:
        (part,) = queue.take(300)
        sizes.append(len(part.rows))
    assert sizes == [300, 300, 400]


def test_tasks_are_long_enough_for_the_driver_of_many_slots() -> None:
    rows, speed = 10_000, 1_000.0
    queue = WorkQueue([new_fragment(0, RowSet.full(rows))], None)
    assert queue.share(100, speed) == 1_000  # 100 slots take a second to be handed a task each
    assert queue.share(100, speed, per_job=10) == 150


@pytest.mark.parametrize(
    ("rows", "slots", "speed", "task_size", "probed"),
    [
        (100, 16, None, None, True),
        (100, 16, 10.0, None, False),
        (100, 2, None, None, False),
        (100, 16, None, 10, False),
        (100_000, 16, None, None, False),
    ],
)
def test_a_first_task_is_waited_for_where_many_would_be_cut_blindly(
    rows: int, slots: int, speed: float | None, task_size: int | None, *, probed: bool
) -> None:
    queue = WorkQueue([new_fragment(0, RowSet.full(rows))], task_size)
    assert queue.is_worth_a_probe(slots, speed) is probed


@pytest.mark.parametrize(
    ("rows", "fragments", "speed", "slots", "tasks"),
    [
        (100, 1, 1e6, 16, 1),
        (1_000_000, 16, 6e6, 16, 4),
        (1_000_000, 16, 6e6, 2, 2),
        (100_000, 500, 6e6, 16, 10),
        (2_000, 8, 200.0, 16, 8),
    ],
)
def test_what_is_known_of_a_function_says_how_many_tasks_are_worth_it(
    rows: int, fragments: int, speed: float, slots: int, tasks: int
) -> None:
    plans = [new_fragment(i, RowSet.full(rows // fragments)) for i in range(fragments)]
    queue = WorkQueue(plans, None, expected_speed=speed)
    assert not queue.is_worth_a_probe(slots, None)
    cut = 0
    while queue:
        parts, limit = queue.next_task(slots)
        assert parts
        assert limit is not None, "rows may take longer than they did"
        assert limit.in_fragments or tasks == slots == 2
        cut += 1
    assert cut == tasks


def test_tasks_of_known_functions_are_equal_shares() -> None:
    plans = [new_fragment(i, RowSet.full(65_536)) for i in range(8)]
    queue = WorkQueue(plans, None, expected_speed=2e7)
    shares = [len(queue.next_task(2)[0]), len(queue.next_task(2)[0])]
    assert shares == [4, 4]


def test_where_columns_end_together_a_fragment_that_was_begun_is_not_given_back() -> None:
    plans = [new_fragment(i, RowSet.full(100)) for i in range(4)]
    queue = WorkQueue(plans, None, expected_speed=1e6, may_give_back=False)
    parts, limit = queue.next_task(10)
    assert len(parts) == 4
    assert limit is not None
    assert not limit.in_fragments


@pytest.mark.parametrize(
    ("rows", "fragments", "expected", "speed", "task_size", "soon"),
    [
        (100, 1, 1e6, None, None, True),
        (1_000_000, 16, 6e6, None, None, True),
        (1_000_000, 16, 6e6, 6e6, None, False),  # others have reported: this is the rest
        (1_000_000, 16, 6e6, None, 10, False),
        (1_000_000, 16, None, None, None, False),
        (2_000, 8, 200.0, None, None, False),
        (100, 200, 1e6, None, None, True),
        (100, 600, 1e6, None, None, False),  # files take time, too
    ],
)
def test_first_tasks_are_handed_out_together_where_they_do_everything_in_a_moment(
    rows: int,
    fragments: int,
    expected: float | None,
    speed: float | None,
    task_size: int | None,
    *,
    soon: bool,
) -> None:
    plans = [new_fragment(i, RowSet.full(max(1, rows // fragments))) for i in range(fragments)]
    queue = WorkQueue(plans, task_size, expected_speed=expected)
    assert queue.is_soon_done(2, speed) is soon
