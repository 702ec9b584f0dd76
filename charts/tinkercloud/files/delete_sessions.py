"""Delete all TrainingSessions of a namespace and wait until they are gone.

Runs before the operator is uninstalled, because only the operator can request last checkpoints.
"""

import os
import sys
from typing import Any

from kubernetes import client, config, watch

SESSIONS = ("tinkercloud.dev", "v1alpha1", os.environ["NAMESPACE"], "trainingsessions")
TIMEOUT_SECONDS = int(os.environ["TIMEOUT_SECONDS"])


def delete(api: client.CustomObjectsApi, session: dict[str, Any]) -> None:
    """Delete a session unless it is gone or already being deleted."""
    if session["metadata"].get("deletionTimestamp"):
        return
    try:
        api.delete_namespaced_custom_object(*SESSIONS, session["metadata"]["name"])
    except client.ApiException as error:
        if error.status != 404:
            raise


def delete_all(api: client.CustomObjectsApi) -> set[str]:
    """Delete all sessions, also those created in the meantime, and return the remaining ones."""
    listed = api.list_namespaced_custom_object(*SESSIONS)
    left = {session["metadata"]["name"] for session in listed["items"]}
    for session in listed["items"]:
        delete(api, session)
    if not left:
        return left
    changes = watch.Watch().stream(
        api.list_namespaced_custom_object,
        *SESSIONS,
        resource_version=listed["metadata"]["resourceVersion"],
        timeout_seconds=TIMEOUT_SECONDS,
    )
    for change in changes:
        session = change["object"]
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
        left = delete_all(client.CustomObjectsApi())
    except client.ApiException as error:
        if error.status != 404:
            raise
        return
    if left:
        sys.exit(f"sessions not deleted within {TIMEOUT_SECONDS} s: {', '.join(sorted(left))}")


main()
