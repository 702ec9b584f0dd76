"""Delete all TrainingSessions of a namespace and wait until they are gone.

Runs before the operator is uninstalled, because only the operator can request last checkpoints.
"""

import os
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from kubernetes import client, config, watch

SCOPE = ("tinkercloud.dev", "v1alpha1", os.environ["NAMESPACE"])
SESSIONS = (*SCOPE, "trainingsessions")
BASE_MODELS = (*SCOPE, "basemodels")
TIMEOUT_SECONDS = int(os.environ["TIMEOUT_SECONDS"])
DEADLINE = time.monotonic() + TIMEOUT_SECONDS
CLOSED_UNTIL = "tinkercloud.dev/pool-closed-until"
MEMBERS = {"Trainer", "Sampler"}
"""Roles of sessions that pool clusters may serve."""
CLOSED = timedelta(seconds=TIMEOUT_SECONDS, minutes=10)
"""Long enough for Helm to remove the operator afterwards."""


def close_pools(api: client.CustomObjectsApi) -> None:
    """Keep the operator from replacing the clusters of pools, and warm spares."""
    until = (datetime.now(UTC) + CLOSED).strftime("%Y-%m-%dT%H:%M:%SZ")
    patch = {"metadata": {"annotations": {CLOSED_UNTIL: until}}}
    for base_model in api.list_namespaced_custom_object(*BASE_MODELS)["items"]:
        spec = base_model["spec"]
        if spec.get("sharing") == "Shared" or spec.get("warmSpares"):
            api.patch_namespaced_custom_object(*BASE_MODELS, base_model["metadata"]["name"], patch)


def role_of(session: dict[str, Any]) -> str:
    """Return the role of a session."""
    return str(session["spec"].get("role", "Trainer"))


def delete(api: client.CustomObjectsApi, session: dict[str, Any]) -> None:
    """Delete a session unless it is gone or already being deleted."""
    if session["metadata"].get("deletionTimestamp"):
        return
    try:
        api.delete_namespaced_custom_object(*SESSIONS, session["metadata"]["name"])
    except client.ApiException as error:
        if error.status != 404:
            raise


def delete_all(api: client.CustomObjectsApi, roles: set[str]) -> set[str]:
    """Delete all sessions of some roles, also new ones, and return the remaining ones."""
    listed = api.list_namespaced_custom_object(*SESSIONS)
    found = [session for session in listed["items"] if role_of(session) in roles]
    left = {session["metadata"]["name"] for session in found}
    for session in found:
        delete(api, session)
    if not left:
        return left
    changes = watch.Watch().stream(
        api.list_namespaced_custom_object,
        *SESSIONS,
        resource_version=listed["metadata"]["resourceVersion"],
        timeout_seconds=max(1, round(DEADLINE - time.monotonic())),
    )
    for change in changes:
        session = change["object"]
        if role_of(session) not in roles:
            continue
        if change["type"] == "DELETED":
            left.discard(session["metadata"]["name"])
        else:
            left.add(session["metadata"]["name"])
            delete(api, session)
        if not left:
            break
    return left


def main() -> None:
    """Delete all sessions, and exit with an error if some remain."""
    config.load_config()
    try:
        api = client.CustomObjectsApi()
        close_pools(api)
        # The heads of pool clusters save the last checkpoints of the sessions on them.
        left = delete_all(api, MEMBERS) or delete_all(api, MEMBERS | {"Pool", "Spare"})
    except client.ApiException as error:
        if error.status != 404:
            raise
        return
    if left:
        sys.exit(f"sessions not deleted within {TIMEOUT_SECONDS} s: {', '.join(sorted(left))}")


main()
