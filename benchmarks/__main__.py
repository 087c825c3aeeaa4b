"""Time this engine and a plain pylance loop on the same data, and print how they compare."""

from __future__ import annotations

import argparse
import pkgutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import benchmarks
from benchmarks import report
from benchmarks.cases import Bench

FIRST = ("cases", "views", "receipts")


def found(kind: str) -> list:
    """The cases of one kind, of every module here that lists some: a new file needs no other."""
    names = [info.name for info in pkgutil.iter_modules(benchmarks.__path__)]
    names.sort(key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    modules = [import_module(f"benchmarks.{name}") for name in names if name != "__main__"]
    return [case for module in modules for case in getattr(module, kind, ())]


WARM = found("WARM")
"""Cases that run on this process's own warm session."""
EVERY = [*WARM, *found("SEPARATE")]
GROUPS = {"gpu": found("GPU"), "growth": found("GROWTH")}
"""Cases that are run only where they are asked for."""


def main() -> int:
    arguments = parse()
    every = GROUPS[arguments.group] if arguments.group else EVERY
    chosen = [case for case in every if not arguments.only or case.__name__ in arguments.only]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="geneva-bench-") as folder:
        bench = Bench(Path(folder), arguments.scale, arguments.repeat, arguments.quick)
        if any(case in WARM for case in chosen):
            note("warming up")
            bench.warm_up()
        for case in chosen:
            started = time.monotonic()
            outcome = case(bench)
            if outcome is None:
                note(f"{case.__name__}: can't be run here")
                continue
            outcomes.append(outcome)
            wall = f"[{time.monotonic() - started:.0f} s]"
            note("  ".join(filter(None, [*report.cells(outcome), wall])))
    if arguments.json:
        text = report.as_json(outcomes, scale=arguments.scale, repeat=arguments.repeat)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.markdown:
        print(report.markdown(outcomes, arguments.repeat))
    else:
        print(report.text(outcomes))
        print(f"\n{report.machine()}")
    # At another scale the targets mean nothing.
    return int(arguments.scale == 1 and any(outcome.reached is False for outcome in outcomes))


def parse() -> argparse.Namespace:
    names = [case.__name__ for case in (*EVERY, *(c for group in GROUPS.values() for c in group))]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("group", nargs="?", choices=list(GROUPS), help="a group by itself")
    parser.add_argument("--quick", action="store_true", help="once, and no more than targets need")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best one counts")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the numbers of rows")
    parser.add_argument("--only", action="append", choices=names, help="this case (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeat = 1
    return arguments


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
