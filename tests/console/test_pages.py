"""The console's pages, headers and refusals, asked as a browser would ask."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import lance
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import console_showcase as showcase
import geneva.console
from console_showcase import HOSTILE
from geneva import udtf
from geneva.console.guard import answered_hosts, host_name
from geneva.console.queries import DatabaseReader
from geneva.errors import UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.model.jobs import JobStatus
from geneva.model.tables import Secrets
from geneva.model.uris import without_credentials
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.heartbeats import JobSignals
from geneva.storage.jobs.history import JobHistory
from support import Calls, tripled

TOKEN = "a-token-of-this-test-alone"
ADDRESS = "http://127.0.0.1:8765"
SECRET = "sk-THIS-IS-SECRET-12345"
PAGES = (
    "/",
    "/tables/pictures",
    "/tables/pictures?row=700",
    "/tables/long_captions",
    "/tables/odd-names",
    "/tables/empty",
    "/tables/pictures/freshness",
    "/tables/long_captions/freshness",
    "/views",
    "/jobs",
    "/jobs?status=FAILED&table=pictures",
    "/errors",
    "/errors?table=pictures",
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("console") / "db"
    db = showcase.make(path, rows=120)
    showcase.add_hostile_names(db)
    # What LanceDB would not create: the folder is there nevertheless, and so is the job.
    lance.write_dataset(pa.table({"id": [1]}), f"{path}/{HOSTILE.replace('/', '')}.lance")
    history = JobHistory(str(path), Secrets())
    created = {
        "table": HOSTILE,
        "column": HOSTILE,
        "type": "BACKFILL",
        "config": {"where": HOSTILE},
    }
    failed = {"status": "FAILED", "error": f"{HOSTILE}: {HOSTILE} with {SECRET}"}
    history.append(
        [JobEvent("hostile-job", "created", created), JobEvent("hostile-job", "status", failed)]
    )
    return str(path)


@pytest.fixture(scope="module")
def client(uri: str) -> TestClient:
    return browser(uri)


def browser(uri: str, token: str | None = None, **options: Any) -> TestClient:
    made = geneva.console.app(uri, token=token, **options)
    return TestClient(
        made, base_url=ADDRESS, headers={"accept": "text/html"}, follow_redirects=False
    )


class Page(HTMLParser):
    """What a browser would see: elements, and text outside of them."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == name]


# --------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize(
    "number",
    [
        "0" * 5000,
        "9" * 5000,
        "-1",
        "1e9",
        "nan",
        "\uff11\uff12",
        "\u0663",
        " 1",
        "1_0",
        "0x1",
        "1\n",
    ],
)
def test_numbers_that_are_none_are_refused_in_a_sentence(client: TestClient, number: str) -> None:
    at, of = "/tables/pictures", {"column": "image", "row": "0", "version": "1"}
    for way, asked in (
        (at, {"row": number}),
        (f"{at}/picture", {**of, "row": number}),
        (f"{at}/picture", {**of, "version": number}),
    ):
        answer = client.get(way, params=asked)
        assert answer.status_code == 400
        assert "whole number" in Page(answer.text).text


def test_a_job_is_found_by_how_its_id_begins(uri: str, client: TestClient) -> None:
    answer = client.get("/jobs/hostile")
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/hostile-job")
    for job_id in ("twin-1", "twin-2"):
        end(running_job(uri, job_id), job_id)
    several = client.get("/jobs/twin-")
    assert several.status_code == 404
    assert "2 jobs begin with 'twin-'" in Page(several.text).text
    assert "There is no job" in Page(client.get("/jobs/nope").text).text


@pytest.mark.parametrize("way", [*PAGES, "/jobs/hostile-job"])
def test_every_page_is_whole_safe_and_accessible(client: TestClient, way: str) -> None:
    answer = client.get(way)
    assert answer.status_code == 200
    page = Page(answer.text)
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert answer.text.partition("</head>")[0].count("<title>") == 1
    assert page.all("header")
    assert page.all("footer")
    assert {n["aria-label"] for n in page.all("nav")} >= {"Main"}
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(image.get("alt") for image in page.all("img"))
    assert "width=device-width" in str(page.all("meta"))
    # The one script and style are the console's own; nothing is inline, nothing is elsewhere.
    assert page.all("script") == [{"src": "/static/console.js", "defer": None}]
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href"):
            assert attributes.get(name, "/").startswith(("/", "#"))
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "way", ["/", "/views", "/jobs", "/errors", "/tables/odd-names", "/jobs/hostile-job"]
)
def test_hostile_names_are_text(client: TestClient, way: str) -> None:
    markup = client.get(way).text
    assert "<script>alert" not in markup
    assert "<i>echo" not in markup
    assert "<b>truncated" not in markup
    assert "🦆" in Page(markup).text


def test_branches_and_namespaces_have_pages(tmp_path: Path) -> None:
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    main = db.create_table("t", pa.table({"id": [1, 2]}))
    main.add_columns({"y": tripled(Calls(str(tmp_path / "calls")))})
    main.branches.create("rel/v1").backfill("y")
    db.create_namespace(["ns"])
    db.create_table("t", pa.table({"id": [7]}), namespace_path=["ns"])
    client = browser(str(tmp_path / "db"))
    links = [str(a.get("href")) for a in Page(client.get("/").text).all("a")]
    for name, rows in (("t", 2), ("t%40rel%2Fv1", 2), ("ns%24t", 1)):
        assert f"/tables/{name}" in links
        assert f"{rows} row" in client.get(f"/tables/{name}").text
        assert client.get(f"/tables/{name}/freshness").status_code == 200
    assert "stale" not in client.get("/tables/t%40rel%2Fv1/freshness", headers={"x-part": "1"}).text
    assert "2 of 2 rows stale" in client.get("/tables/t/freshness").text
    assert "/tables/t%40rel%2Fv1" in client.get("/jobs").text
    assert client.get("/tables/t%40nope").status_code == 404
    for way in ("/views", "/metrics", "/errors?table=t%40rel%2Fv1"):
        assert client.get(way).status_code == 200


def test_columns_that_one_call_fills_name_each_other(tmp_path: Path) -> None:
    class Size(NamedTuple):
        w: int
        h: int

    def size(id: int) -> geneva.Columns[Size]:
        return Size(id, id)

    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    table = db.create_table("t", pa.table({"id": [1, 2]}))
    table.add_columns(geneva.udf(size))
    client = browser(str(tmp_path / "db"))
    page = client.get("/tables/t").text
    assert "with h" in page
    assert "with w" in page
    assert client.get("/tables/t/freshness").text.count("2 of 2 rows stale") == 2
    table.backfill("h")
    assert "w, h" in client.get("/jobs").text


def test_a_table_shows_columns_udfs_pictures_and_vectors(client: TestClient) -> None:
    markup = client.get("/tables/pictures").text
    page = Page(markup)
    assert "a " in page.text
    assert "embedding" in page.text
    assert "vector of 64 values" in markup
    pictures = [image["src"] for image in page.all("img")]
    assert len(pictures) == 10
    answer = client.get(str(pictures[3]))
    assert answer.headers["content-type"] == "image/png"
    assert answer.content.startswith(b"\x89PNG")
    assert "max-age" in answer.headers["cache-control"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("column=caption&row=0&version=3", 404),
        ("column=nope&row=0&version=3", 404),
        ("column=image&row=999999&version=3", 404),
        ("column=image&row=0&version=9999", 404),
        ("column=image&row=-1&version=3", 400),
        ("column=image&row=%C2%B2&version=3", 400),
        ("", 400),
    ],
)
def test_only_pictures_are_given_out(client: TestClient, query: str, status: int) -> None:
    assert client.get(f"/tables/pictures/picture?{query}").status_code == status


def test_a_picture_that_is_too_big_is_not_sent(
    uri: str, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geneva.console.routes.MAX_PICTURE_BYTES", 10)
    assert client.get("/tables/pictures/picture?column=image&row=0&version=3").status_code == 413


def test_freshness_says_how_many_and_why(client: TestClient) -> None:
    part = client.get("/tables/pictures/freshness", headers={"x-part": "1"}).text
    told = Page(part).text
    assert "30 of 390 rows stale" in told
    assert "30 new" in told
    assert "<html" not in part
    view = Page(client.get("/tables/shouts/freshness", headers={"x-part": "1"}).text).text
    assert "fresh" in view


def test_the_list_of_tables_plans_nothing(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr(DatabaseReader, "freshness", never)
    page = Page(client.get("/").text)
    assert [d["data-load"] for d in page.all("div") if "data-load" in d][
        -1
    ] == "/tables/shouts/freshness"


def test_nothing_is_unpickled(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("cloudpickle.loads", never)
    monkeypatch.setattr("pickle.loads", never)
    for way in PAGES:
        assert client.get(way).status_code == 200


def test_lineage_is_drawn_and_told(client: TestClient) -> None:
    page = Page(client.get("/views").text)
    assert "shout: computed by SQL from pictures.caption" in page.text
    assert "is_long: computed by is_long from pictures.words" in page.text
    assert len(page.all("path")) >= 10
    links = [a["href"] for a in page.all("a")]
    assert "/tables/long_captions" in links


def test_a_view_of_a_table_function(tmp_path: Path) -> None:
    @udtf(output_schema=pa.schema([("n", pa.int64())]), partition_by=["kind", "b & c"])
    def counting(source: Any) -> Any:
        yield {"n": len(source)}

    db = showcase.connect(tmp_path / "db")
    data = pa.table({"kind": ["x", "y"], "b & c": [1, 1]})
    view = db.create_udtf_view("counts", db.create_table("t", data), counting)
    client = browser(db.uri)
    assert '<span class="badge view">udtf</span>' in client.get("/").text
    page = Page(client.get("/views").text).text
    assert "Partitionskind, b & c" in page
    assert "counting(): computed by counting from t.kind, t.b & c" in page
    part = {"x-part": "1"}
    stale = Page(client.get("/tables/counts/freshness", headers=part).text).text
    assert "partitions: run the table function on 2 of 2" in stale
    view.refresh()
    assert "fresh" in Page(client.get("/tables/counts/freshness", headers=part).text).text
    assert "counting" in Page(client.get("/tables/counts").text).text


def test_jobs_can_be_filtered(client: TestClient) -> None:
    every = Page(client.get("/jobs").text).text
    assert "done" in every
    failed = client.get("/jobs?status=failed&table=pictures").text
    rows = failed.count('<th scope="row">')
    assert rows == failed.count('class="badge failed"') == 1
    assert client.get("/jobs?status=nonsense").status_code == 400
    assert "No job is like that" in client.get("/jobs?table=nope").text


def test_errors_are_grouped_with_rows_and_inputs(client: TestClient) -> None:
    page = Page(client.get("/errors").text)
    assert "ValueError" in page.text
    assert "TimeoutError" in page.text
    assert "fragment 0, row 13" in page.text
    assert "id=13" in page.text
    assert "KeyError" not in Page(client.get("/errors?table=long_captions").text).text


def test_metrics_are_prometheus_text(client: TestClient) -> None:
    client.get("/tables/pictures/freshness")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    line = re.compile(r'^[a-z_]+\{([a-z_]+="(\\.|[^"\\\n])*",?)*\} [0-9.e+-]+$')
    for text in answer.text.splitlines():
        assert text.startswith("# ") or line.match(text), text
    assert 'geneva_table_rows{table="pictures"} 390' in answer.text
    assert 'geneva_column_stale_rows{table="pictures",column="words"} 30' in answer.text
    assert re.search(r'geneva_jobs\{status="DONE"\} [1-9]', answer.text)


# ------------------------------------------------------------------------------- a running job


def running_job(uri: str, job_id: str) -> JobHistory:
    """A job on record as running; the heartbeat is ahead of the history."""
    import os
    import socket

    driver = {"host": socket.gethostname(), "pid": os.getpid()}
    history = JobHistory(uri, Secrets())
    created = {"table": "pictures", "column": "words", "type": "BACKFILL", "driver": driver}
    metrics = {
        "total": 1000,
        "committed": 100,
        "checkpointed": 200,
        "seconds": 2.0,
        "udf_rows": 200,
    }
    history.append(
        [
            JobEvent(job_id, "created", created),
            JobEvent(job_id, "status", {"status": "RUNNING"}),
            JobEvent(job_id, "committed", {"metrics": metrics}),
        ]
    )
    beat = {**metrics, "committed": 300, "checkpointed": 400, "seconds": 4.0, "udf_rows": 400}
    JobSignals(uri, Secrets()).beat(job_id, {"status": "RUNNING", "metrics": beat})
    return history


def end(history: JobHistory, job_id: str) -> None:
    history.append([JobEvent(job_id, "status", {"status": JobStatus.DONE.value})])


def test_a_running_job_shows_its_heartbeat_and_streams_to_the_end(
    uri: str, client: TestClient
) -> None:
    history = running_job(uri, "running-1")
    try:
        page = Page(client.get("/jobs/running-1").text)
        bars = {str(bar["id"]): bar["value"] for bar in page.all("progress")}
        assert bars == {
            "checkpointed-bar": "400",
            "ready_to_commit-bar": "0",
            "committed-bar": "300",
        }
        assert [p for p in page.all("p") if p.get("role") == "status"]
        assert (
            'geneva_job_rows{job="running-1",table="pictures",column="words",state="committed"} 300'
            in client.get("/metrics").text
        )
    finally:
        end(history, "running-1")
    answer = client.get("/jobs/running-1/stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("event: change\ndata: {")
    assert '"final": true' in answer.text
    assert client.get("/jobs/nope/stream").status_code == 404


# ------------------------------------------------------------------------------------ security


@pytest.mark.parametrize(
    "way", ["/", "/nope", "/jobs/nope", "/static/console.css", "/metrics", "/tables/a%2Fb"]
)
def test_every_answer_has_the_headers(client: TestClient, way: str) -> None:
    headers = client.get(way).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", ""]
)
def test_other_host_names_are_not_answered(client: TestClient, host: str) -> None:
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "pictures" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:8765", "LOCALHOST:1"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/login", headers={"host": host}).status_code == 303


def test_without_a_token_nothing_can_be_changed(uri: str, client: TestClient) -> None:
    history = running_job(uri, "running-2")
    try:
        assert "Cancel job" not in client.get("/jobs/running-2").text
        answer = client.post("/jobs/running-2/cancel", data={"key": "x"})
        assert answer.status_code == 403
        assert "only reads" in answer.text
        for way in ("/", "/jobs", "/tables/pictures"):
            assert client.post(way).status_code == 405
        assert not JobSignals(uri, Secrets()).cancel_requested("running-2")
    finally:
        end(history, "running-2")


def test_with_a_token_everything_asks_for_it(uri: str) -> None:
    asked = browser(uri, TOKEN)
    assert asked.get("/").headers["location"] == "/login"
    assert asked.get("/metrics", headers={"accept": "*/*"}).status_code == 401
    for way in ("/login", "/static/nope"):
        assert uri not in asked.get(way).text
    assert asked.post("/login", data={"token": "wrong"}).status_code == 403
    other = {"origin": "http://evil.example"}
    assert asked.post("/login", data={"token": TOKEN}, headers=other).status_code == 403
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert asked.get("/metrics", headers=bearer).status_code == 200
    welcome = asked.post("/login", data={"token": TOKEN})
    assert welcome.status_code == 303
    cookie = welcome.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie
    page = asked.get("/")
    assert page.status_code == 200
    assert TOKEN not in page.text


def test_a_job_is_cancelled_by_token_and_own_form_only(uri: str) -> None:
    history = running_job(uri, "running-3")
    signals = JobSignals(uri, Secrets())
    asked = browser(uri, TOKEN)
    way = "/jobs/running-3/cancel"
    try:
        assert asked.post(way).headers["location"] == "/login"
        asked.post("/login", data={"token": TOKEN})
        page = Page(asked.get("/jobs/running-3").text)
        key = next(i["value"] for i in page.all("input") if i.get("name") == "key")
        assert asked.post(way, data={"key": "0" * 64}).status_code == 403
        assert (
            asked.post(
                way, data={"key": key}, headers={"origin": "http://evil.example"}
            ).status_code
            == 403
        )
        assert (
            asked.post(way, data={"key": key}, headers={"sec-fetch-site": "cross-site"}).status_code
            == 403
        )
        assert asked.post("/jobs/hostile-job/cancel", data={"key": key}).status_code == 403
        assert asked.post(way, data={"key": "x" * 9_000}).status_code == 413
        assert not signals.cancel_requested("running-3")
        answer = asked.post(way, data={"key": key}, headers={"origin": ADDRESS})
        assert answer.headers["location"] == "/jobs/running-3"
        assert signals.cancel_requested("running-3")
        assert "cancel requested" in asked.get("/jobs/running-3").text
    finally:
        end(history, "running-3")
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert asked.post(way, headers=bearer).status_code == 409


def test_storage_options_reach_no_page(uri: str) -> None:
    options = {"aws_secret_access_key": SECRET}
    asked = browser(uri, storage_options=options)
    for way in (*PAGES, "/jobs/hostile-job", "/metrics"):
        assert SECRET not in asked.get(way).text
    assert without_credentials("s3://user:hunter2@bucket/db?key=hunter2") == "s3://bucket/db"


def test_an_unexpected_error_shows_no_stack_trace(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("inner secret")

    monkeypatch.setattr(DatabaseReader, "tables", broken)
    answer = browser(uri).get("/")
    assert answer.status_code == 500
    assert "inner secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers["x-frame-options"] == "DENY"


def test_files_outside_the_static_folder_are_not_served(client: TestClient) -> None:
    for way in ("/static/../routes.py", "/static/%2e%2e/routes.py", "/static/..%2froutes.py"):
        assert client.get(way).status_code == 404


def test_other_addresses_take_a_token() -> None:
    with pytest.raises(UserInputError, match="token"):
        geneva.console.serve("db", host="0.0.0.0")
    with pytest.raises(UserInputError, match="at least 16"):
        geneva.console.app("db", token="short")
    assert answered_hosts("127.0.0.1") == {"127.0.0.1", "::1", "localhost"}
    assert "example.org" in answered_hosts("0.0.0.0", ["example.org"])
    assert "0.0.0.0" not in answered_hosts("0.0.0.0")
    assert host_name("[::1]:80") == "::1"


def test_a_blob_column_is_shown_as_a_picture(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(100)
    field = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    data = pa.table(
        {"id": [1, 2], "image": [png, b"no"]}, schema=pa.schema([("id", pa.int64()), field])
    )
    lance.write_dataset(data, str(tmp_path / "db" / "blobs.lance"))
    asked = browser(str(tmp_path / "db"))
    page = Page(asked.get("/tables/blobs").text)
    (image,) = page.all("img")
    assert asked.get(str(image["src"])).content == png


@pytest.mark.parametrize("version", ["2.0", "2.2"])
def test_blobs_may_be_null(tmp_path: Path, version: str) -> None:
    """As those of rows that failed, or were not computed yet."""
    png = b"\x89PNG\r\n\x1a\n" + bytes(100)
    blob: Any = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    images: Any = pa.array([None, png], pa.large_binary())
    if version == "2.2":
        blob, images = pa.field("image", lance.blob.BlobType()), lance.blob_array([None, png])
    schema = pa.schema([("id", pa.int64()), blob])
    data = pa.table([pa.array([1, 2]), images], schema=schema)
    place = str(tmp_path / "db" / "blobs.lance")
    lance.write_dataset(data, place, data_storage_version=version)
    asked = browser(str(tmp_path / "db"))
    (image,) = Page(asked.get("/tables/blobs").text).all("img")
    assert asked.get(str(image["src"])).content == png
    assert "row=1" in str(image["src"])
    assert asked.get(str(image["src"]).replace("row=1", "row=0")).status_code == 404


def test_a_refresh_is_named_after_its_view(tmp_path: Path) -> None:
    db = geneva.connect(tmp_path / "db", runner=InProcessRunner)
    source = db.create_table("source", [{"id": 1}])
    result = db.create_materialized_view("seen", source.query()).refresh()
    text = browser(str(tmp_path / "db")).get(f"/jobs/{result.job_id}").text
    assert "Refresh of seen" in text
    assert "of *" not in text


def test_a_database_with_nothing_in_it(tmp_path: Path) -> None:
    asked = browser(str(tmp_path / "new"))
    for way in ("/", "/views", "/jobs", "/errors", "/metrics"):
        assert asked.get(way).status_code == 200
