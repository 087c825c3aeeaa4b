"""A job's numbers as pictures: rows per second over time, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geneva.console.layout import facts
from geneva.model.jobs import metric
from geneva.render.html import Html, tag
from geneva.render.text import rate, seconds

_WIDTH, _HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 26
_MAX_STEPS = 40

STAGES = (
    ("read", "read_seconds"),
    ("UDF", "udf_seconds"),
    ("checkpoint", "checkpoint_seconds"),
    ("write", "write_seconds"),
    ("commit", "commit_seconds"),
)
"""What a job's time goes into, and the metric that counts it."""


def throughput(samples: Sequence[Mapping[str, Any]]) -> Html:
    """Rows per second between one sample and the next, as a picture."""
    points = _rates(samples)
    if not points:
        return tag("p", "There is nothing to plot before the first rows are in.", class_="dim")
    end = points[-1][1]
    top = _round_up(max(value for _, _, value in points))
    steps: list[str] = []
    for start, stop, value in points:
        y = _y(value, top)
        steps += [f"{_x(start, end):.1f},{y:.1f}", f"{_x(stop, end):.1f},{y:.1f}"]
    base = _y(0, top)
    area = [f"{_x(points[0][0], end):.1f},{base:.1f}", *steps, f"{_x(end, end):.1f},{base:.1f}"]
    latest = points[-1][2]
    best = max(value for _, _, value in points)
    label = f"Throughput over {seconds(end)}: at most {rate(best)}, {rate(latest)} at the end"
    return tag(
        "svg",
        tag("title", label),
        [_line(top * share, top) for share in (0, 0.5, 1)],
        [_tick(end * share, end) for share in (0, 0.5, 1)],
        tag("polygon", points=" ".join(area), class_="area"),
        tag("polyline", points=" ".join(steps), class_="line"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=label,
        class_="plot",
    )


def stage_times(metrics: Mapping[str, Any]) -> Html:
    """Where the time of all tasks went: a bar of shares, and the numbers."""
    times = [(name, metric(metrics, key)) for name, key in STAGES]
    total = sum(amount for _, amount in times)
    if not total:
        return tag("p", "No task has reported its times yet.", class_="dim")
    bars, at = [], 0.0
    for name, amount in times:
        share = 100 * amount / total
        bars.append(
            tag(
                "rect",
                tag("title", f"{name}: {seconds(amount)}"),
                x=f"{at:.2f}%",
                y=0,
                width=f"{share:.2f}%",
                height=18,
                class_=f"stage-{name.lower()}",
            )
        )
        at += share
    label = ", ".join(f"{name} {100 * amount / total:.0f} %" for name, amount in times)
    legend = [
        (
            name,
            [
                tag("span", class_=f"key key-{name.lower()}", aria_hidden="true"),
                seconds(amount),
                tag("span", f" {100 * amount / total:.0f} %", class_="dim"),
            ],
        )
        for name, amount in times
    ]
    picture = tag(
        "svg", bars, width="100%", height=18, role="img", aria_label=label, class_="stages"
    )
    return tag("div", picture, facts(legend), class_="stage-times")


def _rates(samples: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """From, to, and rows per second: in even steps, so that a burst of reports is no peak."""
    times, rows = [0.0], [0]
    for sample in samples:
        at = metric(sample, "seconds")
        if at > times[-1]:
            times.append(at)
            done = int(max(metric(sample, "udf_rows"), metric(sample, "committed")))
            rows.append(max(done, rows[-1]))
    end = times[-1]
    if not end or not rows[-1]:
        return []
    steps = max(1, min(_MAX_STEPS, len(times) - 1, int(end)))
    edges = np.linspace(0.0, end, steps + 1)
    grown = np.diff(np.interp(edges, times, rows))
    return [
        (float(start), float(stop), float(more / (stop - start)))
        for start, stop, more in zip(edges, edges[1:], grown, strict=False)
    ]


def _x(at: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / end


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _line(value: float, top: float) -> Html:
    y = f"{_y(value, top):.1f}"
    label = _short(value) if top >= 10 else f"{value:.2g}"
    return tag(
        "g",
        tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="axis"),
        tag("text", label, x=_LEFT - 8, y=f"{_y(value, top) + 4:.1f}", text_anchor="end"),
    )


def _tick(at: float, end: float) -> Html:
    anchor = "start" if at == 0 else "end" if at == end else "middle"
    return tag(
        "text",
        seconds(at) if at else "0",
        x=f"{_x(at, end):.1f}",
        y=_HEIGHT - 6,
        text_anchor=anchor,
    )


def _short(value: float) -> str:
    """A number of at most five signs."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * unit or (value >= unit and not value % (unit / 10)):
            return f"{value / unit:g}{name}"
    return f"{value:.0f}"


def _round_up(value: float) -> float:
    """The next number that reads well: 1, 2 or 5 and zeros."""
    scale = 1.0
    while scale * 10 <= value:
        scale *= 10
    while scale > value > 0:
        scale /= 10
    return next((scale * step for step in (1, 2, 5, 10) if scale * step >= value), 1.0)
