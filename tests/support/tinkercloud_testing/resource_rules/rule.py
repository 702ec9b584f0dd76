"""What a rule of the custom resources is, and who builds the manifests it is tried with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinkercloud_testing.sessions import Json, a_base_model_manifest, a_session_manifest

IMMUTABLE = "is immutable; create a new session"
base_model, session = a_base_model_manifest, a_session_manifest


@dataclass(frozen=True)
class Rule:
    """A CEL rule: where it stands, what it says, and what it lets pass.

    `accepted` and `refused` are manifests by what is tried; if there is a `before`, they take the
    place of that object, which exists.
    """

    path: str
    message: str
    accepted: Mapping[str, Json]
    refused: Mapping[str, Json]
    before: Json | None = field(default=None)

    @property
    def kind(self) -> str:
        """The resource it belongs to."""
        return str(next(iter(self.refused.values()))["kind"])
