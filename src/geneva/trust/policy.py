"""The policy of a connection: which stored functions it lets run, and how it signs its own."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import IO, Literal, TypeAlias

from geneva.config import user_name
from geneva.errors import UntrustedFunctionError, UserInputError
from geneva.model.computation import Computation, Permit, Udf
from geneva.model.tables import ColumnDefinition, TableRef
from geneva.model.uris import without_credentials
from geneva.model.view_query import Shown
from geneva.trust.claims import (
    Claim,
    Declaration,
    claim_of_definition,
    claims_of,
    mismatch,
    signed,
)
from geneva.trust.keys import SigningKey, VerifyingKey, read_keys, read_signing_key

ALL, SIGNED = "all", "signed"


@dataclass(frozen=True, slots=True)
class StoredFunction:
    """A function that is about to run, as far as is known without loading it."""

    database: str
    table: str
    column: str
    name: str
    """What the function is called."""
    digest: str
    type: str
    inputs: tuple[str, ...]
    declared_by: str = ""
    """Who declared it, as the table says: proven only where it is signed."""
    declared_at: str = ""
    signed_by: str | None = None
    """The trusted key that has signed it, for this very use; None: none."""
    doubt: str = ""
    """Why no trusted key has."""
    accepted: bool = False
    """Whether it was accepted on this machine, for this very use."""
    claim_id: str = ""


Policy: TypeAlias = Literal["all", "signed"] | Callable[[StoredFunction], bool]

_declared_here: set[str] = set()
"""Digests of functions that this process has declared: they are nobody else's."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What a connection lets run, and the key that it signs with."""

    policy: Policy = "all"
    signing_key: SigningKey | None = field(default=None, repr=False)
    keys: tuple[VerifyingKey, ...] = field(default=(), repr=False)
    accepted_file: Path | None = None
    """The list of what was accepted on this machine; None: there is none."""
    database: str = ""

    @classmethod
    def read(
        cls,
        policy: Policy | str,
        signing_key: str | None = None,
        trusted_keys: str | None = None,
        accepted_file: Path | None = None,
    ) -> Trust:
        """Read keys from where they are, and refuse what is no policy."""
        if not callable(policy) and policy not in (ALL, SIGNED):
            raise UserInputError(
                f"trust must be {ALL!r}, {SIGNED!r} or a function of a StoredFunction, "
                f"not {policy!r}."
            )
        own = read_signing_key(signing_key) if signing_key else None
        keys = read_keys(trusted_keys) if trusted_keys else ()
        checking = keys if own is None else (own, *keys)
        return cls(policy, own, checking, accepted_file)  # type: ignore[arg-type]

    # --------------------------------------------------------------------------- declaring

    def declare(self, definition: ColumnDefinition) -> ColumnDefinition:
        """A definition with its claim, signed where this connection has a key."""
        _declared_here.add(definition.udf_digest)
        return self._claimed(definition)

    def resign(self, definition: ColumnDefinition) -> ColumnDefinition:
        """A definition, signed: somebody with a key has looked at it."""
        if self.signing_key is None:
            raise UserInputError(
                "To sign a function give a key: signing_key=, or GENEVA_SIGNING_KEY (make one "
                "with: geneva trust keygen NAME)."
            )
        return self._claimed(definition)

    def _claimed(self, definition: ColumnDefinition) -> ColumnDefinition:
        claim = claim_of_definition(definition, _who(), datetime.now(UTC).isoformat())
        return replace(definition, declaration=signed(claim, self.signing_key).to_json())

    # ---------------------------------------------------------------------------- checking

    def permit(self, ref: TableRef, computation: Computation) -> Permit | None:
        """Let a function run, or refuse it: UntrustedFunctionError. Nothing is loaded for that.

        None for what runs no function.
        """
        program = computation.program
        if not isinstance(program, Udf):
            return None
        if self.policy == ALL or program.digest in _declared_here:
            return Permit(program.digest)
        found = self.look(ref, computation)
        if callable(self.policy):
            if self.policy(found) is True:
                return Permit(program.digest)
            raise _refusal(found, "the trust function of this connection refused it")
        if found.signed_by is None and not found.accepted:
            raise _refusal(found, found.doubt)
        return Permit(program.digest)

    def look(self, ref: TableRef, computation: Computation) -> StoredFunction:
        """What is known of a function before it runs."""
        program = computation.program
        assert isinstance(program, Udf)
        claims = claims_of(computation)
        stored = [Declaration.parse(output.declaration) for output in computation.outputs]
        looked = [self._proven(*pair) for pair in zip(claims, stored, strict=True)]
        # One call fills all columns: it is trusted for these where it is for each of them.
        key, doubt = next((found for found in looked if found[0] is None), looked[0])
        claim, accepted = stored[0].claim, self.accepted()
        shown = Shown.of(ref.name, computation.name, program.name)
        return StoredFunction(
            database=self.database,
            table=shown.table,
            column=shown.name,
            name=program.name,
            digest=program.digest,
            type=", ".join(present.type for present in claims),
            inputs=claims[0].inputs,
            declared_by=claim.by if claim is not None else "",
            declared_at=claim.at if claim is not None else "",
            signed_by=key,
            doubt=doubt,
            accepted=all(present.id in accepted for present in claims),
            claim_id=" ".join(present.id for present in claims),
        )

    def _proven(self, present: Claim, stored: Declaration) -> tuple[str | None, str]:
        """The trusted key that has signed a claim for what would run; or None, and why."""
        key, doubt = self._signer(stored)
        if key is None:
            return None, doubt
        assert stored.claim is not None
        wrong = mismatch(stored.claim, present)
        return (key, "") if wrong is None else (None, f"its signature does not fit: {wrong}")

    def _signer(self, stored: Declaration) -> tuple[str | None, str]:
        """The trusted key that has signed a declaration; or None, and why."""
        if not stored.signature or stored.claim is None:
            return None, "it is not signed"
        named = [key for key in self.keys if key.name == stored.key]
        if not named:
            return None, f"it is signed with key {stored.key!r}, which is not trusted here"
        if not any(stored.is_signed_by(key) for key in named):
            return None, f"its signature is not one of key {stored.key!r}"
        return stored.key, ""

    # --------------------------------------------------------------------------- accepting

    def accepted(self) -> frozenset[str]:
        """The claims that were accepted on this machine."""
        return frozenset(line["claim"] for line in self._accepted_lines())

    def accept(self, function: StoredFunction) -> None:
        """Let a function run on this machine from now on, for this very use."""
        file = self._file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = {
            "digest": function.digest,
            "function": function.name,
            "database": without_credentials(function.database),
            "table": function.table,
            "column": function.column,
            "at": datetime.now(UTC).isoformat(),
        }
        with _private(file, os.O_APPEND) as out:
            for claim in function.claim_id.split():
                out.write(json.dumps({"claim": claim, **about}) + "\n")

    def forget(self, function: StoredFunction) -> bool:
        """Take an acceptance back; whether there was one."""
        lines = self._accepted_lines()
        kept = [line for line in lines if line["claim"] not in function.claim_id.split()]
        if len(kept) == len(lines):
            return False
        file = self._file()
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        with _private(fresh, os.O_TRUNC) as out:
            out.writelines(json.dumps(line) + "\n" for line in kept)
        fresh.replace(file)
        return True

    def _file(self) -> Path:
        if self.accepted_file is None:
            raise UserInputError("There is no folder for the list of accepted functions.")
        return self.accepted_file

    def _accepted_lines(self) -> list[dict[str, str]]:
        if self.accepted_file is None or not self.accepted_file.exists():
            return []
        return list(_lines(self.accepted_file.read_text().splitlines()))


def _lines(texts: Iterable[str]) -> Iterable[dict[str, str]]:
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut short: it accepts nothing
        if isinstance(line, dict) and isinstance(line.get("claim"), str):
            yield line


def _private(path: Path, flags: int) -> IO[str]:
    """Open a file to write, which only its owner may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600), "w")


def _who() -> str:
    return f"{user_name() or '?'}@{socket.gethostname()}"


def _refusal(found: StoredFunction, why: str) -> UntrustedFunctionError:
    words = (without_credentials(found.database), found.table, found.column)
    place = " ".join(map(quote, words))
    return UntrustedFunctionError(
        f"Column {found.column!r} of table {found.table!r} is computed by function {found.name!r} "
        f"(digest {found.digest}), which is not trusted here: {why}. Nothing of it was loaded. "
        f"Look at it with: geneva trust show {place}  (and accept it with: "
        "geneva trust accept, or have it signed by who declared it)."
    )
