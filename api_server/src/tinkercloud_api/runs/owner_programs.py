"""Programs of owners: who may run what, their keys, and their records in the catalog.

A program's key is minted when it starts and revoked when it ends. A server that restarts starts the
programs that have not ended again, with new keys. The program id of an RLVE program is derived from
its model, so that a repeated create_model starts no second one.
"""

import asyncio
import hashlib
import importlib.util
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import structlog

from tinkercloud_api.access.auth import Authenticator, Principal, hash_key, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.runs.program_rows import ProgramCatalog
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Program
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.providers.program_runner import ProgramLaunch, ProgramRunner, ProgramState
from tinkercloud_protocol.programs import program_messages as names
from tinkercloud_protocol.programs import rlve
from tinkercloud_protocol.programs.program_messages import (
    ProgramInfo,
    ProgramPhase,
    ProgramProgress,
    RunProgramRequest,
)
from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, WireError

log = structlog.get_logger(__name__)

LOG_BYTES = 64 << 10
"""Maximum size of the output in one response."""


class Programs:
    """The programs of this server. Belongs to one event loop."""

    def __init__(
        self,
        *,
        records: ProgramCatalog,
        catalog: Catalog,
        authenticator: Authenticator,
        runner: ProgramRunner,
        settings: Settings,
        server_url: str,
    ) -> None:
        """Create it.

        Args:
            records: the catalog of programs.
            catalog: contains the keys.
            authenticator: revokes keys.
            runner: starts and stops the programs.
            settings: the server's settings.
            server_url: URL of this server for programs, unless `programs.base_url` is set.
        """
        self._records = records
        self._catalog = catalog
        self._authenticator = authenticator
        self._runner = runner
        self._settings = settings
        self._base_url = (settings.programs.base_url or server_url).rstrip("/")
        self._changes: asyncio.Queue[tuple[str, ProgramState]] = asyncio.Queue()
        self._admission = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the runner, and the programs that an earlier server left unfinished."""
        self._writer = asyncio.create_task(self._write_changes())
        await self._runner.start(lambda *change: self._changes.put_nowait(change))
        for row in await self._records.unfinished():
            try:
                if not await self._runner.resume(self._described(row, {})):
                    await self._launch(row)
            except WireError as error:
                await self._fail(row, error.message)

    async def stop(self) -> None:
        """Stop the programs of this process; the next server continues them."""
        await self._runner.close()
        await self._changes.join()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def run(self, request: RunProgramRequest, caller: Principal) -> ProgramInfo:
        """Run a program of the caller's own.

        Raises:
            InvalidRequest: the caller may not run it, already runs as many as allowed, or another
                program trains the model.
        """
        self._check_may_run_code(request, caller)
        row = Program(
            id=f"program-{secrets.token_hex(8)}",
            owner=caller.owner,
            name=request.name or request.module or "program.py",
            base_model=request.base_model,
            model_id=request.model_id,
            module=request.module,
            source=request.source,
            args=request.args,
            phase=ProgramPhase.PENDING,
        )
        return describe(await self._add(row))

    def _check_may_run_code(self, request: RunProgramRequest, caller: Principal) -> None:
        if self._settings.provider == "kubernetes":
            # There a program is confined in a pod of its own, and each BaseModel decides.
            return
        if not self._settings.programs.allow_code:
            raise InvalidRequest(
                "this server does not run programs of its users, because they could do everything"
                " that the server can; its operator can allow it for admin keys"
                " (TINKERCLOUD_PROGRAMS__ALLOW_CODE=true)"
            )
        if caller.role is not Role.ADMIN:
            what = f"module {request.module!r}" if request.module else "a file"
            raise InvalidRequest(f"only admin keys may run {what} on this server")

    async def check_rlve(
        self, config: RlveConfig, model_id: str | None, base_model: ServedModel, caller: Principal
    ) -> None:
        """Check, before a model is created, that its RLVE program could be started.

        Args:
            config: the enabled configuration.
            model_id: the model, which may exist if the request is a repeated one; None for a new
                one whose id the server chooses.
            base_model: the base model.
            caller: the owner of the model.

        Raises:
            InvalidRequest: RLVE is not installed, a setting does not fit the model, or the owner
                already runs as many programs as allowed.
        """
        self._check_config(config, base_model)
        is_known = model_id is not None and await self._records.program(rlve_program_id(model_id))
        if not is_known:
            await self._check_number(caller.owner)

    def _check_config(self, config: RlveConfig, base_model: ServedModel) -> None:
        if (why := self._runner.refusal(base_model.name)) is not None:
            raise InvalidRequest(f"rlve_config: {why}")
        if self._settings.provider == "local" and not _is_installed(rlve.MODULE):
            raise InvalidRequest(
                "rlve_config: the RLVE program is not installed on this server; install it with"
                " `pip install 'tinkercloud[programs]'`"
            )
        max_tokens = base_model.max_context_length
        if config.rollout_max_response_len >= max_tokens:
            raise InvalidRequest(
                f"rlve_config.rollout_max_response_len: is {config.rollout_max_response_len}, but"
                f" prompt and response must fit into {max_tokens} tokens; use a smaller number"
            )

    async def run_rlve(
        self, config: RlveConfig, model_id: str, base_model: str, caller: Principal
    ) -> ProgramInfo:
        """Train a new model with RLVE. Idempotent by model.

        Raises:
            InvalidRequest: the owner already runs as many programs as allowed.
        """
        row = _rlve_program(config, model_id, base_model, caller.owner)
        row.id = rlve_program_id(model_id)
        return describe(await self._add(row))

    async def run_rlve_on(
        self, config: RlveConfig, model_id: str, base_model: ServedModel, caller: Principal
    ) -> ProgramInfo:
        """Train an existing model with RLVE.

        Raises:
            InvalidRequest: as for `check_rlve`, or another program trains the model.
        """
        self._check_config(config, base_model)
        return describe(
            await self._add(_rlve_program(config, model_id, base_model.name, caller.owner))
        )

    async def _add(self, row: Program) -> Program:
        async with self._admission:
            if (known := await self._records.program(row.id)) is not None:
                return known
            await self._check_number(row.owner)
            await self._check_model_is_free(row.model_id)
            row = await self._records.add(row)
        try:
            await self._launch(row)
        except WireError as error:
            await self._fail(row, error.message)
            raise
        log.info("program accepted", program_id=row.id, owner=row.owner, name=row.name)
        return row

    async def _check_number(self, owner: str) -> None:
        limit = self._settings.programs.max_per_owner
        if await self._records.count_unfinished(owner) >= limit:
            raise InvalidRequest(
                f"owner {owner!r} already runs {limit} programs (programs.max_per_owner); wait for"
                " one to end, or stop one with `tinkercloud programs stop ID`"
            )

    async def _check_model_is_free(self, model_id: str | None) -> None:
        for other in await self._records.unfinished():
            if model_id is not None and other.model_id == model_id:
                raise InvalidRequest(
                    f"model_id: program {other.id} already trains {model_id}; stop it first"
                    f" (`tinkercloud programs stop {other.id}`)"
                )

    async def _launch(self, row: Program) -> None:
        """Mint a new key for a program, revoke its earlier one, and start it."""
        key = new_key()
        minted = await self._catalog.add_key(
            key_hash=hash_key(key), name=f"program {row.id}", owner=row.owner, role=Role.USER
        )
        if row.key_id is not None:
            await self._authenticator.revoke_key(row.key_id)
        row.key_id = minted.id
        await self._records.set_key(row.id, minted.id)
        await self._runner.run(self._described(row, self._environment(row, key)))

    def _described(self, row: Program, environment: Mapping[str, str]) -> ProgramLaunch:
        return ProgramLaunch(
            program_id=row.id,
            owner=row.owner,
            module=row.module,
            source=row.source,
            args=tuple(row.args),
            model_id=row.model_id,
            environment=environment,
            restarts=row.restarts or 0,
        )

    def _environment(self, row: Program, key: str) -> Mapping[str, str]:
        variables = {
            names.BASE_URL: self._base_url,
            names.API_KEY: key,
            names.HF_ENDPOINT: f"{self._base_url}/hf",
            names.PROGRAM_ID: row.id,
            names.MODEL_ID: row.model_id,
            names.BASE_MODEL: row.base_model,
        }
        return {name: value for name, value in variables.items() if value is not None}

    async def _fail(self, row: Program, message: str) -> None:
        restarts = row.restarts or 0
        await self._record(row.id, ProgramState(ProgramPhase.FAILED, restarts, message=message))

    async def _write_changes(self) -> None:
        """Write the states that the runner reports, in order."""
        while True:
            program_id, state = await self._changes.get()
            try:
                await self._record(program_id, state)
            except Exception:
                log.exception("cannot record the state of a program", program_id=program_id)
            finally:
                self._changes.task_done()

    async def _record(self, program_id: str, state: ProgramState) -> None:
        if state.phase.is_final:
            # Before anybody can see that it ended.
            row = await self._records.program(program_id)
            if row is not None and row.key_id is not None:
                await self._authenticator.revoke_key(row.key_id)
        is_new = await self._records.set_state(
            program_id,
            phase=state.phase,
            restarts=state.restarts,
            exit_code=state.exit_code,
            message=state.message,
            started_at=state.started_at,
        )
        if is_new and state.phase.is_final:
            log.info("program ended", program_id=program_id, phase=state.phase, why=state.message)

    async def find(self, program_id: str, caller: Principal) -> Program:
        """Return a program that exists for this caller.

        Raises:
            NotFound: it does not exist for this caller.
        """
        found = caller.require(await self._records.program(program_id), f"program {program_id!r}")
        caller.named_objects.add(program_id)
        return found

    async def halt(self, program_id: str, caller: Principal) -> ProgramInfo:
        """Stop a program. Idempotent: a program that has ended stays as it is.

        Raises:
            NotFound: it does not exist for this caller.
        """
        row = await self.find(program_id, caller)
        if ProgramPhase(row.phase).is_final:
            return describe(row)
        await self._stop(row, "stopped by its owner")
        return describe(await self.find(program_id, caller))

    async def halt_models(self, model_ids: Collection[str]) -> None:
        """Stop the programs that were started for models, which are about to be deleted."""
        for row in await self._records.unfinished():
            if row.model_id in model_ids:
                await self._stop(row, "its model was deleted")

    async def _stop(self, row: Program, why: str) -> None:
        await self._runner.halt(row.id)
        await self._changes.join()
        await self._record(row.id, ProgramState(ProgramPhase.STOPPED, row.restarts, message=why))

    async def logs(self, program_id: str, caller: Principal, max_bytes: int) -> str:
        """Return the newest output of a program.

        Raises:
            NotFound: it does not exist for this caller.
        """
        await self.find(program_id, caller)
        output = await self._runner.logs(program_id, min(max_bytes, LOG_BYTES))
        return output.decode(errors="replace")

    async def report(
        self, program_id: str, progress: ProgramProgress, caller: Principal
    ) -> ProgramInfo:
        """Merge a progress report of a program, which sends it with its own key.

        Returns:
            The program with it.

        Raises:
            NotFound: the program does not exist for this caller.
            InvalidRequest: the key is not the program's own, or `state` is too large.
        """
        row = await self.find(program_id, caller)
        if caller.key_id != row.key_id:
            raise InvalidRequest(
                f"program {program_id!r}: only the program itself reports progress, with its own"
                " API key"
            )
        merged = row.progress | progress.model_dump(mode="json", exclude_none=True)
        size = len(ProgramProgress.model_validate(merged).model_dump_json().encode())
        if size > names.MAX_STATE_BYTES:
            raise InvalidRequest(
                f"progress: has {size} bytes as JSON; at most {names.MAX_STATE_BYTES} are accepted,"
                " so keep only what resuming needs"
            )
        await self._records.set_progress(program_id, merged)
        row.progress = merged
        return describe(row)

    async def list(self, owner: str | None, offset: int, limit: int) -> list[ProgramInfo]:
        """Return programs, newest first, without their `state`; owner None means all owners."""
        rows = await self._records.programs(owner, Page(offset, limit))
        return [summary(row) for row in rows]

    async def failed(self, owner: str | None, since: datetime) -> Sequence[ProgramInfo]:
        """Return programs that have failed since a time, as `list`."""
        return [summary(row) for row in await self._records.failed(owner, since)]


def _rlve_program(config: RlveConfig, model_id: str, base_model: str, owner: str) -> Program:
    return Program(
        id=f"rlve-{secrets.token_hex(8)}",
        owner=owner,
        name="rlve",
        base_model=base_model,
        model_id=model_id,
        module=rlve.MODULE,
        source=None,
        args=[config.model_dump_json(exclude_defaults=True)],
        phase=ProgramPhase.PENDING,
    )


def rlve_program_id(model_id: str) -> str:
    """Return the id of the RLVE program that create_model starts for a model."""
    return f"rlve-{hashlib.sha256(model_id.encode()).hexdigest()[:16]}"


def describe(row: Program) -> ProgramInfo:
    """Return a program as clients see it."""
    return ProgramInfo(
        program_id=row.id,
        owner=row.owner,
        name=row.name,
        base_model=row.base_model,
        model_id=row.model_id,
        phase=ProgramPhase(row.phase),
        restarts=row.restarts or 0,
        exit_code=row.exit_code,
        message=row.message,
        progress=ProgramProgress.model_validate(row.progress or {}),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def summary(row: Program) -> ProgramInfo:
    """Return a program as in lists: without the state from which it resumes."""
    info = describe(row)
    progress = info.progress.model_copy(update={"state": None})
    return info.model_copy(update={"progress": progress})


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
