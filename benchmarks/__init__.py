"""This engine against a plain pylance loop, on the same data: `python -m benchmarks`."""

import geneva as geneva  # before anybody imports lance: it quiets Lance's log
