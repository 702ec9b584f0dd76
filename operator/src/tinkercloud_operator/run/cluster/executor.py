"""Executes plans: writes to the API server and save requests to heads, all of them repeatable."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, find, timestamp
from tinkercloud_crds.names import Names
from tinkercloud_crds.training_session import TrainingSessionStatus
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import Conflict, NotFound, Rejected
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator import metrics
from tinkercloud_operator.children.secret_marker import secret_marker
from tinkercloud_operator.decide.session.actions import (
    Action,
    Apply,
    CreateSecret,
    CreateSecretMarker,
    Delete,
    DeleteSession,
    Plan,
    PostEvent,
    RemoveModel,
    SaveRequest,
    SetFinalizer,
)
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.spec.observed import Observed

log = structlog.get_logger(__name__)


class Executor:
    """Executes plans. Belongs to one event loop.

    Args:
        cluster: the Kubernetes API.
        head_saver: receives save requests.
        note_child: called with the kind and the new state of a child after a write.
        note_own: called with the kind and the new state of one of our own objects after a write;
            unlike a watch event, it does not need another reconciliation.
        storable: returns a status of one of our kinds without fields that the served CRD cannot
            store.
    """

    def __init__(
        self,
        cluster: Client,
        head_saver: HeadSaver,
        note_child: Callable[[str, Manifest], object],
        note_own: Callable[[str, Manifest], object],
        storable: Callable[[str, Manifest], Manifest],
    ) -> None:
        self._cluster = cluster
        self._head_saver = head_saver
        self._note_child = note_child
        self._note_own = note_own
        self.storable = storable
        self._rejections: dict[str, str] = {}

    def rejection(self, session: str) -> str | None:
        """Return why the last write for a session was rejected, if it was."""
        return self._rejections.get(session)

    def forget(self, session: str) -> None:
        """Forget a deleted session."""
        self._rejections.pop(session, None)

    async def execute(self, observed: Observed, plan: Plan) -> bool:
        """Execute a plan; return whether to reconcile the session again at once.

        Raises:
            KubernetesError: an action failed. If it was rejected, the status says so.
        """
        rejection = None
        for actions in plan.stages:
            done = await asyncio.gather(
                *(self._do(observed, action) for action in actions), return_exceptions=True
            )
            rejection = _first_rejection(done)
            if rejection is not None:
                break
        if self._remember(observed.session.name, rejection):
            return True
        await self._report(observed, plan)
        if rejection is not None:
            raise rejection
        return False

    async def _report(self, observed: Observed, plan: Plan) -> None:
        """Post the Event and write the status, concurrently."""
        writes: list[Awaitable[None]] = []
        if plan.event is not None:
            writes.append(self._post_event(observed, plan.event))
        if plan.status is not None:
            writes.append(self._write_status(observed, plan.status))
        for result in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _remember(self, session: str, rejection: Rejected | None) -> bool:
        """Record the rejection, if any; return whether a rejection appeared or disappeared.

        A different message is not a change: some admission plugins never repeat a message.
        """
        before = self._rejections.pop(session, None)
        if rejection is not None:
            self._rejections[session] = str(rejection)
        return (before is None) != (rejection is None)

    async def _do(self, observed: Observed, action: Action) -> None:
        match action:
            case Apply(manifest):
                self._note_child(manifest["kind"], await self._cluster.apply(manifest))
            case CreateSecret():
                await self._create_secret(observed, action)
            case CreateSecretMarker():
                await self._create_secret_marker(observed, action)
            case Delete(key):
                uid = observed.children.own[key]["metadata"]["uid"]
                await self._cluster.delete(ObjectRef(key.kind, key.name), uid)
            case SaveRequest() | RemoveModel():
                self._head_saver.submit(observed.session.name, action)
            case SetFinalizer(present):
                await (
                    self._add_finalizer(observed) if present else self._remove_finalizer(observed)
                )
            case DeleteSession():
                ref = ObjectRef("TrainingSession", observed.session.name)
                await self._cluster.delete(ref, observed.session.uid)

    async def _create_secret(self, observed: Observed, action: CreateSecret) -> None:
        token = base64.b64encode(secrets.token_urlsafe(32).encode()).decode()
        data = dict.fromkeys(action.token_keys, token)
        try:
            await self._cluster.create({**action.manifest, "data": data})
        except Conflict:
            await self._own_secret(observed)

    async def _create_secret_marker(self, observed: Observed, action: CreateSecretMarker) -> None:
        secret = await self._own_secret(observed)
        manifest = secret_marker(action.manifest, secret["metadata"]["uid"])
        self._note_child(manifest["kind"], await self._cluster.apply(manifest))

    async def _own_secret(self, observed: Observed) -> Manifest:
        """Return the session's Secret.

        Raises:
            Rejected: it belongs to another owner.
            KubernetesError: it could not be read.
        """
        name = Names(observed.session.name).token_secret
        secret = await self._cluster.get(ObjectRef("Secret", name))
        owners = secret["metadata"].get("ownerReferences", [])
        if all(owner["uid"] != observed.session.uid for owner in owners):
            raise Rejected(
                f"Secret {name} does not belong to this session, but to a deleted session with the"
                " same name or to another owner; retrying"
            )
        return secret

    async def _add_finalizer(self, observed: Observed) -> None:
        # With the uid, the apply cannot recreate a session that was deleted in the meantime.
        session = observed.session
        own = {"name": session.name, "uid": session.uid, "finalizers": [labels.FINALIZER]}
        applied = await self._cluster.apply(
            {"apiVersion": labels.API_VERSION, "kind": "TrainingSession", "metadata": own}
        )
        self._note_own("TrainingSession", applied)

    async def _remove_finalizer(self, observed: Observed) -> None:
        """Remove the finalizer from a session.

        Not with server-side apply, which keeps a finalizer that another field manager has set as
        well, as in a session restored from a backup or from an exported file.
        """
        ref = ObjectRef("TrainingSession", observed.session.name)
        try:
            metadata = (await self._cluster.get(ref))["metadata"]
            if metadata["uid"] == observed.session.uid:
                left = [held for held in metadata.get("finalizers", []) if held != labels.FINALIZER]
                now = {"resourceVersion": metadata["resourceVersion"], "finalizers": left}
                patched = await self._cluster.merge(ref, {"metadata": now})
                self._note_own("TrainingSession", patched)
        except NotFound:
            # The session was deleted after it was observed.
            log.debug("the session is already gone", session=observed.session.name)

    async def _write_status(self, observed: Observed, status: TrainingSessionStatus) -> None:
        content = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        session = observed.session
        await self.write_status("TrainingSession", session.name, session.uid, content)
        metrics.RESTARTS.inc(status.restarts - session.status.restarts)
        if _became_ready(observed, status):
            age = (datetime.now(UTC) - session.created).total_seconds()
            metrics.READY_SECONDS.observe(age)

    async def write_status(self, kind: str, name: str, uid: str, content: Manifest) -> None:
        """Write the status of a session or a BaseModel, unless it was deleted.

        Raises:
            KubernetesError: it could not be written.
        """
        manifest = {
            "apiVersion": labels.API_VERSION,
            "kind": kind,
            "metadata": {"name": name, "uid": uid},
            "status": self.storable(kind, content),
        }
        try:
            self._note_own(kind, await self._cluster.apply_status(manifest))
        except NotFound:
            log.debug("the object was deleted before its status was written", kind=kind, name=name)

    async def _post_event(self, observed: Observed, action: PostEvent) -> None:
        """Post an Event; its name derives from its content, which drops duplicates."""
        content = f"{observed.session.uid}/{action.reason}/{action.message}"
        name = f"{observed.session.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        try:
            await self._cluster.create(_event(observed, action, name))
        except (Conflict, Rejected):
            log.debug(
                "the Event already exists or was rejected",
                session=observed.session.name,
                reason=action.reason,
            )


def _first_rejection(results: Sequence[BaseException | None]) -> Rejected | None:
    """Return the first rejection, if there is one; raise errors of any other kind."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, Rejected):
            raise error
    return next((error for error in errors if isinstance(error, Rejected)), None)


def _became_ready(observed: Observed, status: TrainingSessionStatus) -> bool:
    now = find(status.conditions, ConditionType.READY)
    is_first = observed.session.status.incarnation is None
    return is_first and now is not None and now.status == "True"


def _event(observed: Observed, action: PostEvent, name: str) -> dict[str, Any]:
    moment = timestamp(observed.now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": observed.session.namespace},
        "involvedObject": {
            "apiVersion": labels.API_VERSION,
            "kind": "TrainingSession",
            "name": observed.session.name,
            "namespace": observed.session.namespace,
            "uid": observed.session.uid,
        },
        "reason": action.reason,
        "message": action.message[:1024],
        "type": "Warning" if action.is_warning else "Normal",
        "source": {"component": labels.OPERATOR_FIELD_MANAGER},
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
