"""A worker process serves many jobs and functions: each finds its own surroundings."""

from __future__ import annotations

import gc
import os
import sys
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import geneva
from geneva import Connection, udf
from geneva.errors import UserInputError
from geneva.execution.runner import InProcessRunner
from geneva.execution.worker.program import close_programs
from geneva.execution.worker.surroundings import Surroundings, enter_function, enter_job
from geneva.manifest import GenevaManifest
from geneva.model.tables import Secrets
from geneva.secret_values import names_a_key
from geneva.udf.declare import UDF, deserialize_udf, serialize_udf, udf_digest
from geneva.udf.shipped_modules import activate
from support import connect, make_table
from workshop import Workshop


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    path, before = list(sys.path), set(os.environ)
    yield
    enter_job(Surroundings())
    sys.path[:] = path
    assert set(os.environ) == before


def with_env(**env: str) -> UDF:
    def f(x: int) -> int:
        return x

    return udf(f, env=env)


def test_variables_of_one_job_are_gone_in_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GENEVA_TEST_OWN", "own")
    enter_job(Surroundings(env=Secrets({"GENEVA_TEST_A": "1"}), unset=("GENEVA_TEST_OWN",)))
    assert os.environ["GENEVA_TEST_A"] == "1"
    assert "GENEVA_TEST_OWN" not in os.environ
    enter_job(Surroundings(env=Secrets({"GENEVA_TEST_B": "2"})))
    assert "GENEVA_TEST_A" not in os.environ
    assert (os.environ["GENEVA_TEST_B"], os.environ["GENEVA_TEST_OWN"]) == ("2", "own")
    enter_job(Surroundings())


def test_variables_of_one_function_are_gone_in_the_next():
    enter_job(Surroundings(env=Secrets({"GENEVA_TEST_A": "of the job"}), unset=("GENEVA_TEST_D",)))
    enter_function(with_env(GENEVA_TEST_A="of the function", GENEVA_TEST_B="b", GENEVA_TEST_D="d"))
    assert os.environ["GENEVA_TEST_A"] == "of the function"
    assert os.environ["GENEVA_TEST_B"] == "b"
    assert os.environ["GENEVA_TEST_D"] == "d", "the driver has lost it, the function has not"
    enter_function(with_env(GENEVA_TEST_C="c"))
    assert os.environ["GENEVA_TEST_A"] == "of the job"
    assert "GENEVA_TEST_B" not in os.environ
    assert os.environ["GENEVA_TEST_C"] == "c"


def test_variables_of_a_manifest_are_those_of_its_function():
    manifest = GenevaManifest.create_pip("m").env_vars({"GENEVA_TEST_A": "a", "GENEVA_TEST_B": "b"})

    def f(x: int) -> int:
        return x

    enter_function(udf(f, manifest=manifest.build(), env={"GENEVA_TEST_B": "own"}))
    assert (os.environ["GENEVA_TEST_A"], os.environ["GENEVA_TEST_B"]) == ("a", "own")
    enter_function(with_env())
    assert "GENEVA_TEST_A" not in os.environ


def test_variables_are_stored_with_a_function_and_shown_nowhere():
    function = with_env(GENEVA_TEST_KEY="s3cr3t-value")
    assert "s3cr3t" not in repr(function)
    assert "s3cr3t" not in repr(vars(function))
    assert "s3cr3t" not in str(function.explain_version())
    assert function.version == with_env(GENEVA_TEST_KEY="another").version == with_env().version
    data = serialize_udf(function)
    assert b"s3cr3t" not in data
    assert deserialize_udf(data, udf_digest(data)).env["GENEVA_TEST_KEY"] == "s3cr3t-value"


def test_those_of_a_manifest_are_shown_nowhere_either(local_db: Connection):
    manifest = GenevaManifest.create_pip("m").env_vars({"GENEVA_TEST_KEY": "s3cr3t-value"}).build()

    def f(id: int) -> int:
        return id

    function = udf(f, manifest=manifest)
    assert "s3cr3t" not in repr(function)
    assert "s3cr3t" not in repr(manifest)
    data = serialize_udf(function)
    assert b"s3cr3t" not in data
    assert deserialize_udf(data, udf_digest(data)).manifest == manifest
    table = make_table(local_db, [1])
    table.add_columns({"x": function})
    stored = b"".join(table.to_lance().schema.field("x").metadata.values())
    assert b"s3cr3t" not in stored
    assert b"GENEVA_TEST_KEY" in stored
    with pytest.raises(UserInputError, match=r"'GENEVA_TEST_KEY' .*connect\(env=") as refused:
        local_db.define_manifest("m", manifest)
    assert "s3cr3t" not in str(refused.value)
    assert local_db.list_manifests() == []


@pytest.mark.parametrize(
    ("name", "is_key"),
    [
        ("HF_TOKEN", True),
        ("aws_secret_access_key", True),
        ("DB_PASSWORD", True),
        ("OPENAI_API_KEY", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("SSH_PUBLIC_KEY", False),
        ("OMP_NUM_THREADS", False),
    ],
)
def test_variables_that_are_keys_by_their_names(name: str, *, is_key: bool):
    assert names_a_key(name) is is_key


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A": 12345}, {"A": "a\0b"}])
def test_what_can_be_no_variable_is_refused(env: dict[str, str]):
    with pytest.raises(UserInputError, match="env") as refused:
        with_env(**env)
    assert "12345" not in str(refused.value)


def test_a_worker_imports_what_the_driver_would():
    own = list(sys.path)
    enter_job(Surroundings(path=("/of/the/driver", own[-1])))
    assert sys.path[:2] == ["/of/the/driver", own[-1]]
    assert sorted(sys.path) == sorted(["/of/the/driver", *own])


def test_modules_of_a_function_are_imported_for_each_of_its_surroundings(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also those in a package without an `__init__`; and once for each, not once for each task."""
    imports: list[str] = []
    monkeypatch.setattr("builtins.geneva_imports", imports, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = """
        import builtins, os
        from of_a_job import WORD
        FACTS = " ".join([WORD, os.environ["GENEVA_TEST_A"], os.environ["GENEVA_TEST_B"]])
        builtins.geneva_imports.append(FACTS)
    """
    workshop.write("spread_here.configured", source)
    function = "def f(x):\n    from spread_here import configured\n    return configured.FACTS\n"

    def arrived(value: str) -> UDF:
        declared = udf(
            workshop.load(function, f"of_{value}").f,
            data_type=pa.string(),
            input_columns=["x"],
            env={"GENEVA_TEST_A": value},
        )
        data = serialize_udf(declared)
        return deserialize_udf(data, udf_digest(data))

    functions = {value: arrived(value) for value in ("a", "b")}
    for _ in range(2):
        for word, key in (("one", "k"), ("one", "other"), ("two", "k")):
            files = {"of_a_job.py": f"WORD = {word!r}\n"}
            name = archive(tmp_path, f"of-surroundings-{word}.zip", files)
            enter_job(Surroundings(modules=(name,), env=Secrets({"GENEVA_TEST_B": key})))
            for value, each in functions.items():
                enter_function(each)
                assert each(1) == f"{word} {value} {key}"
    assert len(imports) == len(set(imports)) == 6
    activate(())
    assert "spread_here.configured" not in sys.modules


def archive(folder: Path, name: str, files: dict[str, str]) -> str:
    with zipfile.ZipFile(folder / name, "w") as target:
        for file, source in files.items():
            target.writestr(file, source)
    return name


def test_modules_of_one_job_are_not_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also those of packages, with and without an `__init__`; each is imported once."""
    monkeypatch.syspath_prepend(str(tmp_path))
    counted = "import builtins\nbuiltins.geneva_imports.append({word!r})\nWORD = {word!r}\n"
    imports: list[str] = []
    monkeypatch.setattr("builtins.geneva_imports", imports, raising=False)
    archives = [
        archive(
            tmp_path,
            f"{word}.zip",
            {
                "of_a_job.py": counted.format(word=word),
                "package_of_a_job/__init__.py": "from package_of_a_job.inner import WORD\n",
                "package_of_a_job/inner.py": f"WORD = {word!r}\n",
                "space_of_a_job/": "",
                "space_of_a_job/part.py": f"WORD = {word!r}\n",
            },
        )
        for word in ("one", "two")
    ]

    def words() -> set[str]:
        import of_a_job  # type: ignore[import-not-found]
        import package_of_a_job  # type: ignore[import-not-found]
        import space_of_a_job.part  # type: ignore[import-not-found]

        return {of_a_job.WORD, package_of_a_job.inner.WORD, space_of_a_job.part.WORD}

    path = list(sys.path)
    for _ in range(2):
        for word, name in zip(("one", "two"), archives, strict=True):
            enter_job(Surroundings(modules=(name,)))
            assert words() == {word}
    assert imports == ["one", "two"]
    enter_job(Surroundings(modules=(archives[1], archives[0])))
    assert words() == {"two"}, "the first one that has it"
    enter_job(Surroundings())
    assert sys.path == path
    with pytest.raises(ModuleNotFoundError):
        words()


def test_modules_of_a_job_are_imported_for_each_set_of_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    read = {"reads_a_key.py": "import os\nKEY = os.environ.get('GENEVA_TEST_KEY')\n"}
    name = archive(tmp_path, "reads.zip", read)

    def key_of(env: dict[str, str]) -> tuple[str | None, int]:
        enter_job(Surroundings(modules=(name,), env=Secrets(env)))
        import reads_a_key  # type: ignore[import-not-found]

        return reads_a_key.KEY, id(reads_a_key)

    one, other, none = (
        key_of(env) for env in ({"GENEVA_TEST_KEY": "a"}, {"GENEVA_TEST_KEY": "b"}, {})
    )
    assert (one[0], other[0], none[0]) == ("a", "b", None)
    assert key_of({}) == none, "imported once"


def test_modules_of_a_job_count_where_the_worker_has_loaded_others_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those of its own path are there again afterwards, the very same ones."""
    own, sent = tmp_path / "own", tmp_path / "sent"
    for name in ("helped/__init__.py", "helped/inner.py", "helped_space/a.py", "helped_space/b.py"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("WORD = 'own'\n")
    sent.mkdir()
    word = "WORD = 'sent'\n"
    files = ("helped.py", "helped_space/a.py", "re.py")
    first = {"helped_space/": "", **dict.fromkeys(files, word)}
    names = [
        archive(sent, "helped-1.zip", first),
        archive(sent, "helped-2.zip", {"helped/__init__.py": word, "helped/inner.py": word}),
    ]
    monkeypatch.syspath_prepend(str(sent))
    monkeypatch.syspath_prepend(str(own))

    def loaded() -> tuple[str, ...]:
        import re

        import helped  # type: ignore[import-not-found]
        import helped_space.a  # type: ignore[import-not-found]
        import helped_space.b

        assert re.compile is not None, "a new worker has it before its first job, too"
        return helped.WORD, helped_space.a.WORD, helped_space.b.WORD

    def inner() -> str:
        from helped import inner  # type: ignore[import-not-found]

        return str(inner.WORD)

    enter_job(Surroundings())
    assert (*loaded(), inner()) == ("own",) * 4
    before = {name: sys.modules[name] for name in sys.modules if name.startswith("helped")}
    for _ in range(2):
        enter_job(Surroundings(modules=(names[0],)))
        assert loaded() == ("sent", "sent", "own")
        with pytest.raises(ImportError):
            inner()
        enter_job(Surroundings(modules=(names[1],)))
        assert (*loaded(), inner()) == ("sent", "own", "own", "sent")
        enter_job(Surroundings())
        assert (*loaded(), inner()) == ("own",) * 4
        assert {name: sys.modules[name] for name in before} == before


def test_what_came_with_a_function_is_not_taken_for_the_workers_own(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    workshop.write("both_have", "WORD = 'function'\n")
    function = "def f(x):\n    import both_have\n    return both_have.WORD\n"
    declared = udf(workshop.load(function).f, data_type=pa.string(), input_columns=["x"])
    data = serialize_udf(declared)
    sys.modules.pop("both_have", None)
    arrived = deserialize_udf(data, udf_digest(data))
    name = archive(tmp_path, "both.zip", {"both_have.py": "WORD = 'job'\n"})
    for _ in range(2):
        enter_job(Surroundings())
        enter_function(arrived)
        assert arrived(1) == "function"
        enter_job(Surroundings(modules=(name,)))
        enter_function(with_env())
        import both_have  # type: ignore[import-not-found]

        assert both_have.WORD == "job"
    enter_job(Surroundings())
    assert "both_have" not in sys.modules


MODEL = """
import os
from functools import cache

@cache
def client():
    return os.environ.get("GENEVA_TEST_KEY")

class Model:
    def __init__(self, log):
        self.log = log
    def setup(self):
        self.key = os.environ.get("GENEVA_TEST_KEY")
        self.note("setup")
    def close(self):
        self.note("close")
    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what} {self.key}\\n")
    def __call__(self, id: int) -> str:
        import keeper
        self.note("call")
        return f"{self.key} {client()} {keeper.key}"
"""


def test_what_was_made_with_other_variables_is_made_anew(
    tmp_path: Path, workshop: Workshop
) -> None:
    """A worker goes on with another job: models, clients, and those of modules that came along."""
    workshop.write("keeper", "import os\nkey = os.environ.get('GENEVA_TEST_KEY')\n")
    model, log = workshop.load(MODEL).Model, tmp_path / "log"
    close_programs()
    table = make_table(connect(tmp_path / "db", InProcessRunner), [1])
    table.add_columns({"made": udf(model)(str(log))})
    seen = []
    for key in ("a", "a", "b", None):
        env = {} if key is None else {"GENEVA_TEST_KEY": key}
        enter_job(Surroundings(env=Secrets(env)))
        table.backfill("made", where="id >= 0")
        seen += table.to_arrow()["made"].to_pylist()
    enter_job(Surroundings())
    close_programs()
    assert seen == ["a a a", "a a a", "b b b", "None None None"]
    assert log.read_text().splitlines() == [
        *("setup a", "call a", "call a", "close a"),
        *("setup b", "call b", "close b"),
        *("setup None", "call None", "close None"),
    ]


HOLDS_A_MODEL = """
import builtins, weakref
class Model: pass
MODEL = Model()
builtins.geneva_models.append(weakref.ref(MODEL))
"""


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[object]]:
    made: list[weakref.ref[object]] = []
    monkeypatch.setattr("builtins.geneva_models", made, raising=False)
    return made


@pytest.mark.parametrize("comes_with", ["the function", "the job"])
def test_modules_of_jobs_with_other_variables_are_let_go(
    tmp_path: Path,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    models: list[weakref.ref[object]],
    comes_with: str,
):
    """With the models that they hold, also those that were frozen."""
    names: tuple[str, ...] = ()
    if comes_with == "the job":
        monkeypatch.syspath_prepend(str(tmp_path))
        names = (archive(tmp_path, "holds.zip", {"holds_a_model.py": HOLDS_A_MODEL}),)
    else:
        workshop.write("holds_a_model", HOLDS_A_MODEL)
    function = "def f(id: int) -> str:\n    import holds_a_model\n    return 'x'\n"
    close_programs()
    table = make_table(connect(tmp_path / "db", InProcessRunner), [1])
    table.add_columns({"made": udf(workshop.load(function).f)})
    for key in ("a", "a", "b", "b"):
        enter_job(Surroundings(modules=names, env=Secrets({"GENEVA_TEST_KEY": key})))
        table.backfill("made", where="id >= 0")
        gc.freeze()
    assert [model() is None for model in models] == [True, False]
    enter_job(Surroundings())
    close_programs()


def test_modules_of_few_jobs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: list[weakref.ref[object]]
):
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in range(20):
        name = archive(tmp_path, f"held-{number}.zip", {"held_by_a_job.py": HOLDS_A_MODEL})
        enter_job(Surroundings(modules=(name,)))
        import held_by_a_job  # type: ignore[import-not-found]

        del held_by_a_job
    enter_job(Surroundings())
    gc.collect()
    assert [number for number, model in enumerate(models) if model()] == list(range(12, 20))


def test_values_are_verified_with_the_variables_of_their_connection(tmp_path: Path) -> None:
    class Model:
        def setup(self) -> None:
            self.key = os.environ.get("GENEVA_TEST_KEY")

        def __call__(self, id: int) -> str:
            return f"{self.key}"

    close_programs()
    enter_job(Surroundings(env=Secrets({"GENEVA_TEST_KEY": "a"})))
    table = make_table(connect(tmp_path / "db", InProcessRunner), [1])
    table.add_columns({"made": udf(Model)()})
    table.backfill("made")
    enter_job(Surroundings())
    for key, is_right in (("a", True), ("b", False)):
        db = geneva.connect(tmp_path / "db", runner=InProcessRunner, env={"GENEVA_TEST_KEY": key})
        assert db.open_table("t").verify("made", run=True).ok is is_right
    close_programs()


def test_an_object_that_can_not_be_closed_is_no_reason_to_keep_the_others(tmp_path: Path) -> None:
    class Model:
        def setup(self) -> None:
            self.key = os.environ.get("GENEVA_TEST_KEY")

        def __call__(self, id: int) -> str:
            return f"{self.key}"

        def close(self) -> None:
            raise ValueError("no")

    class Other(Model):
        pass

    close_programs()
    table = make_table(connect(tmp_path / "db", InProcessRunner), [1])
    table.add_columns({"a": udf(Model)(), "b": udf(Other)()})
    for key in ("one", "two"):
        enter_job(Surroundings(env=Secrets({"GENEVA_TEST_KEY": key})))
        for name in ("a", "b"):
            table.backfill(name, where="id >= 0")
            assert table.to_arrow()[name].to_pylist() == [key]
    enter_job(Surroundings())
    close_programs()
