"""Settings, read once at the edge and passed down: nothing below reads the environment."""

from __future__ import annotations

import gc
import getpass
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from geneva.compatibility import warn_compatibility
from geneva.errors import UserInputError


@dataclass(frozen=True, slots=True)
class Settings:
    """How a connection works."""

    local_slots: int | None = None
    """Tasks at once on the embedded Spark (GENEVA_LOCAL_SLOTS); None: one per core."""
    local_gpus: int | None = None
    """GPUs of this machine that jobs on a local Spark share (GENEVA_LOCAL_GPUS); None: all."""
    version_conflict_max_retries: int = 10
    """Rounds without progress before a job gives up on a table that keeps changing."""
    jvm_archive: bool = True
    """Whether a class archive may be kept in the user's cache folder to start Spark faster."""
    progress: bool | None = None
    """Show progress bars: yes, no, or None: when the output is a terminal or a notebook."""
    spark_ui: bool = False
    """Serve the web pages of the embedded Spark, on this machine only (GENEVA_SPARK_UI)."""
    trust: str = "all"
    """Which stored functions may run (GENEVA_TRUST): "all" or "signed"."""
    signing_key: str | None = field(default=None, repr=False)
    """The key to sign functions with, or its file (GENEVA_SIGNING_KEY)."""
    trusted_keys: str | None = field(default=None, repr=False)
    """Keys whose functions may run, or their file (GENEVA_TRUSTED_KEYS)."""
    accepted_file: Path | None = None
    """The list of functions that were accepted on this machine (GENEVA_ACCEPTED_FUNCTIONS)."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from environment variables."""
        env = os.environ if environment is None else environment
        return cls(
            local_slots=_integer(env, "GENEVA_LOCAL_SLOTS", None, minimum=1),
            local_gpus=_integer(env, "GENEVA_LOCAL_GPUS", None, minimum=0),
            version_conflict_max_retries=_integer(
                env, "GENEVA_VERSION_CONFLICT_MAX_RETRIES", 10, minimum=0
            )
            or 0,
            jvm_archive=env.get("GENEVA_JVM_ARCHIVE", "1") not in ("0", "false", "no"),
            progress=_flag(env, "GENEVA_PROGRESS"),
            spark_ui=bool(_flag(env, "GENEVA_SPARK_UI")),
            trust=env.get("GENEVA_TRUST", "").strip().lower() or "all",
            signing_key=env.get("GENEVA_SIGNING_KEY") or None,
            trusted_keys=env.get("GENEVA_TRUSTED_KEYS") or None,
            accepted_file=_accepted_file(env),
        )


def override_config_kv(values: Mapping[str, Any]) -> None:
    """Take settings of Geneva on Ray by their keys; here they are environment variables."""
    for key in values:
        warn_compatibility(
            f"override_config_kv({key!r})",
            "settings are environment variables, or Settings(...) for connect; checkpoints are "
            "inside each table",
        )


def _accepted_file(env: Mapping[str, str]) -> Path | None:
    if named := env.get("GENEVA_ACCEPTED_FUNCTIONS"):
        return Path(named)
    home = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    return Path(home) / "geneva" / "accepted-functions.jsonl" if home else None


def _integer(env: Mapping[str, str], name: str, default: int | None, *, minimum: int) -> int | None:
    text = env.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise UserInputError(f"{name} must be a whole number of at least {minimum}, not {text!r}.")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    text = env.get(name, "").strip().lower()
    if not text:
        return None
    return text not in ("0", "false", "no", "off")


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and put them back at the end.

    Those that others have set since, in other threads, stay until their end: what was there before
    is put back then.
    """
    with _SETTING:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        _before_each.append(before)
    try:
        yield
    finally:
        with _SETTING:
            at = next(i for i, each in enumerate(_before_each) if each is before)
            del _before_each[at]
            for name, value in before.items():
                later = next((each for each in _before_each[at:] if name in each), None)
                if later is None:
                    set_variable(name, value)
                else:
                    later[name] = value


_SETTING = threading.Lock()
_before_each: list[dict[str, str | None]] = []
"""What each `environment` that has not ended has found, in the order of their beginnings."""


@contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no garbage meanwhile, where many things are made at once and none of them is any."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def user_name() -> str:
    """Who runs this process; empty where that is not known, as in a container without users."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


def time_of(given: Any) -> datetime:
    """A time that may be given as text, or not at all: then it is now."""
    if given is None:
        return datetime.now(UTC)
    return datetime.fromisoformat(given) if isinstance(given, str) else given


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable of this process; None: take it away."""
    _names_set.add(name)
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def variables_set() -> dict[str, str]:
    """What those variables are now that `set_variable` was ever called for."""
    return {name: os.environ[name] for name in _names_set if name in os.environ}


_names_set: set[str] = set()
