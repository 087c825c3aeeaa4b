"""The manifests of docs/deploy.md fit the schemas of Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deploy"
FILES = sorted(FOLDER.glob("*.yaml"))


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_manifests_fit_their_schemas(file: Path) -> None:
    for document in documents(file):
        if document["apiVersion"].startswith("sparkoperator"):
            continue  # the operator's own kind, of which no schema can be had here
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    (job,) = documents(FOLDER / "job.yaml")
    job["spec"]["jobTemplate"]["spec"]["backofLimit"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_the_operators_application_has_what_it_needs() -> None:
    (application,) = documents(FOLDER / "spark-application.yaml")
    spec = application["spec"]
    for part in ("type", "mode", "image", "sparkVersion", "mainApplicationFile"):
        assert isinstance(spec[part], str)
    assert {"driver", "executor"} <= spec.keys()


def test_every_manifest_is_in_the_guide() -> None:
    guide = (FOLDER.parent / "deploy.md").read_text(encoding="utf-8")
    assert [file.name for file in FILES if f"deploy/{file.name}" not in guide] == []
