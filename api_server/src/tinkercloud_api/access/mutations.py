"""Which requests change something, and what the audit log calls them."""

import re

from tinkercloud_protocol.wire import routes

_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_READS = {
    f"{routes.PREFIX}{name}"
    for name in (
        *("auth/token", "client/config", "client/dynamic_config", "telemetry", "get_info"),
        *("weights_info", "checkpoints/search", "sessions/search"),
        "retrieve_future",
    )
}
"""Paths to which clients POST in order to read."""
_WORK = {
    f"{routes.PREFIX}{name}"
    for name in (
        *("forward_backward", "forward", "optim_step", "asample", "sample"),
        *("session_heartbeat", "cancel_future", "cleanup_futures", "join_sampling_session"),
    )
}
"""Paths of requests that train, sample or report. They are too many for the audit log; the ledger
of usage counts what they compute."""
_PROGRESS = re.compile(rf"{routes.PREFIX}programs/[^/]+/progress")

_CHECKPOINT = rf"{routes.PREFIX}training_runs/[^/]+/checkpoints/.+"
_EVENTS = (
    ("POST", rf"{_CHECKPOINT}/publish", "checkpoint_publish"),
    ("DELETE", rf"{_CHECKPOINT}/publish", "checkpoint_unpublish"),
    ("PUT", rf"{_CHECKPOINT}/ttl", "checkpoint_ttl_set"),
    ("DELETE", _CHECKPOINT, "checkpoint_delete"),
    ("POST", rf"{routes.PREFIX}(save_weights|save_weights_for_sampler)", "checkpoint_write"),
    ("POST", rf"{routes.PREFIX}save_weights_external", "checkpoint_export"),
    ("POST", rf"{routes.PREFIX}load_weights", "checkpoint_read"),
    ("POST", rf"{routes.PREFIX}copy_weights", "checkpoint_copy"),
    (".*", rf"{routes.PREFIX}(checkpoints/uploads|external_weights_upload).*", "checkpoint_import"),
    ("PUT", r"/uploads/.+", "checkpoint_import"),
    ("POST", rf"{routes.PREFIX}create_session", "session_create"),
    ("POST", rf"{routes.PREFIX}sessions/[^/]+/finish", "session_finish"),
    ("PUT", rf"{routes.PREFIX}sessions/[^/]+/project", "project_session_assign"),
    ("DELETE", rf"{routes.PREFIX}sessions/[^/]+", "session_delete"),
    ("POST", rf"{routes.PREFIX}projects", "project_create"),
    ("PATCH", rf"{routes.PREFIX}projects/[^/]+", "project_rename"),
    ("DELETE", rf"{routes.PREFIX}projects/[^/]+", "project_delete"),
    ("PUT", rf"{routes.PREFIX}projects/[^/]+/members/.+", "project_grant_set"),
    ("DELETE", rf"{routes.PREFIX}projects/[^/]+/members/.+", "project_grant_remove"),
    ("POST", rf"{routes.PREFIX}create_model", "model_create"),
    ("POST", rf"{routes.PREFIX}attach_model", "model_attach"),
    ("POST", rf"{routes.PREFIX}(unload|delete)_model", "model_delete"),
    ("POST", rf"{routes.PREFIX}create_sampling_(session|client)", "sampler_create"),
    ("POST", rf"{routes.PREFIX}create_custom_loss", "loss_create"),
    ("POST", rf"{routes.PREFIX}programs/[^/]+/stop", "program_stop"),
    ("POST", rf"{routes.PREFIX}programs", "program_start"),
    ("DELETE", rf"{routes.PREFIX}auth/apikey/me", "key_revoke"),
    ("POST", routes.OPENAI_SESSIONS, "recorded_session_create"),
    ("DELETE", rf"{routes.OPENAI_SESSIONS}/[^/]+", "recorded_session_delete"),
)
"""Method, path and event, `<resource>_<action>` as in `tinker.types.AuditLogEntry`."""
_COMPILED = [(re.compile(method), re.compile(path), event) for method, path, event in _EVENTS]


def is_mutation(method: str, path: str) -> bool:
    """Return whether a request changes something or uses the engine."""
    if method in _SAFE_METHODS or path in _READS:
        return False
    return not path.startswith(f"{routes.RETRIEVE_FUTURE}/")


def audited_event(method: str, path: str) -> str | None:
    """Return the event of a request for the audit log; None for requests that it does not keep."""
    if not is_mutation(method, path) or path in _WORK or _PROGRESS.fullmatch(path):
        return None
    for methods, paths, event in _COMPILED:
        if methods.fullmatch(method) and paths.fullmatch(path):
            return event
    # Other requests of chat clients only sample.
    return "unknown_request" if path.startswith(routes.PREFIX) else None
