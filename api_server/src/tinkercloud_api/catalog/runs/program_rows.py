"""The catalog's queries and updates of programs."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, update

from tinkercloud_api.catalog.schema.statements import Page, Statements
from tinkercloud_api.catalog.schema.tables import Program, now
from tinkercloud_protocol.programs.program_messages import ProgramPhase

RUNNING = [phase for phase in ProgramPhase if not phase.is_final]
"""Phases of programs that have not ended."""
_MAX_MESSAGE_CHARACTERS = 1000
_MAX_FAILED = 100


class ProgramCatalog(Statements):
    """Queries and updates of the programs. All updates are idempotent."""

    async def add(self, program: Program) -> Program:
        """Record a program; if the id exists, return the existing row."""
        return await self._insert(program, select(Program).where(Program.id == program.id))

    async def program(self, program_id: str) -> Program | None:
        """Return a program."""
        return await self._one(select(Program).where(Program.id == program_id))

    async def programs(self, owner: str | None, page: Page) -> Sequence[Program]:
        """Return programs, newest first; `owner` None means all owners."""
        query = select(Program).order_by(Program.created_at.desc(), Program.id)
        if owner is not None:
            query = query.where(Program.owner == owner)
        return await self._all(query.offset(page.offset).limit(page.limit))

    async def failed(self, owner: str | None, since: datetime) -> Sequence[Program]:
        """Return some programs that have failed since a time, newest first; None: of all owners."""
        query = select(Program).where(
            Program.phase == ProgramPhase.FAILED, Program.finished_at >= since
        )
        if owner is not None:
            query = query.where(Program.owner == owner)
        return await self._all(query.order_by(Program.finished_at.desc()).limit(_MAX_FAILED))

    async def unfinished(self) -> Sequence[Program]:
        """Return the programs that have not ended, oldest first."""
        query = select(Program).where(Program.phase.in_(RUNNING))
        return await self._all(query.order_by(Program.created_at, Program.id))

    async def count_unfinished(self, owner: str) -> int:
        """Return how many programs of an owner have not ended."""
        query = select(func.count()).where(Program.owner == owner, Program.phase.in_(RUNNING))
        async with self._reading() as db:
            return await db.scalar(query) or 0

    async def set_key(self, program_id: str, key_id: int) -> None:
        """Record a program's current key."""
        await self._change(update(Program).where(Program.id == program_id).values(key_id=key_id))

    async def set_state(
        self,
        program_id: str,
        *,
        phase: ProgramPhase,
        restarts: int,
        exit_code: int | None,
        message: str | None,
        started_at: datetime | None,
    ) -> bool:
        """Record the state of a program; return False if it has ended already."""
        values: dict[str, Any] = {
            "phase": str(phase),
            "restarts": restarts,
            "exit_code": exit_code,
            "message": message[:_MAX_MESSAGE_CHARACTERS] if message else None,
            "started_at": func.coalesce(Program.started_at, started_at),
        }
        if phase.is_final:
            values["finished_at"] = now()
        return await self._change(
            update(Program)
            .where(Program.id == program_id, Program.phase.in_(RUNNING))
            .values(values)
        )

    async def set_progress(self, program_id: str, progress: Mapping[str, Any]) -> None:
        """Record the merged progress reports of a program."""
        await self._change(
            update(Program).where(Program.id == program_id).values(progress=dict(progress))
        )
