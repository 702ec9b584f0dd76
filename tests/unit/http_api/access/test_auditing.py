"""What happens to a request if the audit log can't be written: it is refused, or answered."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import changes
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_protocol.wire.asgi import Message
from tinkercloud_protocol.wire.errors import Unavailable

ANN = Principal(1, "key of ann", "ann", Role.USER)
SCOPE = {"type": "http", "method": "POST", "path": "/api/v1/projects", "client": ("10.0.0.1", 1)}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    opened = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(opened)
    yield opened
    await opened.dispose()


async def break_log(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE audit_chain RENAME TO gone"))


async def test_a_request_is_refused_before_it_runs_and_says_why(engine: AsyncEngine) -> None:
    auditing = Auditing(AuditLog(engine), days=1)
    await break_log(engine)

    async def send(_message: Message) -> None:
        raise AssertionError("the request must not run")

    with pytest.raises(Unavailable, match=r"audit log can't be written.*nothing was done"):
        await auditing.recorded(changes("project_create"), ANN, SCOPE, send)


async def test_a_response_is_sent_even_if_its_outcome_is_not_recorded(engine: AsyncEngine) -> None:
    auditing, sent = Auditing(AuditLog(engine), days=1), []

    async def send(message: Message) -> None:
        sent.append(message)

    recorded = await auditing.recorded(changes("project_create"), ANN, SCOPE, send)
    await break_log(engine)
    with structlog.testing.capture_logs() as logged:
        await recorded(START)

    assert sent == [START]
    assert logged[-1]["event"] == "the outcome of a request was not recorded"
    assert logged[-1]["entry"] == 1
