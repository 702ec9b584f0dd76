"""Compares the CRDs that a cluster serves with those of this release: pure.

Server-side apply does not prune an undeclared field: the API server answers 500 every time. The
operator therefore checks the served schemas in advance, and removes fields from a status that the
served CRD cannot store. `tinkercloud cluster check` reports the differences before installation.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from tinkercloud_crds.base_model import BaseModelSpec, BaseModelStatus
from tinkercloud_crds.structural import structural_schema
from tinkercloud_crds.tenant import TenantSpec, TenantStatus
from tinkercloud_crds.training_session import TrainingSessionSpec, TrainingSessionStatus

Schema = Mapping[str, Any]
"""An OpenAPI v3 schema, as the API server publishes it."""

KUBERAY_MINIMUM = "1.6"
"""Oldest KubeRay version whose RayClusters support everything that sessions need."""
_KUBERAY_FIELDS = {"spec": {"authOptions": {"mode": "token", "secretName": ""}}}
"""Fields of a RayCluster that older versions of KubeRay do not declare."""
_NAMED_FIELDS = 6
"""Maximum number of fields named in a message."""

_OWN: Mapping[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "BaseModel": (BaseModelSpec, BaseModelStatus),
    "TrainingSession": (TrainingSessionSpec, TrainingSessionStatus),
    "Tenant": (TenantSpec, TenantStatus),
}


def schema_of(document: Mapping[str, Any], kind: str) -> Schema | None:
    """Return the schema of a kind from the OpenAPI document of its group; None if it has none."""
    schemas = document.get("components", {}).get("schemas", {})
    for schema in schemas.values():
        kinds = schema.get("x-kubernetes-group-version-kind", [])
        if any(each.get("kind") == kind for each in kinds) and "spec" in _fields(schema):
            found: Schema = schema
            return found
    return None


def kuberay_gap(schema: Schema) -> str | None:
    """Return what the RayCluster CRD lacks, its version and the required one; None if complete."""
    missing = list(_undeclared(_KUBERAY_FIELDS, schema))
    if not missing:
        return None
    version = "1.5" if "authOptions" in _fields(_fields(schema)["spec"]) else "1.4 or older"
    return (
        f"requires KubeRay {KUBERAY_MINIMUM} or newer: the installed RayCluster CRD is from KubeRay"
        f" {version} and lacks {', '.join(missing)}; upgrade KubeRay, and apply its new CRDs"
        " separately, because `helm upgrade` does not"
    )


def own_gap(kind: str, schema: Schema) -> str | None:
    """Return what the served CRD of one of our kinds lacks, and what to do; None if complete."""
    missing = list(_lacking(_own_schema(kind), schema))
    if not missing:
        return None
    return (
        f"the installed {kind} CRD is older than the operator and cannot store {_named(missing)};"
        " upgrade the tinkercloud-crds chart"
    )


def own_surplus(kind: str, schema: Schema) -> str | None:
    """Return the fields of the served CRD of one of our kinds that this release does not know.

    Returns:
        Their paths, or None: the CRD is of this release or of an older one.
    """
    served = {name: _fields(schema).get(name, {}) for name in ("spec", "status")}
    unknown = list(_lacking({"properties": served}, _own_schema(kind)))
    return _named(unknown) if unknown else None


@cache
def _own_schema(kind: str) -> Schema:
    spec, status = _OWN[kind]
    return {"properties": {"spec": structural_schema(spec), "status": structural_schema(status)}}


def _named(fields: Sequence[str]) -> str:
    more = f" and {len(fields) - _NAMED_FIELDS} more" if len(fields) > _NAMED_FIELDS else ""
    return ", ".join(fields[:_NAMED_FIELDS]) + more


def declared(status: Mapping[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Return a status without the fields that the served CRD cannot store.

    Args:
        status: the complete status.
        schema: the schema of its kind; None if unknown, which keeps every field.
    """
    part = _fields(schema or {}).get("status", {})
    kept: dict[str, Any] = _kept(status, part)
    return kept


def _kept(value: Any, schema: Schema) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, Mapping) and _is_closed(schema):
        fields = _fields(schema)
        return {
            key: _kept(child, fields[key])
            for key, child in value.items()
            if key in fields and _is_allowed(child, fields[key])
        }
    if isinstance(value, list):
        return [_kept(item, schema.get("items", {})) for item in value]
    return value


def _is_allowed(value: object, schema: Schema) -> bool:
    return value in schema["enum"] if "enum" in schema else True


def _undeclared(value: object, schema: Schema, path: str = "") -> Iterator[str]:
    """Yield the paths of a value's fields that a schema does not declare."""
    if not isinstance(value, Mapping) or not _is_closed(schema):
        return
    for key, child in value.items():
        within = f"{path}.{key}" if path else str(key)
        if key not in _fields(schema):
            yield within
        else:
            yield from _undeclared(child, _fields(schema)[key], within)


def _lacking(wanted: Schema, served: Schema, path: str = "") -> Iterator[str]:
    """Yield the fields and enum values that one schema declares and the other does not."""
    if "items" in wanted:
        yield from _lacking(wanted["items"], served.get("items", {}), f"{path}[]")
    values: Sequence[object] = wanted.get("enum", [])
    if "enum" in served:
        yield from (f"{path}={value}" for value in values if value not in served["enum"])
    if not _is_closed(served):
        return
    for key, child in _fields(wanted).items():
        within = f"{path}.{key}" if path else str(key)
        if key not in _fields(served):
            yield within
        else:
            yield from _lacking(child, _fields(served)[key], within)


def _is_closed(schema: Schema) -> bool:
    """Return whether a schema lists all permitted fields."""
    return bool(_fields(schema)) and not schema.get("x-kubernetes-preserve-unknown-fields")


def _fields(schema: Schema) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema.get("properties", {})
    return found
