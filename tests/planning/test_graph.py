"""The order in which a database is brought up to date, and what each step reads."""

from __future__ import annotations

from geneva.planning.graph import Node, Step, steps_of


def table(name: str, groups: str = "", **reads: str) -> Node:
    """A table whose columns read others: `c="a b"`. Columns of `groups` ("x y") go together."""
    together = groups.split()
    return Node(
        table=name,
        reads={column: text.split() for column, text in reads.items()},
        filled_by={c: "together" if c in together else f"{name}.{c}" for c in reads},
    )


def view(name: str, source: str, reads: str = "", **columns: str) -> Node:
    own = table(name, **columns)
    return Node(
        table=name,
        reads=own.reads,
        filled_by=own.filled_by,
        is_view=True,
        source=source,
        source_paths=tuple(reads.split()),
    )


def keys(*nodes: Node) -> list[tuple[str, str | None]]:
    return [step.key for step in steps_of(nodes)]


def inputs(*nodes: Node) -> dict[tuple[str, str | None], tuple[tuple[str, str | None], ...]]:
    return {step.key: step.inputs for step in steps_of(nodes)}


def test_tables_without_anything_computed_have_no_steps() -> None:
    assert steps_of([]) == ()
    assert steps_of([table("t")]) == ()


def test_columns_go_behind_what_they_read() -> None:
    assert keys(table("t", c="b x", b="a", a="x")) == [("t", "a"), ("t", "b"), ("t", "c")]


def test_fields_of_a_computed_struct_are_of_its_column() -> None:
    found = inputs(table("t", b="a.field", a="x"))
    assert found == {("t", "a"): (), ("t", "b"): (("t", "a"),)}


def test_columns_of_one_call_are_one_step() -> None:
    steps = steps_of([table("t", groups="p q", c="q", p="a", q="a", a="x")])
    assert steps == (
        Step("t", ("a",)),
        Step("t", ("p", "q"), (("t", "a"),)),
        Step("t", ("c",), (("t", "p"),)),
    )


def test_views_go_behind_their_sources_whatever_they_are_called() -> None:
    found = keys(view("a", "b"), view("b", "c", own="x"), table("c", y="x"))
    assert found == [("c", "y"), ("b", None), ("b", "own"), ("a", None)]


def test_a_view_waits_for_the_columns_that_it_reads_and_no_others() -> None:
    found = inputs(table("t", y="x", z="x"), view("v", "t", "y id"))
    assert found["v", None] == (("t", "y"),)


def test_a_view_of_a_view_waits_for_its_rows() -> None:
    found = inputs(table("t"), view("v", "t", "id", own="id"), view("w", "v", "own"))
    assert found["v", "own"] == (("v", None),)
    assert found["w", None] == (("v", None), ("v", "own"))


def test_a_view_waits_for_columns_of_one_call_by_whichever_it_reads() -> None:
    found = inputs(table("t", groups="p q", p="x", q="x"), view("v", "t", "q"))
    assert found["v", None] == (("t", "p"),)


def test_a_source_that_is_elsewhere_is_nothing_to_wait_for() -> None:
    assert inputs(view("v", "gone", "x")) == {("v", None): ()}


def test_views_that_are_made_from_each_other_read_nothing_and_all_else_is_in_order() -> None:
    nodes = [view("of_v", "v"), view("v", "w"), view("w", "v"), view("x", "x"), table("t", a="i")]
    found = {step.key: step for step in steps_of(nodes)}
    assert {step.inputs for (table, _), step in found.items() if table in "vwx"} == {()}
    assert found["of_v", None].inputs == (("v", None),)
    assert [*found].index(("v", None)) < [*found].index(("of_v", None))
    assert ("t", "a") in found
