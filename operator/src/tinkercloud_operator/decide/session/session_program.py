"""A session's program: the children that it needs, and its status. Pure.

The Job is created once the session is Ready. It is deleted, which ends the program's pod, when the
program is stopped, when its session is suspended by its owner or ends, and when `spec.program` is
replaced or removed. It is kept while a session moves to other nodes: the program's requests wait.
The Job of a program that has ended by itself is kept with the session, and so are its logs.
"""

from collections.abc import Iterable

from tinkercloud_crds.conditions import MAX_MESSAGE_LENGTH, timestamp
from tinkercloud_crds.names import Names
from tinkercloud_crds.pods.program_fields import Program, ProgramStatus
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.children.pods import Json
from tinkercloud_operator.children.program import ProgramBuild, program_job, program_policy
from tinkercloud_operator.decide.pods.failure_limits import PERSISTENT_FAILURES
from tinkercloud_operator.decide.read.program_facts import (
    current_job,
    end_of,
    has_ended,
    is_running,
    last_status,
    newest_pod,
)
from tinkercloud_operator.decide.session.lifetime import Decision, DesiredState
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey, Observed

_RESUMES = "the program starts again when the session is resumed"


def program_children(
    observed: Observed, decision: Decision, settings: Settings, *, is_ready: bool
) -> list[Json]:
    """Return the children that a program needs now, without owner references.

    Args:
        observed: the observed session.
        decision: the desired state of the session.
        settings: settings of the operator.
        is_ready: whether the session is Ready, which a program needs in order to start.
    """
    build = _build(observed, settings)
    if build is None or _why_not(observed, decision) is not None:
        return []
    is_new = current_job(observed) is None
    # The pods of a deleted Job may still run.
    if is_new and (not is_ready or observed.program_job is not None or observed.pods.of_program):
        return []
    policies = [program_policy(build)] if settings.network_policies else []
    return [*policies, program_job(build)]


def surplus_of_program(observed: Observed, decision: Decision | None) -> Iterable[ChildKey]:
    """Yield the children of a program that are to be deleted.

    Args:
        observed: the observed session.
        decision: the desired state of the session; None if it is being deleted.
    """
    job, key = observed.program_job, Names(observed.session.name).program
    is_current = current_job(observed) is not None
    is_over = decision is None or _why_not(observed, decision) is not None
    is_kept = is_current and (has_ended(observed) or not is_over)
    if job is not None and not is_kept and "deletionTimestamp" not in job["metadata"]:
        yield ChildKey("Job", key)
    policy = ChildKey("NetworkPolicy", key)
    is_needed = job is not None or bool(observed.pods.of_program) or not is_over
    if policy in observed.children.own and not is_needed:
        yield policy


def is_of_program(key: ChildKey, observed: Observed) -> bool:
    """Return whether a child belongs to the session's program and not to its own pods."""
    policy = ChildKey("NetworkPolicy", Names(observed.session.name).program)
    return key.kind == "Job" or key == policy


def _build(observed: Observed, settings: Settings) -> ProgramBuild | None:
    program, base_model = observed.session.spec.program, observed.base_model
    offer = base_model.programs if base_model is not None else None
    if program is None or offer is None or settings.api_url is None:
        return None
    session = observed.session
    return ProgramBuild(
        Names(session.name), session.spec, program, offer, settings, settings.api_url
    )


def _why_not(observed: Observed, decision: Decision) -> str | None:
    """Return why the program is to have no Job, if so."""
    program = observed.session.spec.program
    if program is None:
        return "there is no program"
    if has_ended(observed):
        return "the program has ended"
    if program.stop:
        return "spec.program.stop is true"
    if decision.desired in {DesiredState.FINISHED, DesiredState.DELETED}:
        return f"the session has ended: {decision.message}"
    if decision.reason in PERSISTENT_FAILURES:
        return f"{decision.message}; {_RESUMES}"
    if observed.session.spec.suspend:
        return f"the session is suspended by its owner; {_RESUMES}"
    return None


def program_status(observed: Observed, decision: Decision | None) -> ProgramStatus | None:
    """Return the status of a session's program, if it has one.

    Args:
        observed: the observed session.
        decision: the desired state of the session; None if it is being deleted.
    """
    program = observed.session.spec.program
    if program is None:
        return None
    before = last_status(observed, program)
    if before.phase in {"Succeeded", "Failed"}:
        return before
    job = current_job(observed)
    if (end := end_of(job)) is not None and job is not None:
        return _ended(observed, before, job, end)
    why_not = None if decision is None else _why_not(observed, decision)
    if why_not is not None:
        return _held_back(observed, program, decision, why_not)
    if job is None:
        return _with(before, phase="Pending", job=None, finish_time=None, message=_waits(observed))
    return _active(observed, before, job)


def _ended(
    observed: Observed, before: ProgramStatus, job: Manifest, end: Manifest
) -> ProgramStatus:
    progress = _active(observed, before, job)
    finished = end.get("lastTransitionTime") or timestamp(observed.now)
    if end["type"] == "Complete":
        found = {"phase": "Succeeded", "message": None, "exit_code": 0}
        return progress.model_copy(update={**found, "finish_time": finished})
    why = f"{end.get('reason', 'Failed')}: {end.get('message', '')}"
    newest = newest_pod(observed)
    last = newest.failure if newest is not None and newest.failure else before.message
    failed = int(job.get("status", {}).get("failed") or 0)
    return _with(
        progress,
        phase="Failed",
        restarts=max(0, failed - 1),
        finish_time=finished,
        message=f"{last} ({why})" if last else why,
    )


def _held_back(
    observed: Observed, program: Program, decision: Decision | None, why: str
) -> ProgramStatus:
    """Return the status of a program without a Job, or whose Job is being deleted."""
    before = last_status(observed, program)
    if current_job(observed) is not None or observed.pods.of_program:
        return _with(before, message=f"the program is being stopped: {why}")
    is_over = decision is not None and decision.desired in {
        DesiredState.FINISHED,
        DesiredState.DELETED,
    }
    if not (program.stop or is_over):
        return _with(before, phase="Pending", job=None, message=why)
    finished = before.finish_time or timestamp(observed.now)
    return _with(before, phase="Stopped", job=None, finish_time=finished, message=why)


def _active(observed: Observed, before: ProgramStatus, job: Manifest) -> ProgramStatus:
    """Return the status of a program whose Job exists and has not ended."""
    status, newest = job.get("status", {}), newest_pod(observed)
    failures = sorted(
        (pod for pod in observed.pods.of_program if pod.failure), key=lambda pod: pod.created
    )
    last = failures[-1] if failures else None
    message = last.failure if last is not None else before.message
    if not is_running(observed):
        is_held = bool(job["spec"].get("suspend"))
        held = "its Job is suspended; Kueue has not admitted it" if is_held else None
        message = held or (newest.waits if newest is not None else None) or "its pod is starting"
    elif newest is not None and newest.waits:
        message = newest.waits
    elif before.phase != "Running" and last is None:
        message = None
    started = before.start_time or (status.get("startTime") if is_running(observed) else None)
    return _with(
        before,
        phase="Running" if is_running(observed) else "Pending",
        job=job["metadata"]["name"],
        restarts=int(status.get("failed") or 0),
        exit_code=last.exit_code if last is not None else before.exit_code,
        start_time=started,
        finish_time=None,
        message=message,
    )


def _waits(observed: Observed) -> str:
    base_model = observed.base_model
    if base_model is None or base_model.programs is None:
        return "the BaseModel allows no programs; set its spec.programs"
    if observed.program_job is not None or observed.pods.of_program:
        return "waiting for the end of the earlier program's pod"
    return "waiting for the session to be Ready"


def _with(before: ProgramStatus, **fields: object) -> ProgramStatus:
    message = fields.get("message", before.message)
    short = message[:MAX_MESSAGE_LENGTH] if isinstance(message, str) else message
    return before.model_copy(update={**fields, "message": short or None})
