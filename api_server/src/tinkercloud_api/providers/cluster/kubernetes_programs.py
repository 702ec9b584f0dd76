"""Programs as Jobs next to TrainingSessions, which the operator runs.

A program that trains an existing model is added to the model's own TrainingSession. Any other gets
a TrainingSession, which serves the models that it creates. Its key and its source are in a Secret
that the session owns. Programs outlive this process: everything is in Kubernetes.
"""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from tinkercloud_api.providers.cluster import program_spec
from tinkercloud_api.providers.cluster.cluster_errors import wire_error
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.cluster.session_status import TrainingSessionView
from tinkercloud_api.providers.program_runner import ProgramChanged, ProgramLaunch, ProgramState
from tinkercloud_crds import labels
from tinkercloud_kube import errors
from tinkercloud_kube.client import ObjectRef
from tinkercloud_protocol.programs.program_messages import BASE_MODEL, ProgramPhase
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable

log = structlog.get_logger(__name__)

_SESSION_SECONDS = 30.0
"""Time within which the TrainingSession of a new model is expected."""
_LOG_LINES = 2000


class KubernetesPrograms:
    """Implements `providers.program_runner.ProgramRunner`. Belongs to one event loop.

    Args:
        provider: the provider of session heads, which must have started.
    """

    def __init__(self, provider: KubernetesProvider) -> None:
        self._provider = provider
        self._changed: ProgramChanged | None = None
        self._following: dict[str, asyncio.Task[None]] = {}
        """By program id: the task that reports its changes."""

    async def start(self, changed: ProgramChanged) -> None:
        """See `ProgramRunner.start`."""
        self._changed = changed

    async def close(self) -> None:
        """See `ProgramRunner.close`. Programs keep running."""
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)

    def refusal(self, base_model: str | None) -> str | None:
        """See `ProgramRunner.refusal`."""
        if base_model is None:
            return (
                "base_model: required on Kubernetes, where a program runs next to a"
                " TrainingSession; set base_model or model_id"
            )
        found = self._provider.base_model(base_model)
        if found is None:
            return f"base_model {base_model!r} is not served here"
        if found.spec.programs is None:
            return (
                f"base model {base_model!r} allows no programs; an administrator can set"
                f" spec.programs of BaseModel {found.name}"
            )
        return None

    async def resume(self, launch: ProgramLaunch) -> bool:
        """See `ProgramRunner.resume`."""
        session = self._session_with(launch.program_id)
        if session is not None:
            self._follow(launch.program_id, session.name)
        return session is not None

    async def run(self, launch: ProgramLaunch) -> None:
        """See `ProgramRunner.run`."""
        try:
            if launch.model_id is None:
                name = await self._run_alone(launch)
            else:
                name = await self._run_for_model(launch, launch.model_id)
        except errors.KubernetesError as error:
            raise wire_error(error) from None
        self._follow(launch.program_id, name)
        log.info("program added", program_id=launch.program_id, session=name)

    async def _run_alone(self, launch: ProgramLaunch) -> str:
        """Create a TrainingSession for a program; return its name."""
        base_model = launch.environment.get(BASE_MODEL)
        self._check(base_model)
        assert base_model is not None  # noqa: S101 - checked
        manifest = program_spec.training_session(launch, base_model, datetime.now(UTC))
        name = program_spec.session_name(launch)
        api, ref = self._provider.api, ObjectRef("TrainingSession", name)
        try:
            made = await api.create(manifest, is_strict=True)
        except errors.AlreadyExists:
            made = await api.get(ref)
        wanted = made["spec"]["program"]["apiKeySecret"]["name"]
        with suppress(errors.AlreadyExists):
            await api.create(program_spec.secret(launch, wanted, name, made["metadata"]["uid"]))
        return name

    async def _run_for_model(self, launch: ProgramLaunch, model_id: str) -> str:
        """Add a program to the TrainingSession of a model; return the session's name."""
        session = await self._session_of(model_id, launch.owner)
        self._check(session.spec.base_model)
        if session.spec.sharing == "Shared":
            raise InvalidRequest(
                f"model {model_id!r} is served from a shared pool, where no program can run next to"
                " it; start the program with base_model instead, which gives it its own pods"
            )
        before = session.spec.program
        if before is not None and before.id == launch.program_id:
            return session.name
        if not program_spec.is_replaceable(session):
            raise InvalidRequest(
                f"model {model_id!r} already has a program that has not ended; stop it first"
            )
        wanted, api = program_spec.program(launch), self._provider.api
        secret = program_spec.secret(launch, wanted.api_key_secret.name, session.name, session.uid)
        with suppress(errors.AlreadyExists):
            await api.create(secret)
        patch = {"metadata": {"uid": session.uid}, **program_spec.as_patch(wanted)}
        await api.merge(ObjectRef("TrainingSession", session.name), patch)
        return session.name

    def _check(self, base_model: str | None) -> None:
        if (why := self.refusal(base_model)) is not None:
            raise InvalidRequest(why)

    async def _session_of(self, model_id: str, owner: str) -> TrainingSessionView:
        """Return the TrainingSession that was created for a model; wait for that of a new one.

        Raises:
            NotFound: the owner has no such model with a session of its own.
        """
        sessions = self._provider.sessions
        with suppress(TimeoutError):
            async with asyncio.timeout(_SESSION_SECONDS):
                while True:
                    for session in sessions.objects():
                        if session.spec.model_id == model_id and session.spec.owner == owner:
                            return session
                    await sessions.any_change()
        raise NotFound(
            f"model {model_id!r} has no TrainingSession of its own; a program can train models"
            " that were created without the tag tinkercloud.dev/session and not unloaded since"
        )

    def _session_with(self, program_id: str) -> TrainingSessionView | None:
        """Return the TrainingSession with a program."""
        for session in self._provider.sessions.objects():
            if session.spec.program is not None and session.spec.program.id == program_id:
                return session
        return None

    def _follow(self, program_id: str, session: str) -> None:
        """Report the changes of a program's state from now on."""
        if program_id not in self._following:
            task = asyncio.create_task(self._report_changes(program_id, session))
            self._following[program_id] = task
            task.add_done_callback(lambda _: self._following.pop(program_id, None))

    async def _report_changes(self, program_id: str, name: str) -> None:
        sessions, last = self._provider.sessions, ProgramState(ProgramPhase.PENDING)
        if (session := sessions.get(name)) is None:
            await sessions.changed(name, None)
            session = sessions.get(name)
        while session is not None and not last.phase.is_final:
            status = program_spec.status_of(session, program_id)
            state = last if status is None else program_spec.state_of(status)
            if state != last:
                self._report(program_id, state)
                last = state
            if not last.phase.is_final:
                await sessions.changed(name, session)
                session = sessions.get(name)
        if not last.phase.is_final:
            why = f"TrainingSession {name} was deleted"
            self._report(program_id, ProgramState(ProgramPhase.STOPPED, last.restarts, message=why))

    def _report(self, program_id: str, state: ProgramState) -> None:
        if self._changed is not None:
            self._changed(program_id, state)

    async def halt(self, program_id: str) -> None:
        """See `ProgramRunner.halt`. The operator ends the pod within its grace period."""
        session = self._session_with(program_id)
        if session is None:
            return
        patch = {"metadata": {"uid": session.uid}, "spec": {"program": {"stop": True}}}
        try:
            await self._provider.api.merge(ObjectRef("TrainingSession", session.name), patch)
        except errors.NotFound:
            log.info("the session is already gone", session=session.name)
        except errors.KubernetesError as error:
            raise Unavailable(wire_error(error).message) from None

    async def logs(self, program_id: str, max_bytes: int) -> bytes:
        """See `ProgramRunner.logs`: of the newest attempt that has any output."""
        session = self._session_with(program_id)
        if session is None:
            return b""
        try:
            return (await self._newest_output(session.name))[-max_bytes:]
        except errors.KubernetesError as error:
            raise Unavailable(wire_error(error).message) from None

    async def _newest_output(self, session: str) -> bytes:
        api, selector = self._provider.api, f"{labels.PROGRAM_LABEL}={session}"
        pods = [pod async for page in api.pages("Pod", selector) for pod in page.items]
        pods.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
        for pod in pods:
            with suppress(errors.NotFound, errors.Rejected):
                if output := await api.log(pod["metadata"]["name"], _LOG_LINES):
                    return output
        return b""
