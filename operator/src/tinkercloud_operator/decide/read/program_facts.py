"""What the Job and the pods of a session's program show: pure."""

from datetime import datetime

from tinkercloud_crds import labels
from tinkercloud_crds.pods.program_fields import Program, ProgramStatus
from tinkercloud_crds.times import parse_time
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.observed import Observed, ProgramPod

_ENDS = ("Complete", "Failed")
"""Conditions of a Job that has ended, together with all of its pods."""


def current_job(observed: Observed) -> Manifest | None:
    """Return the Job of `spec.program`; a replaced program may have left another one."""
    job, program = observed.program_job, observed.session.spec.program
    if job is None or program is None:
        return None
    made_for = job["metadata"].get("annotations", {}).get(labels.PROGRAM_ID, "")
    return job if made_for == (program.id or "") else None


def last_status(observed: Observed, program: Program) -> ProgramStatus:
    """Return the last written status of a program, or that of a new one."""
    before = observed.session.status.program
    return (
        before if before is not None and before.id == program.id else ProgramStatus(id=program.id)
    )


def end_of(job: Manifest | None) -> Manifest | None:
    """Return the condition by which a Job has ended, if it has."""
    conditions = (job or {}).get("status", {}).get("conditions", [])
    found = (each for each in conditions if each.get("status") == "True")
    return next((each for each in found if each.get("type") in _ENDS), None)


def has_ended(observed: Observed) -> bool:
    """Return whether the program of a session has ended by itself."""
    program = observed.session.spec.program
    if program is None:
        return False
    is_known = last_status(observed, program).phase in {"Succeeded", "Failed"}
    return is_known or end_of(current_job(observed)) is not None


def newest_pod(observed: Observed) -> ProgramPod | None:
    """Return the newest pod of a program."""
    return max(observed.pods.of_program, key=lambda pod: pod.created, default=None)


def is_running(observed: Observed) -> bool:
    """Return whether the program runs, or waits to be restarted; it then uses its session.

    A program that has never started, for example because its image cannot be pulled, does not.
    """
    job = current_job(observed)
    if job is None or has_ended(observed) or job["spec"].get("suspend"):
        return False
    newest = newest_pod(observed)
    before = observed.session.status.program
    was_running = before is not None and before.phase == "Running"
    has_failed = bool(job.get("status", {}).get("failed"))
    return has_failed or was_running or (newest is not None and newest.is_running)


def used_until(observed: Observed) -> datetime | None:
    """Return when the program ended, or was stopped; until then it used its session."""
    status = observed.session.status.program
    return parse_time(status.finish_time) if status is not None else None
