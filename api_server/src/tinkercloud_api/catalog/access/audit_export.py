"""The audit log as a file that is verified without the catalog: one row of the chain per line."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from tinkercloud_api.catalog.access.audit_chain import ChainCheck, Mark, Verdict
from tinkercloud_api.catalog.schema.tables import AuditEntry
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe


class ExportedRow(BaseModel):
    """A line of an exported audit log, as JSON: a row of the table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int
    at: AwareDatetime
    owner: str
    key_id: int | None
    event: str
    details: dict[str, Any]
    outcome_of: int | None
    hash: str


def line_of(entry: AuditEntry) -> str:
    """Return a row as a line of an exported log, without a line break."""
    row = {name: getattr(entry, name) for name in ExportedRow.model_fields}
    # Escaped: names that are not UTF-8 have characters that pydantic's JSON refuses.
    return json.dumps(row, separators=(",", ":"), default=datetime.isoformat)


def verify_lines(lines: Iterable[str], mark: Mark | None) -> Verdict:
    """Check that no row of an exported log was changed, inserted or removed.

    Rows missing from the end of the file are detected only if `mark` is given.

    Args:
        lines: the file's lines, in their order.
        mark: a row that must be in it.

    Raises:
        InvalidRequest: a line is not one of an exported log.
    """
    check = ChainCheck(mark)
    for number, line in enumerate(lines, start=1):
        try:
            row = ExportedRow.model_validate(json.loads(line))
        except ValidationError as error:
            raise _no_row(number, describe(error, "the line")) from None
        except (ValueError, RecursionError) as error:
            raise _no_row(number, f"the line is not JSON ({error})") from None
        check.add(AuditEntry(**row.model_dump()))
    return check.finish(check.verdict.newest)


def _no_row(number: int, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"line {number}: {why}; expected an entry as `tinkercloud audit export` prints it"
    )
