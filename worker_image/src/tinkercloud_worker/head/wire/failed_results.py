"""Failed results of requests."""

import errno

import orjson
import structlog
from obstore.exceptions import BaseError

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded, WireError
from tinkercloud_protocol.wire.future_responses import Result, failed, failed_with
from tinkercloud_worker.checkpoints.store import StoreFailed

log = structlog.get_logger(__name__)


class Moved(WireError):
    """Another head continues the model; the request must be sent there."""

    status = routes.WRONG_GENERATION_STATUS

    def __init__(self, model_id: str) -> None:
        super().__init__(f"model {model_id} was moved to another session head")


def error_message(result: Result) -> str:
    """Return the message of a terminal failure."""
    return str(orjson.loads(result.body)["error"])


def too_much(error: Overloaded) -> InvalidRequest:
    """Return the failure of a request whose chunks can't all wait for the last one."""
    return InvalidRequest(
        f"data: {error.message}; a request cannot start until all of its chunks have arrived. Send"
        " the data in several calls before optim_step: their gradients add up"
    )


def with_advice(result: Result) -> Result:
    """Return the failure of an optim_step, with a note that the gradient was dropped."""
    answer = orjson.loads(result.body)
    return failed(
        f"{answer['error']}; the gradient was dropped: send the step's data again, then optim_step",
        answer["category"],
    )


def to_result(error: Exception) -> Result:
    """Convert an exception to a failed result; unexpected ones are logged, not shown."""
    if isinstance(error, WireError):
        return failed_with(error)
    log.error("request failed unexpectedly", exc_info=error)
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return failed(
            "the session head's disk is full (no space left on device): ask an administrator"
            " to free space in its scratch folder, then send the request again",
            "server",
        )
    return failed(
        f"internal error ({type(error).__name__}); see the session head's log for details", "server"
    )


def disk_failure(error: Exception) -> str:
    """Return why a snapshot could not be written to the local disk.

    The message of a store would be about the checkpoint store.
    """
    cause = error.__cause__ if isinstance(error, StoreFailed) else error
    if isinstance(cause, OSError | BaseError):
        # Further lines repeat the first one for developers.
        return f"the folder of journals can't be written ({str(cause).partition(chr(10))[0]})"
    return error_message(to_result(error))
