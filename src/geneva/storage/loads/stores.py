"""Files of other formats, wherever they are: through Arrow's own file systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from geneva.errors import UserInputError
from geneva.model.tables import Secrets
from geneva.model.uris import local_path

_S3_NAMES = {
    "access_key": ("aws_access_key_id", "access_key_id"),
    "secret_key": ("aws_secret_access_key", "secret_access_key"),
    "session_token": ("aws_session_token", "session_token", "aws_token", "token"),
    "region": ("aws_region", "region", "aws_default_region"),
}
"""Arrow's names of settings, and those by which Lance knows them."""
_S3_ENDPOINTS = ("aws_endpoint", "aws_endpoint_url", "endpoint", "endpoint_url")
_AZURE_NAMES = {
    "account_name": ("azure_storage_account_name", "account_name"),
    "account_key": ("azure_storage_account_key", "account_key"),
    "sas_token": ("azure_storage_sas_key", "azure_storage_sas_token", "sas_token"),
}


def file_system(uri: str, options: Secrets) -> tuple[fs.FileSystem, str]:
    """The file system that a URI is of, opened with Lance's storage options, and the path there."""
    path = local_path(uri)
    if path is not None:
        return fs.LocalFileSystem(), str(path)
    parts = urlsplit(uri)
    make = _STORES.get(parts.scheme)
    if make is None:
        raise UserInputError(
            f"Files at {parts.scheme}:// can't be read: a source is a path, or a URI of "
            f"{', '.join(f'{scheme}://' for scheme in _STORES)}."
        )
    given = {name.lower(): value for name, value in options.items()}
    return make(given), f"{parts.netloc}{parts.path}".rstrip("/")


def _named(given: Mapping[str, str], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    found = {
        own: next((given[name] for name in known if name in given), None)
        for own, known in names.items()
    }
    return {own: value for own, value in found.items() if value is not None}


def _s3(given: Mapping[str, str]) -> fs.FileSystem:
    settings = _named(given, _S3_NAMES)
    endpoint = next((given[name] for name in _S3_ENDPOINTS if name in given), None)
    if endpoint is not None:
        parts = urlsplit(endpoint)
        settings |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    return fs.S3FileSystem(**settings)


def _gcs(given: Mapping[str, str]) -> fs.FileSystem:
    return fs.GcsFileSystem()  # by the machine's own credentials


def _azure(given: Mapping[str, str]) -> fs.FileSystem:
    return fs.AzureFileSystem(**_named(given, _AZURE_NAMES))


_STORES: Mapping[str, Callable[[Mapping[str, str]], fs.FileSystem]] = {
    "s3": _s3,
    "s3a": _s3,
    "gs": _gcs,
    "az": _azure,
}
