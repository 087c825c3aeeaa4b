"""Telling living jobs from dead ones, whatever their clocks say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from geneva.execution.jobs.heartbeat import (
    BEAT_SECONDS,
    LOST_SECONDS,
    POLL_SECONDS,
    WATCH_SECONDS,
    Liveness,
    driven_here,
    driver_identity,
    is_gone,
)
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets
from geneva.storage.jobs import heartbeats
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.heartbeats import JobSignals, Signal
from geneva.storage.jobs.history import JobHistory
from geneva.storage.jobs.records import JobRecord

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SKEWS = [timedelta(hours=-14), timedelta(hours=-1), timedelta(0), timedelta(hours=1)]


@dataclass
class World:
    """A job on another machine, whose clock is wrong, and somebody who watches it."""

    skew: timedelta
    seconds: float = 0.0
    beats: list[Signal] = field(default_factory=list)

    def last_beat(self, job_id: str) -> Signal | None:
        return self.beats[-1] if self.beats else None

    @property
    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds)

    def job(self) -> JobRecord:
        begun = NOON + self.skew
        elsewhere = {"host": "elsewhere", "pid": 1, "world": "another"}
        return JobRecord(
            "j", "t", "c", "BACKFILL", JobStatus.RUNNING, begun, begun, driver=elsewhere
        )

    def observer(self) -> Liveness:
        return Liveness(self, lambda: self.seconds, lambda: self.now)  # type: ignore[arg-type]

    def beat(self) -> None:
        self.beats.append(Signal(self.now + self.skew, {}))


@pytest.mark.parametrize("skew", SKEWS, ids=str)
def test_a_job_that_beats_lives(skew: timedelta) -> None:
    world = World(skew)
    watching = world.observer()
    for _ in range(100):
        world.seconds += BEAT_SECONDS
        world.beat()
        assert not watching.is_lost(world.job())
        assert not world.observer().is_lost(world.job()), "for one who has just come, too"


@pytest.mark.parametrize("skew", SKEWS, ids=str)
@pytest.mark.parametrize("beats", [0, 3])
def test_a_silent_job_is_lost_to_who_watches(skew: timedelta, beats: int) -> None:
    world = World(skew)
    for _ in range(beats):
        world.seconds += BEAT_SECONDS
        world.beat()
    watching = world.observer()
    assert not watching.is_lost(world.job())
    world.seconds += LOST_SECONDS - 1
    assert not watching.is_lost(world.job())
    world.seconds += 2
    assert watching.is_lost(world.job())
    world.beat()
    assert not watching.is_lost(world.job()), "it was only held up"
    world.seconds += 3 * 86_400
    assert world.observer().is_lost(world.job()), "no clock is wrong by days"


def watcher(world: World, *, alive: bool) -> Liveness:
    """Somebody who has to know; while they watch, a living job goes on beating."""

    def sleep(seconds: float) -> None:
        world.seconds += seconds
        if alive and world.seconds % BEAT_SECONDS < seconds:
            world.beat()

    return Liveness(world, lambda: world.seconds, lambda: world.now, sleep)  # type: ignore[arg-type]


@pytest.mark.parametrize("skew", SKEWS, ids=str)
def test_who_has_to_know_watches_for_three_heartbeats(skew: timedelta) -> None:
    living = World(skew)
    living.beat()
    watching = watcher(living, alive=True)
    began = living.seconds
    assert not watching.watch(living.job())
    assert living.seconds - began <= BEAT_SECONDS + POLL_SECONDS
    living.seconds += BEAT_SECONDS
    living.beat()
    again = living.seconds
    assert not watching.watch(living.job())
    assert living.seconds == again, "it was seen alive before"


@pytest.mark.parametrize("skew", SKEWS[:3], ids=str)
def test_a_dead_job_is_known_for_dead_after_thirty_seconds(skew: timedelta) -> None:
    dead = World(skew)
    dead.beat()
    dead.seconds += LOST_SECONDS + 1
    began = dead.seconds
    assert watcher(dead, alive=False).watch(dead.job())
    assert dead.seconds - began <= WATCH_SECONDS + POLL_SECONDS


def test_a_job_that_was_heard_of_just_now_is_not_watched() -> None:
    world = World(timedelta(0))
    world.beat()
    world.seconds += 20
    assert not watcher(world, alive=False).watch(world.job())
    assert world.seconds == 20


def test_events_are_signs_of_life_too() -> None:
    world = World(timedelta(0))
    watching = world.observer()
    job = world.job()
    assert not watching.is_lost(job)
    world.seconds += LOST_SECONDS - 1
    job = replace(job, events=(JobEvent("j", "committed"),))
    assert not watching.is_lost(job)
    world.seconds += LOST_SECONDS - 1
    assert not watching.is_lost(job)


class TestProcessesOfThisMachine:
    @staticmethod
    def job(**driver: object) -> JobRecord:
        known = {**driver_identity(), **driver}
        return JobRecord("j", "t", "c", "BACKFILL", JobStatus.RUNNING, NOON, NOON, driver=known)

    def test_this_one(self) -> None:
        with driven_here("j"):
            assert not is_gone(self.job())
        assert is_gone(self.job()), "it lives, but the job is over"

    def test_others(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            job = self.job(pid=child.pid, started=None)
            assert not is_gone(job)
            assert is_gone(self.job(pid=child.pid, started="1")), "the id was used again"
        finally:
            child.kill()
            while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                pass
            assert is_gone(job), "dead, and not waited for"
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        assert is_gone(job)

    def test_what_can_not_be_seen_from_here(self) -> None:
        assert not is_gone(self.job(pid=2**22 + 1, world="another container"))
        assert not is_gone(self.job(pid=2**22 + 1, host="another machine"))
        assert not is_gone(self.job(pid=2**80))
        assert not is_gone(self.job(pid="x"))


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_living_job_with_a_wrong_clock_keeps_its_tag(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = datetime.now(UTC) + timedelta(hours=hours)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return wrong

    signals = JobSignals(str(tmp_path), Secrets())
    with monkeypatch.context() as patched:
        patched.setattr(heartbeats, "datetime", Clock)
        signals.beat("j", {})
    history = JobHistory(str(tmp_path), Secrets(), Liveness(signals).is_lost)
    driver = {"host": "elsewhere", "pid": os.getpid(), "world": "another"}
    created = {"table": "t", "column": "c", "type": "BACKFILL", "driver": driver}
    running = JobEvent("j", "status", {"status": "RUNNING"}, wrong, seq=1)
    history.append([JobEvent("j", "created", created, wrong, seq=0), running])
    assert history.job("j").status is JobStatus.RUNNING
    assert history.close_lost("j")
    assert len(history.job("j").events) == 2
