"""Keys: their lines and files, what they sign, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from geneva.errors import UserInputError
from geneva.trust.claims import Claim, Declaration, mismatch, signed
from geneva.trust.keys import new_key, read_keys, read_signing_key


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_key_signs_it_alone_checks(tmp_path: Path, *, shared: bool) -> None:
    own, public = new_key("alice", shared=shared)
    (tmp_path / "keys").write_text(f"# ours\n\n{public}\n")
    key = read_signing_key(own)
    for checking in (*read_keys(public), *read_keys(str(tmp_path / "keys")), key):
        assert checking.name == "alice"
        assert checking.verify(b"text", key.sign(b"text"))
        assert not checking.verify(b"texT", key.sign(b"text"))
        assert not checking.verify(b"text", b"")
        assert not checking.verify(b"text", key.sign(b"text")[:-1])
    (other,) = read_keys(new_key("alice", shared=shared)[1])
    assert not other.verify(b"text", key.sign(b"text"))
    assert own.split()[2] not in repr(key)


@pytest.mark.parametrize(
    "text",
    [
        "hmac-sha256 SECRETWORD",
        "hmac-sha256 a SECRET",
        "hmac-sha256 a SECRETSECRET",
        "ed25519-private a SECRETSECRETSECRETSECRET",
        "ed25519-private a SECRET!",
        "SECRETWORD",
        "hmac-sha512 a SECRETSECRETSECRETSECRET",
        "SECRET\0",
    ],
)
def test_a_wrong_key_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(UserInputError) as caught:
        read_signing_key(text)
    assert "SECRET" not in str(caught.value)


def test_a_public_key_signs_nothing() -> None:
    with pytest.raises(UserInputError, match="signing key"):
        read_signing_key(new_key("alice")[1])
    with pytest.raises(UserInputError, match="one word"):
        new_key("two words")


def test_claims_read_back_and_differ_by_what_they_mean() -> None:
    claim = Claim("uuid", "d" * 64, "string", ("a", "b"), (1, 2), "me@here", "2026")
    assert Claim.parse(claim.text()) == claim
    key = read_signing_key(new_key("alice", shared=True)[0])
    stored = Declaration.parse(signed(claim, key).to_json())
    assert stored.claim == claim
    assert stored.is_signed_by(key)
    present = Claim("uuid", "d" * 64, "string", ("a", "b"), (7, 8))
    assert mismatch(claim, present) is None
    assert present.id == claim.id
    renamed = Claim("uuid", "d" * 64, "string", ("a", "z"), (1, 2))
    assert mismatch(claim, renamed) is None
    for other in (
        Claim("other", "d" * 64, "string", ("a", "b"), (1, 2)),
        Claim("uuid", "e" * 64, "string", ("a", "b"), (1, 2)),
        Claim("uuid", "d" * 64, "int64", ("a", "b"), (1, 2)),
        Claim("uuid", "d" * 64, "string", ("b", "a"), (2, 1)),
        Claim("uuid", "d" * 64, "string", ("a", "z"), (-1, -1)),
        Claim("uuid", "d" * 64, "string", ("a",), ()),
    ):
        assert mismatch(claim, other) is not None
        assert other.id != claim.id
    for text in (
        "",
        "{}",
        "[]",
        '{"format": 2}',
        claim.text().replace('"format": 1', '"format": 9'),
    ):
        assert Claim.parse(text) is None
