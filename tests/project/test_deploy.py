"""The manifests of docs/deploy.md fit the schemas of Kubernetes and of the Spark operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "deploy"
FILES = sorted(FOLDER.glob("*.yaml"))


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    """The schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


POD = {"cores": COUNT, "memory": TEXT, "memoryOverhead": TEXT, "serviceAccount": TEXT} | {
    "envFrom": {"type": "array", "items": record(secretRef=record("name", name=TEXT))}
}
OPERATOR = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "sparkoperator.k8s.io/v1beta2"},
    kind={"const": "SparkApplication"},
    metadata=record("name", name=TEXT),
    spec=record(
        "type sparkVersion mainApplicationFile driver executor",
        type={"enum": ["Java", "Python", "Scala", "R"]},
        mode={"enum": ["cluster", "client"]},
        pythonVersion={"enum": ["2", "3"]},
        image=TEXT,
        sparkVersion=TEXT,
        mainApplicationFile=TEXT,
        restartPolicy=record(
            type={"enum": ["Never", "Always", "OnFailure"]},
            onFailureRetries={"type": "integer", "minimum": 0},
            onFailureRetryInterval=COUNT,
        ),
        driver=record(**POD),
        executor=record(instances=COUNT, **POD),
    ),
)
"""What our manifest uses of the operator's v1beta2, as its types declare it: its own schema is no
package that could be installed."""


def check(document: dict[str, Any]) -> None:
    if document["apiVersion"].startswith("sparkoperator"):
        jsonschema.validate(document, OPERATOR)
    else:
        kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_manifests_fit_their_schemas(file: Path) -> None:
    for document in documents(file):
        check(document)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("job.yaml", "spec.jobTemplate.spec.backofLimit", 2),
        ("spark-application.yaml", "spec.restartPolicy.onFailureRetryIntervall", 60),
        ("spark-application.yaml", "spec.executor.instances", "4"),
        ("spark-application.yaml", "spec.sparkVersion", 4.3),
    ],
)
def test_a_wrong_manifest_would_be_found(file: str, path: str, value: object) -> None:
    (document,) = documents(FOLDER / file)
    *folders, name = path.split(".")
    place = document
    for each in folders:
        place = place[each]
    place[name] = value
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check(document)


def test_every_manifest_is_in_the_guide() -> None:
    guide = (FOLDER.parent / "deploy.md").read_text(encoding="utf-8")
    assert [file.name for file in FILES if f"deploy/{file.name}" not in guide] == []
