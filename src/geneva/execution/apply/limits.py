"""Limits on calls that all workers share: so many a minute, and so much for a job.

The record that they share says from when on the next call may be made, on the clock of whoever is
ahead. A worker reserves a few calls at a time: as many as it makes in half a second, so that a call
costs no request to the store where calls are fast, and no reserved call is left over where they are
slow. What it reserved and did not use within that time is given up. Calls are spaced as if a minute
had 61 seconds: so no minute has more than the limit, however late reserved calls are made.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from geneva.errors import BudgetExceededError
from geneva.execution.apply.pauses import pause, pause_async
from geneva.execution.apply.steps import USER_FAILURES
from geneva.execution.apply.throttling import is_throttled, pause_of
from geneva.model.tables import Secrets
from geneva.storage.jobs.shared_state import SharedState, State, state_uri
from geneva.udf.usage import Meter, RateLimit

HORIZON_SECONDS = 0.5
"""How far ahead a worker reserves calls, and how long it may use them."""
_MINUTE_SECONDS = 60.0 + 2 * HORIZON_SECONDS
_MANY = 1 << 30
_LEASE_SHARE = 1 / 8
"""How much of the budget that is left a worker takes at once."""

T = TypeVar("T")


class Shared(Protocol):
    """A record that is changed by one process at a time."""

    updates: int

    def update(self, change: Callable[[State], T]) -> T:
        """Change it in place; return what `change` returned."""


class LocalState:
    """The same for one process alone."""

    def __init__(self) -> None:
        """Start empty."""
        self._state: State = {}
        self.updates = 0

    def update(self, change: Callable[[State], T]) -> T:
        """Change it."""
        self.updates += 1
        return change(self._state)


@dataclass(slots=True)
class _Reserved:
    """Calls, or tokens, that this worker may use: one every `spacing` seconds from `at` on."""

    spacing: float
    name: str
    at: float = 0.0
    left: float = 0.0
    size: float = 1.0
    taken_at: float = 0.0

    def take(self, amount: float, now: float) -> float | None:
        """The time from which on `amount` may be used; None: there is not enough."""
        lapsed = now - HORIZON_SECONDS - self.at
        if lapsed > 0:
            lost = min(self.left, lapsed / self.spacing)
            self.left -= lost
            self.at += lost * self.spacing
        if self.left < amount:
            return None
        start = self.at
        self.left -= amount
        self.at += amount * self.spacing
        return start

    def wanted(self, amount: float, now: float) -> float:
        """How much to reserve: what was used in half a second, by how long the last one lasted."""
        lasted = now - self.taken_at
        if self.taken_at and lasted < HORIZON_SECONDS / 2:
            self.size *= 2
        elif lasted > 2 * HORIZON_SECONDS:
            self.size /= 2
        most = max(1.0, HORIZON_SECONDS / self.spacing)
        self.size = min(max(self.size, 1.0), most)
        self.taken_at = now
        return max(amount, float(int(self.size)))

    def reserve(self, state: State, amount: float, now: float) -> None:
        """Reserve it in the shared record, behind what others reserved."""
        start = max(now, state.get(self.name, 0.0), state.get("paused_until", 0.0))
        state[self.name] = start + amount * self.spacing
        self.at, self.left = start, amount


def seconds_per_call(limit: RateLimit | None, tokens: float) -> float:
    """What a limit takes for each call, of so many tokens, of all workers together."""
    if limit is None:
        return 0.0
    rpm, tpm = limit.requests_per_minute, limit.tokens_per_minute
    requests = _MINUTE_SECONDS / rpm if rpm else 0.0
    return max(requests, _MINUTE_SECONDS * tokens / tpm if tpm else 0.0)


class Limiter:
    """The calls of one function in one task, under its rate limit."""

    def __init__(
        self,
        limit: RateLimit,
        state: Shared,
        meter: Meter,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Reserve nothing yet."""
        self._limit, self._state, self._meter, self._clock = limit, state, meter, clock
        self._lock = threading.Lock()
        self._calls = self._tokens_reserved = self._paused_until = 0.0
        rpm, tpm = limit.requests_per_minute, limit.tokens_per_minute
        self._requests = _Reserved(_MINUTE_SECONDS / rpm, "requests_at") if rpm else None
        self._tokens = _Reserved(_MINUTE_SECONDS / tpm, "tokens_at") if tpm else None
        self.waited_seconds = 0.0

    def limited(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...] | None = None,
    ) -> Callable[..., Any]:
        """Wrap a function so that its calls wait for their turn, and for the service.

        `inputs` are those of its one call, where it is called with what `prepare` made of them:
        tokens are counted by the inputs.
        """

        def call(*args: Any) -> Any:
            for attempt in itertools.count(1):
                pause(self._start(args if inputs is None else inputs))
                try:
                    return function(*args)
                except USER_FAILURES as error:
                    refused = self._pause(error, attempt)
                pause(refused)
            return None

        return call

    def limited_async(
        self, function: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        """The same for a coroutine."""

        async def call(*args: Any) -> Any:
            for attempt in itertools.count(1):
                await pause_async(await asyncio.to_thread(self._start, args))
                try:
                    return await function(*args)
                except USER_FAILURES as error:
                    failed = error
                await pause_async(await asyncio.to_thread(self._pause, failed, attempt))
            return None

        return call

    def _start(self, args: tuple[Any, ...]) -> float:
        """Reserve a call; return the seconds until it may be made."""
        tokens = float(self._limit.tokens(*args)) if self._limit.tokens is not None else None
        with self._lock:
            now, start = self._clock(), self._paused_until
            if self._tokens is not None:
                start = max(start, self._take(self._tokens, self._tokens_needed(tokens), now))
            if self._requests is not None:
                start = max(start, self._take(self._requests, 1.0, now))
            self._calls += 1
            wait = max(0.0, start - now)
            self.waited_seconds += wait
            return wait

    def _take(self, reserved: _Reserved, amount: float, now: float) -> float:
        if amount <= 0:
            return 0.0
        start = reserved.take(amount, now)
        if start is None:
            wanted = reserved.wanted(amount, now)
            self._state.update(lambda state: reserved.reserve(state, wanted, now))
            start = reserved.take(amount, now)
        assert start is not None
        return start

    def _tokens_needed(self, said: float | None) -> float:
        """Tokens of the next call, and what earlier ones used beyond what was reserved for them."""
        mean = self._meter.tokens / self._calls if self._calls else 0.0
        debt = 0.0
        if self._meter.tokens > self._tokens_reserved:
            debt = self._meter.tokens - self._tokens_reserved
        needed = (said if said is not None else mean) + debt
        self._tokens_reserved += needed
        return needed

    def _pause(self, error: BaseException, attempt: int) -> float:
        """Seconds to wait before a refused call is made again; raise what is no refusal."""
        if not is_throttled(error) or attempt >= self._limit.max_attempts:
            raise error
        seconds = pause_of(error, attempt)
        if callable(close := getattr(error, "close", None)):
            close()  # urllib's errors hold the connection
        with self._lock:
            until = self._clock() + seconds
            if until > self._paused_until:
                self._paused_until = until
                # What was reserved before is not used in the pause: it would come all at once.
                for reserved in (self._requests, self._tokens):
                    if reserved is not None:
                        reserved.left = 0.0
                self._state.update(lambda state: _pause_all(state, until))
        return seconds


def _pause_all(state: State, until: float) -> None:
    state["paused_until"] = max(until, state.get("paused_until", 0.0))


@dataclass(slots=True)
class Account:
    """The part of a job's budget that a task may spend. It is taken in ever smaller pieces."""

    max_cost: float
    state: Shared
    meter: Meter
    is_spent: bool = False
    """Whether a call could not be paid for: then no other is begun."""
    _credit: float = 0.0
    _again: int = 0
    """Rows that were called again, once for each time."""
    _call_cost: float | None = None
    """What a call has cost for each of its rows, before those that are under way."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def affordable(self, rows_done: int, rows_under_way: int) -> int:
        """How many more rows can be paid for, by what those that are done have cost; 0: none.

        While nothing is known of the cost, one row at a time.
        """
        with self._lock:
            cost = self.meter.cost / rows_done if rows_done else 0.0
            self._call_cost = self.meter.cost / (rows_done + self._again) if rows_done else None
            left = self._raised_to(cost * (rows_under_way + 1))
            if self.is_spent or left <= 0 or (not rows_done and rows_under_way):
                return 0
            if not rows_done:
                return 1
            return max(0, int(left / cost - rows_under_way + 1e-9)) if cost > 0 else _MANY

    def may_call_again(self, rows: int, rows_open: int) -> bool:
        """Whether rows whose call failed can be called again, beside all others that are open."""
        with self._lock:
            cost = self._call_cost
            if cost is None:  # it is the first row of all
                cost = self.meter.cost / (self._again + 1)
            left = self._raised_to(cost * rows_open)
            if left <= 0 or left < cost * rows_open * (1 - 1e-9):
                self.is_spent = True
                return False
            self._again += rows
            return True

    def close(self) -> None:
        """Give back what was not spent, or take what was overspent."""
        if self._credit or self.meter.cost:
            left, self._credit = self._left(), self.meter.cost
            self.state.update(lambda state: self._give_back(state, left))

    def error(self) -> BudgetExceededError:
        """What ends the job."""
        return BudgetExceededError(
            f"the budget of max_cost={self.max_cost:g} is spent. What is done is kept; run "
            "again to go on from there"
        )

    def _raised_to(self, wanted: float) -> float:
        """What this task may still spend, after it has taken more where that is not enough."""
        if self._left() <= wanted:
            missing = wanted - self._left()
            self._credit += self.state.update(lambda state: self._withdraw(state, missing))
        return self._left()

    def _left(self) -> float:
        return self._credit - self.meter.cost

    def _withdraw(self, state: State, missing: float) -> float:
        left = state.get("cost_left", self.max_cost)
        taken = min(left, max(missing, left * _LEASE_SHARE)) if left > 0 else 0.0
        state["cost_left"] = left - taken
        return taken

    def _give_back(self, state: State, amount: float) -> None:
        state["cost_left"] = state.get("cost_left", self.max_cost) + amount


OpenState = Callable[[str], Shared]
"""Opens a shared record by its name."""


def shared_states(folder: str, storage_options: Secrets) -> OpenState:
    """Records in a folder; without one, records of this process alone."""
    if not folder:
        return lambda name: LocalState()
    return lambda name: SharedState(state_uri(folder, name), storage_options)


class TaskUsage(Meter):
    """What the calls of a task use, and what limits them."""

    def __init__(
        self,
        open_state: OpenState = lambda name: LocalState(),
        job_id: str = "",
        max_cost: float | None = None,
    ) -> None:
        """Reserve nothing yet."""
        super().__init__()
        self._open_state, self._job_id = open_state, job_id
        self._limiters: dict[RateLimit, tuple[Limiter, Shared]] = {}
        self.account: Account | None = None
        if max_cost is not None:
            self.account = Account(max_cost, open_state(budget_name(job_id)), self)

    @property
    def has_budget(self) -> bool:
        """Whether calls have to be affordable."""
        return self.account is not None

    def may_call_again(self, rows: int, rows_open: int) -> bool:
        """Whether another call for some rows can be paid for."""
        return self.account is None or self.account.may_call_again(rows, rows_open)

    def limiter(self, limit: RateLimit, name: str) -> Limiter:
        """The limiter of a function, known by its column's `name` where it has no key."""
        if limit not in self._limiters:
            place = f"key-{limit.key}" if limit.key is not None else rate_name(self._job_id, name)
            state = self._open_state(place)
            self._limiters[limit] = (Limiter(limit, state, self), state)
        return self._limiters[limit][0]

    @property
    def requests(self) -> int:
        """How often shared records were changed."""
        states = [state for _, state in self._limiters.values()]
        states += [self.account.state] if self.account is not None else []
        return sum(state.updates for state in states)

    def close(self) -> None:
        """Give back what was reserved."""
        if self.account is not None:
            self.account.close()


def budget_name(job_id: str) -> str:
    """What the record of a job's budget is called."""
    return f"job-{job_id}-budget"


def rate_name(job_id: str, column: str) -> str:
    """What the record of a function's limit in one job is called."""
    # Of many columns that are filled together, names are longer than those of files can be.
    short = column if len(column) <= 100 else hashlib.sha256(column.encode()).hexdigest()
    return f"job-{job_id}-rate-{short}"


def owner_of(name: str, job_ids: Iterable[str]) -> str | None:
    """The job that had a record for itself; None: it is for several, or of no job among these."""
    found = [j for j in job_ids if name == budget_name(j) or name.startswith(rate_name(j, ""))]
    return max(found, key=len, default=None)
