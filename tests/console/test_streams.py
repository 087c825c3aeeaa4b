"""Live pages: how many at once, and what they cost; cookies and names of other applications."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.responses import Response
from starlette.testclient import TestClient

from geneva.console import _address, app
from geneva.console import live as live_module
from geneva.console.guard import answered_hosts
from geneva.console.live import MAX_STREAMS, Streams
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets
from geneva.storage.jobs import append_only
from geneva.storage.jobs.append_only import AppendOnlyTable
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.feed import JobFeed
from geneva.storage.jobs.history import JobHistory

TOKEN = "a token of the tests"


class Browser:
    """Opens a stream, and reads until it is told to leave."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.events = 0
        self.leave = asyncio.Event()

    async def open(self, response: Response) -> None:
        async def receive() -> dict[str, Any]:
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.events += 1

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": "/"}
        await response(scope, receive, send)


def test_the_limit_holds_for_all_that_come_at_once() -> None:
    async def attempt() -> tuple[list[int | None], list[int | None], int]:
        streams, reads = Streams(), itertools.count()
        browsers = [Browser() for _ in range(500)]
        # All are answered before the first of them is read.
        answers = [streams.respond("page", lambda: {"n": next(reads)}) for _ in browsers]
        tasks = [asyncio.create_task(b.open(a)) for b, a in zip(browsers, answers, strict=True)]
        while not all(b.status for b in browsers) or sum(b.events for b in browsers) < MAX_STREAMS:
            await asyncio.sleep(0.01)
        statuses = [b.status for b in browsers]
        for browser in browsers:
            browser.leave.set()
        await asyncio.gather(*tasks)
        late = Browser()
        late.leave.set()
        await late.open(streams.respond("page", dict))
        return statuses, [late.status], next(reads)

    statuses, late, reads = asyncio.run(attempt())
    assert statuses.count(200) == MAX_STREAMS
    assert statuses.count(503) == 500 - MAX_STREAMS
    assert late == [200], "places are given back"
    assert reads <= 3, "one reader for all who look at the same page"


def test_a_reader_that_fails_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MAX_STREAMS", 1)

    def broken() -> dict[str, Any]:
        raise OSError("no")

    async def attempt() -> None:
        streams = Streams()
        for _ in range(3):
            with pytest.raises(BaseException, match=r"no|unhandled"):
                await Browser().open(streams.respond("page", broken))

    asyncio.run(attempt())


# ------------------------------------------------------------------------------- the job feed


def job(name: str, *statuses: JobStatus, start: int = 0) -> list[JobEvent]:
    created = JobEvent(name, "created", {"table": "t", "column": "c", "type": "BACKFILL"}, seq=0)
    changes = [
        JobEvent(name, "status", {"status": s.value}, seq=i)
        for i, s in enumerate(statuses, start or 1)
    ]
    return [*([] if start else [created]), *changes]


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = JobHistory(str(tmp_path), Secrets())
    feed = JobFeed(history)
    assert feed.records() == []
    rows: list[int] = []
    plain = AppendOnlyTable.read_new

    def counting(self: AppendOnlyTable, cursor: Any) -> Any:
        found = plain(self, cursor)
        rows.append(found[0].num_rows)
        return found

    monkeypatch.setattr(AppendOnlyTable, "read_new", counting)
    for i in range(5):
        history.append(job(f"j{i}", JobStatus.RUNNING, JobStatus.DONE))
    assert {r.status for r in feed.records()} == {JobStatus.DONE}
    history.append(job("k", JobStatus.RUNNING))
    feed.records()
    feed.records()
    history.append(job("k", JobStatus.DONE, start=2))
    assert len(feed.records()) == 6
    assert rows == [15, 2, 0, 1]


def test_the_feed_says_what_the_history_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through compactions, late words of jobs that had ended, and a history that begins anew."""
    monkeypatch.setattr(append_only, "_COMPACT_AT_FRAGMENTS", 4)
    history = JobHistory(str(tmp_path), Secrets(), lambda record: record.job_id == "j3")
    feed = JobFeed(history)

    def check() -> None:
        known = {r.job_id: replace(r, events=()) for r in history.list()}
        assert {r.job_id: replace(r, events=()) for r in feed.records()} == known

    for i in range(12):
        ends = (JobStatus.DONE,) if i % 3 else ()
        history.append(job(f"j{i}", JobStatus.RUNNING, *ends))
        check()
    history.append([JobEvent("j1", "committed", {"metrics": {"committed": 7}}, seq=1)])
    check()
    found = feed.unfinished("j0")
    assert found is not None
    assert [e.kind for e in found.events] == ["created", "status"]
    assert feed.unfinished("j1") is None
    assert feed.unfinished("j3") is None


# ---------------------------------------------------------------------------------- the guard


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    (tmp_path / "db").mkdir()
    made = app(str(tmp_path / "db"), token=TOKEN, hosts=["testserver", "localhost"])
    return TestClient(made, follow_redirects=False)


OTHERS = ["a[b]=1; ", "=; ", 'x="; ', "{}; ", "a b; ", "über=1; ", "geneva_console=old; "]


@pytest.mark.parametrize("other", OTHERS)
def test_cookies_of_other_applications(client: TestClient, other: str) -> None:
    answer = client.post("/login", data={"token": TOKEN})
    name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
    client.cookies.clear()
    for sent in (f"{other}{name}={value}", f"{name}={value}; {other}", f"{name}=x; {name}={value}"):
        headers = {"cookie": sent.encode("latin-1")}
        assert client.get("/", headers=headers).status_code == 200, sent  # type: ignore[arg-type]
    assert client.get("/", headers={"cookie": f"{name}=no"}).status_code in (303, 401)


def test_two_consoles_of_one_machine(client: TestClient) -> None:
    names = set()
    for port in (8765, 8766):
        host = {"host": f"localhost:{port}"}
        answer = client.post("/login", data={"token": TOKEN}, headers=host)
        names.add(answer.headers["set-cookie"].partition("=")[0])
    assert len(names) == 2


def test_a_console_for_everybody_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    for bound in ("0.0.0.0", "::"):
        hosts = answered_hosts(bound)
        client = TestClient(app(str(tmp_path / "db"), token=TOKEN, hosts=hosts))
        shown = [word for word in _address(bound, 80).split() if word.startswith("http")]
        assert len(shown) == 2
        for address in (*shown, "http://192.168.1.7:80", "http://[fe80::1]:80"):
            host = address.removeprefix("http://").rstrip(",")
            assert client.get("/login", headers={"host": host}).status_code == 200, host
        assert client.get("/login", headers={"host": "evil.example"}).status_code == 421
    assert _address("::1", 80) == "http://[::1]:80"
    local = TestClient(app(str(tmp_path / "db"), hosts=answered_hosts("127.0.0.1")))
    assert local.get("/", headers={"host": "192.168.1.7"}).status_code == 421
