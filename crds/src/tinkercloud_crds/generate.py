"""`python -m tinkercloud_crds.generate [--check]`: write the CRD YAML, or check that it is fresh.

The files are written to `crds/`, for people and GitOps repositories, and to the chart
`tinkercloud-crds`.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec, BaseModelStatus
from tinkercloud_crds.structural import Schema, structural_schema, without_defaults
from tinkercloud_crds.tenant import TenantSpec, TenantStatus
from tinkercloud_crds.training_session import (
    MAX_NAME_LENGTH,
    TrainingSessionSpec,
    TrainingSessionStatus,
)

MAX_BYTES = 112 << 10
"""Maximum size of a definition: readable, and well below the limit of annotations (256 KiB)."""

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (ROOT / "crds", ROOT / "charts" / "tinkercloud-crds" / "templates")

_HEADER = "# Generated from crds/src/tinkercloud_crds by `make generate`. Do not edit.\n"


@dataclass(frozen=True)
class Kind:
    """One custom resource definition."""

    kind: str
    plural: str
    short_name: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[tuple[str, str, str, int], ...]
    """Columns of `kubectl get`: name, type, JSON path and priority of each."""
    root_rules: tuple[tuple[str, str], ...] = ()
    """CEL rules on the whole object."""


def _condition(name: str) -> str:
    return f'.status.conditions[?(@.type=="{name}")]'


_AGE = ("Age", "date", ".metadata.creationTimestamp", 0)

KINDS = (
    Kind(
        kind="BaseModel",
        plural=labels.BASE_MODELS,
        short_name="bm",
        spec=BaseModelSpec,
        status=BaseModelStatus,
        columns=(
            ("Model", "string", ".spec.modelName", 0),
            ("Ready", "string", f"{_condition('Ready')}.status", 0),
            ("Trainer", "string", ".spec.trainer.backend", 0),
            ("Sampler", "string", ".spec.sampler.backend", 0),
            ("Sessions", "integer", ".status.liveSessions", 0),
            ("Clusters", "string", ".status.pool.clusterSummary", 0),
            ("Slots", "string", ".status.pool.slotSummary", 0),
            ("Spares", "string", ".status.spares.summary", 0),
            ("GPUs", "integer", ".status.gpus", 0),
            ("Context", "integer", ".spec.maxContextLength", 1),
            _AGE,
        ),
    ),
    Kind(
        kind="TrainingSession",
        plural=labels.TRAINING_SESSIONS,
        short_name="tsess",
        spec=TrainingSessionSpec,
        status=TrainingSessionStatus,
        columns=(
            ("Phase", "string", ".status.phase", 0),
            ("Ready", "string", f"{_condition('Ready')}.status", 0),
            ("Model", "string", ".spec.baseModel", 0),
            ("Trainers", "string", ".status.workers.trainers", 0),
            ("Samplers", "string", ".status.workers.samplers", 0),
            ("GPUs", "integer", ".status.gpus", 0),
            ("Pool", "string", ".spec.poolCluster", 0),
            ("Owner", "string", ".spec.owner", 1),
            ("Queue", "string", ".spec.queueName", 1),
            ("Program", "string", ".status.program.phase", 1),
            ("Active", "date", ".status.lastActivityTime", 1),
            ("Endpoint", "string", ".status.endpoint", 1),
            ("Reason", "string", f"{_condition('Ready')}.reason", 1),
            _AGE,
        ),
        root_rules=(
            (
                f"size(self.metadata.name) <= {MAX_NAME_LENGTH}"
                " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name: must have at most 40 characters of a-z, 0-9 and -, and start with a"
                " letter, because its RayCluster and Services are named after it",
            ),
        ),
    ),
    Kind(
        kind="Tenant",
        plural=labels.TENANTS,
        short_name="tnt",
        spec=TenantSpec,
        status=TenantStatus,
        columns=(
            ("Sessions", "string", ".status.sessionSummary", 0),
            ("GPUs", "string", ".status.gpuSummary", 0),
            ("Models", "string", ".status.modelSummary", 0),
            ("Waiting", "integer", ".status.used.waiting", 0),
            ("Weight", "integer", ".spec.weight", 1),
            ("Owners", "string", ".spec.owners", 1),
            _AGE,
        ),
    ),
)


def definition(kind: Kind) -> Schema:
    """Return a CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{labels.GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/part-of": labels.MANAGED_BY},
        },
        "spec": {
            "group": labels.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short_name],
                "categories": ["ml"],
            },
            "versions": [
                {
                    "name": labels.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind_, "jsonPath": path}
                        | ({"priority": priority} if priority else {})
                        for name, kind_, path, priority in kind.columns
                    ],
                    "schema": {"openAPIV3Schema": _root_schema(kind)},
                }
            ],
        },
    }


def _root_schema(kind: Kind) -> Schema:
    root: Schema = {
        "type": "object",
        "description": " ".join((kind.spec.__doc__ or "").split()),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(kind.spec),
            "status": without_defaults(structural_schema(kind.status)),
        },
    }
    if kind.root_rules:
        root["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} for rule, message in kind.root_rules
        ]
    return root


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: Kubernetes tools accept them, but they are hard to read."""

    def ignore_aliases(self, _data: Any) -> bool:  # noqa: ANN401 - the interface's type
        return True


def render(kind: Kind) -> str:
    """Return the YAML of a definition.

    Raises:
        ValueError: The definition is larger than `MAX_BYTES`.
    """
    text = _HEADER + yaml.dump(definition(kind), Dumper=_Dumper, sort_keys=False, width=100)
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"the CRD of {kind.kind} has {len(text.encode())} bytes, over {MAX_BYTES}")
    return text


def main() -> None:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    is_check = parser.parse_args().check
    stale = []
    for kind in KINDS:
        text = render(kind)
        for folder in FOLDERS:
            path = folder / f"{labels.GROUP}_{kind.plural}.yaml"
            if path.is_file() and path.read_text() == text:
                continue
            stale.append(str(path.relative_to(ROOT)))
            if not is_check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if is_check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run `make generate`")


if __name__ == "__main__":
    main()
