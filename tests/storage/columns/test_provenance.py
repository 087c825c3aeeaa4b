"""What a data file says of itself: in its name, and in full in its metadata."""

from __future__ import annotations

import re
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geneva import Connection
from geneva.model.rows import RowSet
from geneva.model.tables import TableRef
from geneva.storage.columns.provenance import (
    Provenance,
    input_signature,
    named,
    parse_file_name,
    read_provenance,
)
from geneva.storage.lance.dataset import FileFacts, FragmentFacts
from support import Calls, make_table, tripled

ROW_SETS = st.builds(
    lambda size, seed: RowSet.from_mask(np.random.default_rng(seed).random(size) < 0.5),
    st.integers(0, 50),
    st.integers(0, 1_000),
)
PROVENANCES = st.builds(Provenance, st.text(), st.text(), st.lists(st.text()).map(tuple), ROW_SETS)


@given(PROVENANCES)
def test_text_round_trip(provenance: Provenance) -> None:
    assert Provenance.from_text(provenance.to_text()) == provenance


@given(PROVENANCES, st.booleans())
def test_a_name_tells_the_same_as_its_provenance(provenance: Provenance, complete: bool) -> None:
    name = provenance.file_name(complete=complete)
    assert re.fullmatch(r"[a-z0-9.-]{1,120}", name)
    found = parse_file_name(name)
    assert found is not None
    assert found.complete == complete
    wanted = named(provenance.column_uuid, provenance.udf_version, provenance.inputs)
    assert (found.column, found.udf, found.inputs) == (wanted.column, wanted.udf, wanted.inputs)
    assert name != provenance.file_name(complete=complete), "every staged file is a new one"


@given(PROVENANCES, PROVENANCES)
def test_different_work_has_different_names(one: Provenance, other: Provenance) -> None:
    same = (one.column_uuid, one.udf_version, one.inputs) == (
        other.column_uuid,
        other.udf_version,
        other.inputs,
    )
    names = [named(p.column_uuid, p.udf_version, p.inputs) for p in (one, other)]
    assert (names[0] == names[1]) == same


@given(st.text())
def test_other_names_are_not_ours(name: str) -> None:
    assert parse_file_name(name) is None
    assert parse_file_name(f"{name}.lance") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "3", '{"column": 1}', '"x"'])
def test_text_that_is_no_provenance(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Provenance.from_text(text)


def _file(path: str, *fields: int) -> FileFacts:
    return FileFacts(path, frozenset(fields), 1)


def test_a_signature_knows_files_fields_and_the_order_of_inputs() -> None:
    files = (_file("a.lance", 0, 1), _file("b.lance", 2))
    fragment = FragmentFacts(0, 10, 0, files)
    one = input_signature(fragment, [(0,), (2,)])
    assert one != input_signature(fragment, [(2,), (0,)])
    assert one != input_signature(fragment, [(1,), (2,)])
    replaced = FragmentFacts(0, 10, 0, (_file("c.lance", 0, 1), files[1]))
    assert one != input_signature(replaced, [(0,), (2,)])
    others_changed = FragmentFacts(0, 10, 3, (*files, _file("d.lance", 3)))
    assert one == input_signature(others_changed, [(0,), (2,)])


class TestInATable:
    def test_the_committed_file_tells_who_made_it_of_what(
        self, local_db: Connection, calls: Calls
    ) -> None:
        table = make_table(local_db, [4])
        table.add_columns({"x": tripled(calls)})
        table.backfill("x", where="id = 2")
        definition = table.computed_columns()["x"]
        part = self.own_file(table.ref)
        provenance = read_provenance(table.ref, part)
        assert provenance is not None
        assert provenance.column_uuid == definition.uuid
        assert provenance.udf_version == definition.udf_version
        assert provenance.valid.offsets().tolist() == [2]
        name = parse_file_name(part)
        assert name is not None
        assert not name.complete
        table.backfill("x")
        full = self.own_file(table.ref)
        name = parse_file_name(full)
        assert name is not None
        assert name.complete
        provenance = read_provenance(table.ref, full)
        assert provenance is not None
        assert provenance.valid.is_full
        assert calls.rows == [0, 1, 2, 3]

    @staticmethod
    def own_file(ref: TableRef) -> str:
        (fragment,) = lance.dataset(ref.uri).get_fragments()
        return str(fragment.metadata.files[-1].path)

    def test_what_is_not_there_or_not_ours_has_none(self, tmp_path: Path) -> None:
        ref = TableRef("t", str(tmp_path / "t.lance"))
        assert read_provenance(ref, "gone.lance") is None
        lance.write_dataset(pa.table({"a": [1]}), ref.uri)
        (own,) = (tmp_path / "t.lance" / "data").iterdir()
        assert read_provenance(ref, own.name) is None
        (tmp_path / "t.lance" / "data" / "text.lance").write_text("hello")
        assert read_provenance(ref, "text.lance") is None
