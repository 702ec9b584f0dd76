"""Rebuilds requests that another head had accepted, from its suspended state or its journal."""

from collections.abc import Sequence, Set

import orjson
import structlog

from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.wire.json_model import parse_json
from tinkercloud_worker.checkpoints.suspended import SuspendedHead
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.queued_request import (
    REFUSED,
    Operation,
    QueuedRequest,
    RequestSource,
    Role,
    refusal,
)
from tinkercloud_worker.journal.records import Record

log = structlog.get_logger(__name__)


def restored_operation(
    model: LiveModel, seq_id: int, path: str, role: Role, body: bytes
) -> Operation:
    """Return the operation of a stored request; one that this release rejects fails."""
    if path == REFUSED:
        return refusal(requests.restored_error(body), role)
    try:
        request = requests.read(path, body)
    except InvalidRequest as error:
        return refusal(error, role)
    return model.operation(requests.with_number(request, seq_id), RequestSource(path, body))


def repeated(
    model: LiveModel, records: Sequence[Record], next_seq_id: int, known: Set[int]
) -> list[QueuedRequest]:
    """Return the requests of a journal that have not run in a state.

    Keys of requests that were sent without a number are recorded in the model.

    Args:
        model: the model.
        records: the journal; it may start before the state was copied.
        next_seq_id: number of the next request of the state.
        known: numbers of the requests that wait in the state. Only their outcomes are returned.
    """
    found = dict[int, QueuedRequest]()
    for record in records:
        entry = record.entry
        # The outcome of a request follows it, if no head may compute it once more.
        is_outcome = entry.path == REFUSED
        if entry.seq_id < next_seq_id or (entry.seq_id in known and not is_outcome):
            continue
        operation = restored_operation(model, entry.seq_id, entry.path, entry.role, record.body)
        digest = bytes.fromhex(entry.digest)
        found[entry.seq_id] = QueuedRequest(
            entry.seq_id, operation, digest, entry.size, entry.knows_of
        )
        if entry.key is not None:
            model.given_numbers.record(entry.seq_id, entry.key)
    return list(found.values())


def mark_read(results: Results, records: Sequence[Record]) -> None:
    """Mark the results that clients had read, so that they do not count as waiting for them."""
    for record in records:
        for request_id in record.entry.read:
            results.mark_read(request_id)


def published_sessions(
    model_id: ModelId, waiting: Sequence[QueuedRequest]
) -> list[SamplingSessionId]:
    """Return the sampling sessions of unnamed weights that waiting requests publish."""
    sessions = []
    for source in (each.operation.source for each in waiting):
        if source is not None and source.path == routes.SAVE_WEIGHTS_FOR_SAMPLER:
            request = orjson.loads(source.body)
            index = request.get("sampling_session_seq_id")
            if request.get("path") is None and index is not None:
                sessions.append(SamplingSessionId(model_id.session_id, index))
    return sessions


def unfinished_samples(head: SuspendedHead) -> list[SampleRequest]:
    """Return the sampling requests that this release can parse."""
    samples = []
    for span in head.state.samples:
        try:
            samples.append(parse_json(SampleRequest, head.body(span)))
        except InvalidRequest as error:
            log.warning(
                "dropped a stored sampling request, which this release rejects",
                reason=error.message,
            )
    return samples
