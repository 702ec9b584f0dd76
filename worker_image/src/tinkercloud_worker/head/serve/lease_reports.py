"""Reports of a head to the API servers that hold its lease: usage, curves, samples, durability.

A report has what has changed since the previous one on the same connection, and the first has
everything. A head that is killed loses what it has not reported: the usage of about a second.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from tinkercloud_protocol.heads.durability_settings import DurabilityReport
from tinkercloud_protocol.heads.reports.kept_samples import KeptSample, SampleReport
from tinkercloud_protocol.heads.reports.thinned_curves import Curve, CurvePoint, CurveReport
from tinkercloud_protocol.heads.reports.usage_reports import UsageEntry, UsageReport
from tinkercloud_worker.engine.sampling.growing_text import Decode
from tinkercloud_worker.engine.sampling.kept_samples import TokenSample
from tinkercloud_worker.engine.turns.usage_counts import HourOfUsage
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.durable_runs import Durability

log = structlog.get_logger(__name__)

_GATHER_SECONDS = 1.0
"""Delay of a report after a request completes; requests that complete meanwhile are included."""
_MAX_ENTRIES = 50
"""Entries or points of a line."""


async def lease_reports(
    backend: Backend, durability: Durability, drained: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield reports, one a line, whenever usage, a curve or durability has changed.

    Samples change with the usage.

    Args:
        backend: the parts of the head.
        durability: the journals of its models.
        drained: set when nothing is computed any more; the last report follows immediately.
    """
    changed = asyncio.Event()
    changed.set()
    ended = asyncio.create_task(drained.wait())
    revision, num_samples = 0, 0
    reported: Mapping[str, str | None] | None = None
    curves = Reported()
    with (
        backend.usage.notifying(changed.set),
        backend.curves.notifying(changed.set),
        durability.observed_by(changed.set),
    ):
        try:
            is_last = False
            while not is_last:
                await _until_set(changed, ended)
                await asyncio.wait({ended}, timeout=_GATHER_SECONDS)
                # Before the counts are read: what is counted later needs another report.
                is_last = ended.done()
                changed.clear()
                states = durability.states()
                if states != reported:
                    reported = states
                    report = DurabilityReport(generation=backend.config.generation, models=states)
                    yield report.model_dump_json().encode() + b"\n"
                # In a thread, because the first report has everything.
                revision, counts = await asyncio.to_thread(backend.usage.changes, revision)
                for line in _usage(backend, counts):
                    yield line
                for changed_curve in curve_changes(backend, curves):
                    # In a thread, because the first report has everything.
                    for line in await asyncio.to_thread(curve_lines, changed_curve):
                        yield line
                num_samples, kept = backend.kept_samples.since(num_samples)
                if backend.text is not None:
                    for run_id, samples in kept.items():
                        decode = backend.text.decode_all
                        yield await asyncio.to_thread(_sample_line, run_id, samples, decode)
        finally:
            ended.cancel()


async def _until_set(changed: asyncio.Event, ended: "asyncio.Task[bool]") -> None:
    changing = asyncio.create_task(changed.wait())
    try:
        await asyncio.wait({changing, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        changing.cancel()


def _usage(backend: Backend, counts: Sequence[HourOfUsage]) -> Iterator[bytes]:
    for start in range(0, len(counts), _MAX_ENTRIES):
        report = UsageReport(
            generation=backend.config.generation,
            base_model=backend.config.model.name,
            entries=[_entry(count) for count in counts[start : start + _MAX_ENTRIES]],
        )
        yield report.model_dump_json().encode() + b"\n"


@dataclass(frozen=True, slots=True)
class ChangedCurve:
    """What has changed in the curve of a model."""

    name: str
    stride: int
    points: Sequence[CurvePoint]


Reported = dict[str, tuple[Curve, int, int]]
"""By model: the curve that was reported, its stride then and its number of steps then."""


def curve_changes(backend: Backend, reported: Reported) -> list[ChangedCurve]:
    """Return what has changed in the curves of the models.

    Args:
        backend: the parts of the head.
        reported: what was reported on the connection; updated.
    """
    earlier = dict(reported)
    reported.clear()
    changes = []
    for name, curve in backend.curves.all():
        known, stride, num_steps = earlier.get(name, (curve, 0, 0))
        # Of a run that was restored, all points may be others.
        changed = curve.since(stride, num_steps) if known is curve else curve.points[:]
        reported[name] = curve, curve.stride, curve.num_steps
        if changed:
            changes.append(ChangedCurve(name, curve.stride, changed))
    return changes


def curve_lines(changed: ChangedCurve) -> list[bytes]:
    """Return the reports of what has changed in a curve, one a line."""
    lines = []
    for start in range(0, len(changed.points), _MAX_ENTRIES):
        points = list(changed.points[start : start + _MAX_ENTRIES])
        report = CurveReport(curve_of=changed.name, stride=changed.stride, points=points)
        lines.append(report.model_dump_json().encode() + b"\n")
    return lines


def _sample_line(run_id: str, samples: Sequence[TokenSample], decode: Decode) -> bytes:
    report = SampleReport(samples_of=run_id, samples=_texts(samples, decode))
    return report.model_dump_json().encode() + b"\n"


def _texts(samples: Sequence[TokenSample], decode: Decode) -> list[KeptSample]:
    texts = []
    for sample in samples:
        try:
            texts.append(sample.text(decode))
        except Exception:  # a tokenizer may fail in any way on odd tokens
            # The lease must not end: the head would stop.
            log.exception("the text of a sample can't be kept")
    return texts


def _entry(count: HourOfUsage) -> UsageEntry:
    return UsageEntry(
        hour=count.hour,
        owner=count.payer.owner,
        session_id=count.payer.session_id,
        model_id=count.payer.model_id,
        **dataclasses.asdict(count.usage),
    )
