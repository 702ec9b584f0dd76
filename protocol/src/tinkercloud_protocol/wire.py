"""The base of every JSON model on the wire, and the one way to read one.

Requests are read leniently in one sense only: unknown fields are ignored, because the SDK gains
fields every few weeks. Types are strict: a number in quotes is a mistake somebody should hear of.
"""

import json
import reprlib
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

from tinkercloud_protocol.errors import InvalidRequest

MAX_ERRORS_SHOWN = 3
MAX_SHOWN_BODY_BYTES = 64 << 10
"""What is wrong with a longer body is told without the value that came, which may be all of it."""
MAX_METADATA_ENTRIES = 64

ItemT = TypeVar("ItemT")

Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that a client sends: read up to its first mistake, as each one is remembered whole."""


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds the character U+0000: send it without")
    return text


Storable = AfterValidator(_without_nul)
"""Of a text that is stored, or looked for: PostgreSQL has no room for U+0000."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=256), Storable]
Uri = Annotated[str, StringConstraints(min_length=1, max_length=1024), Storable]


def _few_entries(entries: object) -> object:
    # Before any is looked at: a mistake in each of a million would be remembered.
    if isinstance(entries, dict) and len(entries) > MAX_METADATA_ENTRIES:
        raise ValueError(f"{len(entries)} entries, at most {MAX_METADATA_ENTRIES} are accepted")
    return entries


def _as_text(value: object) -> object:
    """Return a text as it is, and any other value as JSON: the SDK reads back texts only."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("is nested too deeply: send a flatter value") from None


UserMetadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=128)],
        Annotated[str, StringConstraints(max_length=4096), BeforeValidator(_as_text)],
    ],
    BeforeValidator(_few_entries),
]
"""Values may be any JSON; one that is not a text is kept as its JSON text."""
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
        shows = len(body) <= MAX_SHOWN_BODY_BYTES
        faults = error.errors(include_url=False, include_context=False, include_input=shows)
        raise InvalidRequest(sentences(faults, "request body")) from None


def describe(error: ValidationError, whole: str = "") -> str:
    """Return what pydantic found in words a user can act on (`sentences`)."""
    return sentences(error.errors(include_url=False, include_context=False), whole)


def sentences(faults: Sequence[Mapping[str, Any]], whole: str = "") -> str:
    """Return what a user can act on: of the first faults field, fault and the value that came.

    Args:
        faults: as pydantic tells them.
        whole: what to call all that came, in faults of no one field. If empty, those are told by
            their own words alone, and what came is not shown.
    """
    told = []
    for fault in faults[:MAX_ERRORS_SHOWN]:
        # A client's own words may be part of it: keys of its metadata.
        where = ".".join(str(part)[:80] for part in fault["loc"]) or whole
        message = fault["msg"].removeprefix("Value error, ")
        if not where:
            told.append(message)
            continue
        is_shown = "input" in fault and fault["type"] not in {"missing", "json_invalid"}
        # Words of our own say what of an object is wrong; how large it is says nothing.
        if fault["type"] == "value_error" and isinstance(fault.get("input"), dict):
            is_shown = False
        got = f" (got {_short(fault['input'])})" if is_shown else ""
        told.append(f"{where}: {message}{got}")
    if len(faults) > MAX_ERRORS_SHOWN:
        told.append(f"and {len(faults) - MAX_ERRORS_SHOWN} more")
    return "; ".join(told)


class _Shortener(reprlib.Repr):
    """Reads no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:  # noqa: ARG002 - reprlib's
        return f"an object of {len(x)} entries"


_shortener = _Shortener()


def _short(value: object) -> str:
    text = _shortener.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
