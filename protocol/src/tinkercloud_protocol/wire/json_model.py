"""The base class of all JSON models on the wire, and the function that reads them.

Requests are parsed leniently in one respect only: unknown fields are ignored, because the SDK adds
fields every few weeks. Types are strict: a number in quotes is a mistake that the client should
learn about.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.shown import shown

MAX_ERRORS_SHOWN = 3
MAX_SHOWN_BODY_BYTES = 64 << 10
"""Error messages about longer bodies do not show the rejected value, which could be most of the
body."""
MAX_METADATA_ENTRIES = 64

ItemT = TypeVar("ItemT")

Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a request. Validation stops at the first error, because each error is kept in
memory."""


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains the character U+0000: remove it")
    return text


Storable = AfterValidator(_without_nul)
"""Validator of text that is stored or searched for: PostgreSQL cannot store U+0000."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=256), Storable]
Uri = Annotated[str, StringConstraints(min_length=1, max_length=1024), Storable]


def few_entries(entries: object) -> object:
    """Return a value unless it is an object with too many entries (a validator).

    Raises:
        ValueError: it has more than `MAX_METADATA_ENTRIES`.
    """
    # Checked before the entries, because each error would be kept in memory.
    if isinstance(entries, dict) and len(entries) > MAX_METADATA_ENTRIES:
        raise ValueError(f"has {len(entries)} entries; at most {MAX_METADATA_ENTRIES} are accepted")
    return entries


def _as_text(value: object) -> object:
    """Return text unchanged, and any other value as JSON, because the SDK only reads text back."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("is nested too deeply: reduce the nesting") from None


UserMetadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=128)],
        Annotated[str, StringConstraints(max_length=4096), BeforeValidator(_as_text)],
    ],
    BeforeValidator(few_entries),
]
"""Values may be any JSON. Values other than text are stored as JSON text."""
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 24 * 3600)]
"""Seconds until a checkpoint expires: one hour to ten years, as documented by the SDK."""


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
        InvalidRequest: The body is not JSON or does not match the model. The message names each
            field, the error and the value received.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        shows = len(body) <= MAX_SHOWN_BODY_BYTES
        faults = error.errors(include_url=False, include_context=False, include_input=shows)
        raise InvalidRequest(sentences(faults, "request body")) from None


def describe(error: ValidationError, whole: str = "") -> str:
    """Return pydantic's errors as a message that a user can act on (`sentences`)."""
    return sentences(error.errors(include_url=False, include_context=False), whole)


def sentences(faults: Sequence[Mapping[str, Any]], whole: str = "") -> str:
    """Return a message that a user can act on: field, error and received value of the first errors.

    Args:
        faults: Errors in pydantic's format.
        whole: Name of the whole value, for errors that concern no single field. If empty, the
            message of such an error has no field and does not show the value.
    """
    messages = []
    for fault in faults[:MAX_ERRORS_SHOWN]:
        # The location may contain text of the client: keys of its metadata.
        where = ".".join(str(part)[:80] for part in fault["loc"]) or whole
        message = fault["msg"].removeprefix("Value error, ")
        if not where:
            messages.append(message)
            continue
        is_shown = "input" in fault and fault["type"] not in {"missing", "json_invalid"}
        # Our own messages say what is wrong with an object; its size would not help.
        if fault["type"] == "value_error" and isinstance(fault.get("input"), dict):
            is_shown = False
        got = f" (got {shown(fault['input'])})" if is_shown else ""
        messages.append(f"{where}: {message}{got}")
    if len(faults) > MAX_ERRORS_SHOWN:
        messages.append(f"and {len(faults) - MAX_ERRORS_SHOWN} more")
    return "; ".join(messages)
