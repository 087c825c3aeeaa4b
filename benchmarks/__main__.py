"""Time this engine and a plain pylance loop on the same data, and print how they compare."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import api_calls, cases, receipts, report, views
from benchmarks.cases import Bench

WARM = (*cases.WARM, *views.WARM, *receipts.WARM, *frames.WARM, *api_calls.WARM)
EVERY = (*WARM, *cases.SEPARATE, *views.SEPARATE)


def main() -> int:
    arguments = parse()
    chosen = [case for case in EVERY if not arguments.only or case.__name__ in arguments.only]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="geneva-bench-") as folder:
        bench = Bench(Path(folder), arguments.scale, arguments.repeat)
        if any(case in WARM for case in chosen):
            note("warming up")
            bench.warm_up()
        for case in chosen:
            outcome = case(bench)
            outcomes.append(outcome)
            note("  ".join(filter(None, report.cells(outcome))))
    if arguments.json:
        text = report.as_json(outcomes, scale=arguments.scale, repeat=arguments.repeat)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.markdown:
        print(report.markdown(outcomes, arguments.repeat))
    else:
        print(report.text(outcomes))
        print(f"\n{report.machine()}")
    return 0


def parse() -> argparse.Namespace:
    names = [case.__name__ for case in EVERY]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best one counts")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the numbers of rows")
    parser.add_argument("--only", action="append", choices=names, help="this case (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README")
    return parser.parse_args()


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
