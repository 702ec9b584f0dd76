"""The base of every JSON model on the wire, and the one way to read one.

Requests are read leniently in one sense only: unknown fields are ignored, because the SDK gains
fields every few weeks. Types are strict: a number in quotes is a mistake somebody should hear of.
"""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tinkercloud_protocol.errors import InvalidRequest

MAX_ERRORS_SHOWN = 3

ItemT = TypeVar("ItemT")

Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that a client sends: read up to its first mistake, as each one is remembered whole."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Uri = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
UserMetadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=128)],
        Annotated[str, StringConstraints(max_length=4096)],
    ],
    Field(max_length=64),
]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 24 * 3600)]
"""Seconds until a checkpoint expires: one hour to ten years, as the SDK documents."""


class WireModel(BaseModel):
    """A JSON object on the wire: frozen, strictly typed, unknown fields ignored."""

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_json(model: type[ModelT], body: bytes) -> ModelT:
    """Read a JSON body as `model`.

    Raises:
        InvalidRequest: not JSON, or not of that shape; the message names each field, what is
            wrong with it and what came.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(describe(error, "request body")) from None


def describe(error: ValidationError, whole: str = "") -> str:
    """Return a sentence a user can act on: field, fault and the value that came.

    Args:
        error: what pydantic found.
        whole: what to call all that came, in faults of no one field. Without it those are told by
            their own words alone, and what came is not shown.
    """
    faults = error.errors(include_url=False, include_context=False)
    sentences = []
    for fault in faults[:MAX_ERRORS_SHOWN]:
        where = ".".join(str(part) for part in fault["loc"]) or whole
        message = fault["msg"].removeprefix("Value error, ")
        if not where:
            sentences.append(message)
            continue
        got = "" if fault["type"] in {"missing", "json_invalid"} else f" (got {_short(fault)})"
        sentences.append(f"{where}: {message}{got}")
    if len(faults) > MAX_ERRORS_SHOWN:
        sentences.append(f"and {len(faults) - MAX_ERRORS_SHOWN} more")
    return "; ".join(sentences)


def _short(fault: object) -> str:
    text = repr(fault["input"]) if isinstance(fault, dict) else ""
    return text if len(text) <= 80 else text[:77] + "..."
