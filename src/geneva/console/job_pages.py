"""Pages of jobs: the list with its filter, and one job as it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geneva.console.layout import badge, card, cut, facts, grid, heading, moment, nothing, path, row
from geneva.console.plots import stage_times, throughput
from geneva.model.jobs import JobStatus, filled_by_job, metric
from geneva.render.html import Child, Html, tag
from geneva.render.text import count, rate, seconds, size
from geneva.storage.jobs.events import JobEvent
from geneva.storage.jobs.output import TaskOutput
from geneva.storage.jobs.records import JobRecord, without_repeats

STATES = (
    ("checkpointed", "Checkpointed", "computed, and safe from a crash"),
    ("ready_to_commit", "Ready to commit", "in complete fragments"),
    ("committed", "Committed", "visible in the table"),
)
MAX_LISTED = 200
_MAX_EVENTS = 50
_MAX_OUTPUTS = 20


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list."""

    table: str | None = None
    status: JobStatus | None = None


def jobs_page(jobs: Sequence[JobRecord], chosen: JobFilter, tables: Sequence[str]) -> list[Child]:
    """The jobs, newest first."""
    stream = path("jobs", "stream", table=chosen.table, status=chosen.status)
    listed = tag("div", job_list(jobs, chosen), id="jobs", data_stream=stream)
    under = "Backfills and refreshes, newest first. The list follows running jobs by itself."
    return [heading("Jobs", under), _filter_form(chosen, tables), listed]


def job_list(jobs: Sequence[JobRecord], chosen: JobFilter) -> Html:
    """The table of jobs."""
    if not jobs:
        if chosen != JobFilter():
            return nothing("No job is like that.", tag("a", "Show all jobs", href="/jobs"))
        return nothing(
            "No job has run yet.", "A backfill or refresh shows here as soon as it starts."
        )
    labels = ("Status", "Table", "Column", "Progress", "Rows/s", "Took", "Started")
    listed = without_repeats(jobs)
    rows = [_job_row(job, repeats, labels) for job, repeats in listed[:MAX_LISTED]]
    more = len(listed) - MAX_LISTED
    note = tag("p", f"{count(more, 'older job')} not shown.", class_="dim") if more > 0 else None
    return tag("div", grid("Jobs", ("Job", *labels), rows), note)


def _job_row(job: JobRecord, repeats: int, labels: Sequence[str]) -> Html:
    link = tag(
        "a",
        tag("code", job.job_id[:8]),
        href=path("jobs", job.job_id),
        aria_label=f"Job {job.job_id[:8]}",
    )
    took = metric(job.metrics, "seconds")
    return row(
        [link, tag("span", job.job_type.lower(), class_="dim small block")],
        [badge(job.status), _waiting(job)],
        tag("a", cut(job.table_name, 60), href=path("tables", job.table_name)),
        tag("code", cut(job.column_name, 60)),
        tag("span", _progress(job, repeats), class_="nowrap"),
        tag("span", f"{metric(job.metrics, 'rows_per_second'):,.0f}", class_="number"),
        seconds(took) if took else "-",
        moment(job.created_at),
        labels=labels,
    )


def _progress(job: JobRecord, repeats: int) -> list[Child]:
    """A bar of what is safe: committed, or of a job that is not done checkpointed."""
    if job.had_nothing_to_do:
        again = f", {count(repeats, 'more time')}" if repeats else ""
        return [tag("span", f"nothing to do{again}", class_="dim")]
    done, total = job.rows_done
    share = f"{_percent(done, total)} %"
    what = "committed" if job.status is JobStatus.DONE else "checkpointed"
    label = f"{what} {share}"
    bar = tag("progress", value=min(done, total), max=max(1, total), aria_label=label)
    return [bar, " ", tag("span", share, title=f"{done:,} of {count(total, 'row')} {what}")]


def _waiting(job: JobRecord) -> Child:
    if not job.waiting_for:
        return None
    link = tag("a", job.waiting_for[:8], href=path("jobs", job.waiting_for))
    return tag("span", " waiting for ", link, class_="dim small")


def _filter_form(chosen: JobFilter, tables: Sequence[str]) -> Html:
    def option(value: str, text: str, *, selected: bool) -> Html:
        return tag("option", text, value=value, selected=selected)

    statuses = [option("", "any status", selected=chosen.status is None)]
    statuses += [option(s.value, s.value.lower(), selected=chosen.status is s) for s in JobStatus]
    names = [option("", "any table", selected=chosen.table is None)]
    names += [option(name, name, selected=chosen.table == name) for name in tables]
    return tag(
        "form",
        tag("label", "Status ", tag("select", statuses, name="status")),
        tag("label", "Table ", tag("select", names, name="table")),
        tag("button", "Filter"),
        action="/jobs",
        class_="filter",
        role="search",
        aria_label="Filter jobs",
    )


# --------------------------------------------------------------------------------------- one job


def job_page(
    job: JobRecord,
    samples: Sequence[Mapping[str, Any]],
    cancel_form: Child,
    *,
    stopping: bool,
    output: Sequence[TaskOutput] = (),
) -> list[Child]:
    """A job: bars, plot, stage times, events. All of it goes on by itself while the job runs."""
    parts = job_parts(job, samples, stopping=stopping)
    stream = None if job.status.is_final else path("jobs", job.job_id, "stream")
    what = f"{job.job_type.capitalize()} of {filled_by_job(job.table_name, job.column_name)}"
    under = [
        "Table ",
        tag("a", job.table_name, href=path("tables", job.table_name)),
        " · started ",
        moment(job.created_at),
    ]
    bars = [_bar(key, name, what_, job.metrics) for key, name, what_ in STATES]
    say = tag("p", spoken(job), id="say", role="status", class_="quiet")
    return [
        heading(
            [what, " ", tag("span", parts["status"], id="status")],
            *under,
            crumbs=(("Jobs", "/jobs"),),
        ),
        tag("div", parts["trouble"], id="trouble"),
        card(
            "Progress",
            bars,
            say,
            note=tag("span", parts["pace"], id="pace", class_="dim"),
            id="progress",
        ),
        tag("div", cancel_form, id="cancel"),
        tag(
            "div",
            card("Throughput", tag("div", parts["plot"], id="plot"), note=_dim("rows per second")),
            card(
                "Stage times", tag("div", parts["stages"], id="stages"), note=_dim("over all tasks")
            ),
            class_="pair",
        ),
        card("Facts", tag("div", parts["facts"], id="facts")),
        card("Events", tag("div", parts["events"], id="events")),
        _output(output),
        tag("div", data_stream=stream, hidden=True) if stream else None,
    ]


def _output(output: Sequence[TaskOutput]) -> Child:
    """What tasks printed, the newest first."""
    if not output:
        return None
    shown = [
        [tag("p", each.task, class_="dim"), tag("pre", str(each), tabindex="0")]
        for each in output[: -_MAX_OUTPUTS - 1 : -1]
    ]
    older = len(output) - len(shown)
    note = f"{count(older, 'older task')} not shown" if older else "what its functions printed"
    return card("Output", *shown, note=_dim(note), id="output")


def job_parts(
    job: JobRecord, samples: Sequence[Mapping[str, Any]], *, stopping: bool = False
) -> dict[str, Html]:
    """The parts of a job's page that change while it runs, by the id of their element."""
    return {
        "status": _status(job, stopping=stopping),
        "trouble": _trouble(job),
        "pace": tag("span", _pace(job)),
        "plot": throughput(samples),
        "stages": stage_times(job.metrics),
        "facts": _facts(job),
        "events": _events(job.events),
        **{f"{key}-text": _bar_text(key, job.metrics) for key, _, _ in STATES},
    }


def job_bars(job: JobRecord) -> dict[str, tuple[int, int]]:
    """Value and end of each bar, by the id of its element."""
    total = _number(job.metrics, "total")
    return {
        f"{key}-bar": (min(_number(job.metrics, key), total), max(1, total)) for key, _, _ in STATES
    }


def spoken(job: JobRecord) -> str:
    """What a screen reader says: in steps of ten, so that it is not talking all the time."""
    if job.status.is_final:
        return f"The job is {job.status.value.lower()}."
    total = _number(job.metrics, "total")
    return f"{_percent(_number(job.metrics, 'committed'), total) // 10 * 10} % committed."


def _bar(key: str, name: str, what: str, metrics: Mapping[str, Any]) -> Html:
    total = _number(metrics, "total")
    value = min(_number(metrics, key), total)
    return tag(
        "div",
        tag("label", name, tag("span", f" {what}", class_="dim small"), for_=f"{key}-bar"),
        tag("span", _bar_text(key, metrics), id=f"{key}-text", class_="number"),
        tag("progress", id=f"{key}-bar", value=value, max=max(1, total), class_=f"big {key}"),
        class_="bar",
    )


def _bar_text(key: str, metrics: Mapping[str, Any]) -> Html:
    total, value = _number(metrics, "total"), _number(metrics, key)
    share = tag("strong", f"{_percent(value, total)} %")
    return tag("span", share, tag("span", f" {value:,} of {total:,}", class_="dim"))


def _status(job: JobRecord, *, stopping: bool) -> Html:
    asked = tag("span", " cancel requested", class_="dim small") if stopping else None
    return tag("span", badge(job.status), _waiting(job), asked)


def _trouble(job: JobRecord) -> Html:
    if job.error is None:
        return Html("")
    link = tag("a", "See all errors of this table", href=path("errors", table=job.table_name))
    return tag("div", tag("h2", "Error"), tag("pre", cut(job.error, 4000)), link, class_="alarm")


def _pace(job: JobRecord) -> str:
    speed = metric(job.metrics, "rows_per_second")
    parts = [rate(speed)] if speed else []
    if not job.status.is_final and (left := _eta(job.metrics)) is not None:
        parts.append(f"about {seconds(left)} left")
    return " · ".join(parts)


def _eta(metrics: Mapping[str, Any]) -> float | None:
    if isinstance(metrics.get("eta_seconds"), int | float):
        return float(metrics["eta_seconds"])
    spent, total = metric(metrics, "seconds"), _number(metrics, "total")
    done = max(_number(metrics, "checkpointed"), _number(metrics, "committed"))
    return spent * (total - done) / done if done and spent else None


def _facts(job: JobRecord) -> Html:
    m = job.metrics
    pairs: list[tuple[str, Child]] = [
        ("Job", tag("code", job.job_id)),
        ("Took" if job.status.is_final else "Runs for", seconds(metric(m, "seconds"))),
        ("UDF called for", count(_number(m, "udf_rows"), "row")),
        ("Reused", count(_number(m, "reused_rows"), "row")),
        ("Skipped", f"{count(_number(m, 'skipped_rows'), 'row')} that needed nothing"),
        (
            "Fragments",
            f"{_number(m, 'fragments_committed'):,} of {_number(m, 'fragments'):,} committed",
        ),
        ("Commits", f"{_number(m, 'commits'):,}"),
        ("Tasks", f"{_number(m, 'tasks'):,} in {count(_number(m, 'rounds'), 'round')}"),
    ]
    pairs += [(name.capitalize(), f"{_number(m, key):,}") for name, key in _EXTRA if m.get(key)]
    pairs += _worker_facts(m)
    if job.driver:
        driver = f"{job.driver.get('host', '?')}, process {job.driver.get('pid', '?')}"
        pairs.append(("Driver", driver))
    for name, value in job.config.items():
        if value is not None:
            shown = tag("code", cut(str(value), 200))
            pairs.append((name.replace("_", " ").capitalize().replace("Udf", "UDF"), shown))
    return facts(pairs)


def _worker_facts(m: Mapping[str, Any]) -> list[tuple[str, Child]]:
    if not metric(m, "worker_seconds"):
        return []
    rate_ = metric(m, "checkpoints_per_second")
    mean, longest = metric(m, "fragment_seconds"), metric(m, "max_fragment_seconds")
    return [
        ("Checkpoints", f"{_number(m, 'checkpoints'):,}, {rate_:,.2f} per second"),
        ("Workers busy", f"{metric(m, 'worker_utilization'):.0%} of {_number(m, 'slots')} slots"),
        ("Memory of a worker", f"up to {size(_number(m, 'worker_memory_bytes'))}"),
        ("Time of a fragment", f"{seconds(mean)}, at most {seconds(longest)}"),
    ]


_EXTRA = (
    ("failed rows", "failed_rows"),
    ("skipped rows", "skipped_rows"),
    ("retries", "retries"),
    ("worker deaths", "worker_deaths"),
)


def _events(events: Sequence[JobEvent]) -> Html:
    rows = [
        row(
            tag("time", f"{e.at:%H:%M:%S}", datetime=e.at.isoformat()),
            e.kind,
            _event_text(e),
            labels=("Event", "What"),
        )
        for e in reversed(events[-_MAX_EVENTS:])
    ]
    return grid("Events of the job, newest first", ("Time (UTC)", "Event", "What"), rows)


def _event_text(event: JobEvent) -> str:
    payload = event.payload
    metrics = payload.get("metrics")
    text = str(payload.get("status", "")).lower()
    if event.kind == "committed" and isinstance(metrics, dict):
        rows, total = _number(metrics, "committed"), _number(metrics, "total")
        text = (
            f"{rows:,} of {count(total, 'row')} in {count(_number(metrics, 'commits'), 'commit')}"
        )
    elif event.kind == "created":
        filled = filled_by_job(str(payload.get("table", "")), str(payload.get("column", "")))
        text = f"{str(payload.get('type', '')).lower()} of {filled}"
    elif not text:
        text = str(payload.get("message", ""))
    return cut(text, 300)


def _number(metrics: Mapping[str, Any], key: str) -> int:
    return int(metric(metrics, key))


def _percent(done: int, total: int) -> int:
    return 100 if done >= total > 0 else 100 * done // total if total else 0


def _dim(text: str) -> Html:
    return tag("span", text, class_="dim small")
