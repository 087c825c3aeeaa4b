"""The console's addresses: each reads, hands over to a page, and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from geneva.console.cells import MAX_PICTURE_BYTES
from geneva.console.error_pages import errors_page
from geneva.console.guard import Access, Guard, cookie_name, is_same_origin
from geneva.console.job_pages import (
    JobFilter,
    job_bars,
    job_list,
    job_page,
    job_parts,
    jobs_page,
    spoken,
)
from geneva.console.layout import Frame, heading, html_response, path
from geneva.console.live import Streams
from geneva.console.metrics import metrics_text
from geneva.console.queries import DatabaseReader
from geneva.console.table_pages import PREVIEW_ROWS, freshness_part, table_page, tables_page
from geneva.console.view_pages import views_page
from geneva.errors import JobError, JobNotFoundError, TableNotFoundError
from geneva.model.jobs import JobStatus, filled_by_job
from geneva.render.html import Child, Html, tag
from geneva.storage.lance.preview import read_picture, read_preview

_STATIC = Path(__file__).parent / "static"
_MAX_FORM_BYTES = 4_096
_MAX_ROW = 2**40
_MAX_DIGITS = 20


class Console:
    """The endpoints of one database."""

    def __init__(self, reader: DatabaseReader, access: Access) -> None:
        """Answer from `reader`, and change only what `access` allows."""
        self._reader, self._access = reader, access
        self._frame = Frame(reader.uri, access.needs_token)
        self._strangers_frame = Frame("", access.needs_token)  # which database it is, is a secret
        self._streams = Streams()

    def routes(self) -> list[Route | Mount]:
        """Every address."""
        return [
            Route("/", self.tables),
            # The name of a branch may have slashes.
            Route("/tables/{name:path}/freshness", self.freshness),
            Route("/tables/{name:path}/picture", self.picture),
            Route("/tables/{name:path}", self.table),
            Route("/views", self.views),
            Route("/jobs", self.jobs),
            Route("/jobs/stream", self.jobs_stream),
            Route("/jobs/{job_id}", self.job),
            Route("/jobs/{job_id}/stream", self.job_stream),
            Route("/jobs/{job_id}/cancel", self.cancel, methods=["POST"]),
            Route("/errors", self.errors),
            Route("/metrics", self.metrics),
            Route("/login", self.login, methods=["GET", "POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ]

    # ------------------------------------------------------------------------------- tables

    def tables(self, request: Request) -> Response:
        """All tables."""
        return self._frame.page("Tables", *tables_page(self._reader.tables()), here="/")

    def table(self, request: Request) -> Response:
        """One table."""
        name = request.path_params["name"]
        info = self._reader.table(name)
        if info.trouble is not None:
            raise HTTPException(404, info.trouble)
        table = self._reader.open(name)
        columns = list(table.schema.names)
        start = _whole_number(request.query_params.get("row", "0"))
        try:
            preview: Any = read_preview(table.ref, columns, start, PREVIEW_ROWS)
        except (OSError, ValueError, NotImplementedError) as error:
            preview = f"The rows can't be shown: {self._reader.redact(str(error))[:300]}"
        return self._frame.page(name, *table_page(info, table.schema, preview), here="/")

    def freshness(self, request: Request) -> Response:
        """How fresh a table is: a part of a page, or a page of its own without scripts."""
        name = request.path_params["name"]
        part = freshness_part(self._reader.freshness(name))
        if request.headers.get("x-part"):
            return html_response(part)
        title = heading(
            f"Freshness of {name}", crumbs=(("Tables", "/"), (name, path("tables", name)))
        )
        return self._frame.page(f"Freshness of {name}", title, part, here="/")

    def picture(self, request: Request) -> Response:
        """A cell that is a picture."""
        asked = request.query_params
        table = self._reader.open(request.path_params["name"])
        row, version = _whole_number(asked.get("row", "")), _whole_number(asked.get("version", ""))
        column = asked.get("column", "")
        found = None
        if column in table.schema.names:
            try:
                found = read_picture(table.ref, version, column, row, MAX_PICTURE_BYTES)
            except (OSError, ValueError) as error:
                raise HTTPException(404, "There is no such picture.") from error
        if not isinstance(found, tuple):
            too_big = found is not None and found.picture is not None
            raise HTTPException(413 if too_big else 404, "There is no picture to show there.")
        headers = {"cache-control": "private, max-age=3600"}
        return Response(found[1], media_type=found[0], headers=headers)

    def views(self, request: Request) -> Response:
        """Views and lineage."""
        content = views_page(self._reader.tables())
        return self._frame.page("Views & lineage", *content, here="/views")

    # --------------------------------------------------------------------------------- jobs

    def jobs(self, request: Request) -> Response:
        """The list of jobs."""
        chosen = _job_filter(request)
        every = self._reader.jobs()
        tables = sorted({job.table_name for job in every})
        listed = [j for j in every if _fits(j, chosen)]
        return self._frame.page("Jobs", *jobs_page(listed, chosen, tables), here="/jobs")

    async def jobs_stream(self, request: Request) -> Response:
        """The list of jobs as it changes."""
        chosen = _job_filter(request)

        def read() -> dict[str, Any]:
            jobs = [job for job in self._reader.jobs() if _fits(job, chosen)]
            return {"html": {"jobs": job_list(jobs, chosen)}}

        return self._streams.respond(chosen, read)

    def job(self, request: Request) -> Response:
        """One job, by its id or by how that begins."""
        asked = request.path_params["job_id"]
        try:
            job = self._reader.job(asked)
        except JobNotFoundError:
            return RedirectResponse(path("jobs", self._reader.whole_id(asked)), 303)
        stopping = not job.status.is_final and self._reader.cancel_requested(job.job_id)
        form = None if job.status.is_final or stopping else self._cancel_form(job.job_id)
        output = self._reader.output(job.job_id)
        samples = self._reader.samples(job)
        content = job_page(job, samples, form, stopping=stopping, output=output)
        return self._frame.page(
            f"{job.job_type.capitalize()} of {filled_by_job(job.table_name, job.column_name)}",
            *content,
            here="/jobs",
        )

    async def job_stream(self, request: Request) -> Response:
        """One job as it goes on."""
        job_id = request.path_params["job_id"]
        await run_in_threadpool(self._reader.job, job_id)  # not found is an answer, not a stream

        def read() -> dict[str, Any]:
            job = self._reader.job(job_id)
            final = job.status.is_final
            stopping = not final and self._reader.cancel_requested(job_id)
            parts: dict[str, Html] = job_parts(job, self._reader.samples(job), stopping=stopping)
            if final or stopping:
                parts["cancel"] = Html("")
            return {"html": parts, "bars": job_bars(job), "say": spoken(job), "final": final}

        return self._streams.respond(job_id, read)

    async def cancel(self, request: Request) -> Response:
        """Ask a job to stop, for those who may."""
        job_id = request.path_params["job_id"]
        form = await _form(request)
        if not self._access.needs_token:
            raise HTTPException(
                403, "This console only reads: start it with a token to cancel jobs."
            )
        if not self._access.may_change(request, f"cancel {job_id}", form.get("key", "")):
            raise HTTPException(403, "That request didn't come from this console's own page.")
        try:
            await run_in_threadpool(self._reader.cancel, job_id)
        except JobNotFoundError:
            raise
        except JobError as error:
            raise HTTPException(409, str(error)) from error
        return RedirectResponse(path("jobs", job_id), 303)

    def _cancel_form(self, job_id: str) -> Child:
        if not self._access.needs_token:
            return None
        key = self._access.form_key(f"cancel {job_id}")
        return tag(
            "form",
            tag("input", type="hidden", name="key", value=key),
            tag(
                "button",
                "Cancel job",
                class_="danger",
                data_confirm="Cancel this job? What is finished stays.",
            ),
            method="post",
            action=path("jobs", job_id, "cancel"),
        )

    # --------------------------------------------------------------------- errors and others

    def errors(self, request: Request) -> Response:
        """Errors in groups."""
        table = request.query_params.get("table") or None
        found = self._reader.errors(table)
        return self._frame.page("Errors", *errors_page(found, table), here="/errors")

    def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        reader = self._reader
        text = metrics_text(reader.tables(), reader.jobs(), reader.known_freshness())
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(text.encode("utf-8", "replace"), headers={"content-type": kind})

    async def login(self, request: Request) -> Response:
        """Ask for the token, and remember a browser that knows it."""
        if not self._access.needs_token:
            return RedirectResponse("/", 303)
        wrong = False
        if request.method == "POST":
            given = (await _form(request)).get("token", "")
            if is_same_origin(request.headers) and self._access.is_token(given):
                answer = RedirectResponse("/", 303)
                name = cookie_name(request.headers)
                answer.set_cookie(name, self._access.session, httponly=True, samesite="strict")
                return answer
            wrong = True
        status = 403 if wrong else 200
        return self._strangers_frame.page("Token", *_login_page(wrong=wrong), status=status)

    async def not_found(self, request: Request, error: Exception) -> Response:
        """A page for what is not there, or is refused."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        message = error.detail if isinstance(error, HTTPException) else str(error)
        title = {403: "Not allowed", 404: "Not found", 409: "Too late"}.get(status, "Not possible")
        back = tag("p", tag("a", "All tables", href="/"))
        headers = dict(getattr(error, "headers", None) or {})
        frame = self._frame if self._access.knows(request.headers) else self._strangers_frame
        page = frame.page(title, heading(title, self._reader.redact(message)), back, status=status)
        page.headers.update(headers)
        return page


def make_app(
    uri: str, storage_options: Mapping[str, str] | None, token: str | None, hosts: Iterable[str]
) -> Starlette:
    """The console of a database as an ASGI application."""
    access = Access(token)
    console = Console(DatabaseReader(uri, storage_options), access)
    return Starlette(
        routes=console.routes(),
        middleware=[Middleware(Guard, access=access, hosts=frozenset(hosts))],
        exception_handlers={
            HTTPException: console.not_found,
            TableNotFoundError: console.not_found,
            JobNotFoundError: console.not_found,
        },
    )


def _login_page(*, wrong: bool) -> list[Child]:
    trouble = tag("p", "That is not the token.", class_="trouble", role="alert") if wrong else None
    field = tag(
        "input", type="password", name="token", required=True, autocomplete="current-password"
    )
    form = tag(
        "form", tag("label", "Token ", field), tag("button", "Open"), method="post", class_="filter"
    )
    return [
        heading("This console wants its token", "It was printed where the console was started."),
        trouble,
        form,
    ]


async def _form(request: Request) -> dict[str, str]:
    """The fields of a small form; a bigger body is refused."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            raise HTTPException(413, "That is more than a form of this console holds.")
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _whole_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS or int(text) > _MAX_ROW:
        raise HTTPException(400, "A row or version is a whole number.")
    return int(text)


def _job_filter(request: Request) -> JobFilter:
    status = request.query_params.get("status", "").upper()
    if status and status not in JobStatus.__members__:
        raise HTTPException(400, f"There is no status {status}.")
    return JobFilter(
        request.query_params.get("table") or None, JobStatus(status) if status else None
    )


def _fits(job: Any, chosen: JobFilter) -> bool:
    return chosen.table in (None, job.table_name) and chosen.status in (None, job.status)
