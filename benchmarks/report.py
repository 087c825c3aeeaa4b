"""Outcomes as a table for people, as Markdown for the README, and as JSON for machines."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata

from benchmarks.cases import Outcome
from geneva.spark.embedded.settings import available_cores

HEADINGS = ("case", "Geneva", "reference", "ratio", "target", "reached")


def machine() -> str:
    """What was measured on, without saying which machine it is."""
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("pyspark", "pylance", "pyarrow"))
    return f"{available_cores()} cores, Python {platform.python_version()}, {versions}"


def cells(outcome: Outcome) -> tuple[str, ...]:
    ideal = outcome.ratio_to_ideal
    ratio = outcome.ratio_to_loop
    of_alone = outcome.target is not None and outcome.target.of == "alone"
    ratios = [f"{1 / ratio:.2f} of it" if of_alone else f"{ratio:.2f}x"] if ratio else []
    unit = outcome.target.unit if outcome.target is not None else "s"
    if ideal is not None:
        of_waits = outcome.target is not None and outcome.target.of == "waits"
        than = "waits / calls at once" if of_waits else "UDF time / cores"
        ratios.append(f"{ideal:.3f}x {than}")
    return (
        outcome.title,
        _amount(outcome.seconds, unit),
        _amount(outcome.loop_seconds, unit),
        ", ".join(ratios),
        "" if outcome.target is None else str(outcome.target),
        {True: "yes", False: "no", None: ""}[outcome.reached],
    )


def text(outcomes: Sequence[Outcome]) -> str:
    rows = [HEADINGS, *map(cells, outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown(outcomes: Sequence[Outcome], repeat: int) -> str:
    rows = [HEADINGS, ("---", "---:", "---:", "---:", "---", "---"), *map(cells, outcomes)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    best = f"best of {repeat}" if repeat > 1 else "single runs"
    return f"{table}\n\nMeasured with `python -m benchmarks` on {machine()}; {best}."


def as_json(outcomes: Sequence[Outcome], *, scale: float, repeat: int) -> str:
    records = [
        {
            **asdict(outcome),
            "seconds": outcome.seconds,
            "loop_seconds": outcome.loop_seconds,
            "ratio_to_loop": outcome.ratio_to_loop,
            "ratio_to_ideal": outcome.ratio_to_ideal,
            "reached": outcome.reached,
        }
        for outcome in outcomes
    ]
    whole = {"machine": machine(), "scale": scale, "repeat": repeat, "outcomes": records}
    return json.dumps(whole, indent=2)


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    decimals = 3 if value < 1 else 2 if unit in ("s", "exponent") else 0
    return f"{value:.{decimals}f} {unit}"
