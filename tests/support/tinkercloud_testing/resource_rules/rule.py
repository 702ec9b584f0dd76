"""Rules of the custom resources, and builders of manifests to test them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinkercloud_testing.resources.sessions import Json, a_base_model_manifest, a_session_manifest

IMMUTABLE = "is immutable; create a new session"
base_model, session = a_base_model_manifest, a_session_manifest


@dataclass(frozen=True)
class Rule:
    """A CEL rule: its path, its message, and manifests that satisfy or violate it.

    `accepted` and `refused` contain manifests by case. If `before` is set, it is an existing object
    that they replace.
    """

    path: str
    message: str
    accepted: Mapping[str, Json]
    refused: Mapping[str, Json]
    before: Json | None = field(default=None)

    @property
    def kind(self) -> str:
        """The kind of the resource."""
        return str(next(iter(self.refused.values()))["kind"])
