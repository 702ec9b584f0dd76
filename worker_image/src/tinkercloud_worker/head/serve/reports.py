"""What a head says about itself and about requests that wait."""

from collections.abc import Mapping

from tinkercloud_protocol.heads.launch import HEAD_PROTOCOL, HeadStatus
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_protocol.wire import future_responses
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.model.live_model import LiveModel, latest_checkpoint
from tinkercloud_worker.head.sampling.sample_limiter import SampleLimiter
from tinkercloud_worker.head.sampling.unfinished_sample import Sample
from tinkercloud_worker.head.serve.shutdown import HeadShutdown
from tinkercloud_worker.head.wire.token_limits import TokenLimits


def head_status(
    backend: Backend,
    models: Mapping[str, LiveModel],
    shutdown: HeadShutdown,
    *,
    num_samplers: int,
    num_samples: int,
    idle_seconds: float,
    is_draining: bool,
) -> HeadStatus:
    """Return the head's status.

    Args:
        backend: its parts.
        models: the models in memory.
        shutdown: whether all of them are written.
        num_samplers: number of sampling sessions.
        num_samples: number of unfinished sampling requests.
        idle_seconds: time since the last request.
        is_draining: whether the head is stopping.
    """
    config, degraded = backend.config, shutdown.durability.degraded
    pending = sum(model.queue.sequencer.num_pending for model in models.values())
    return HeadStatus(
        head=config.head,
        generation=config.generation,
        release=this_release(),
        protocol=HEAD_PROTOCOL,
        model_name=config.model.name,
        base_fingerprint=backend.base_fingerprint,
        ready=not is_draining,
        models=sorted(models),
        samplers=num_samplers,
        pending_requests=pending + num_samples,
        idle_seconds=idle_seconds,
        suspended=shutdown.is_suspended,
        latest_checkpoint=latest_checkpoint(models.values()),
        capacity=backend.trainer.capacity,
        durability="degraded" if degraded else shutdown.durability.level,
    )


def why_sample_waits(
    request_id: str,
    samples: Mapping[str, Sample],
    limiter: SampleLimiter,
    token_limits: TokenLimits,
) -> tuple[future_responses.QueueState, str | None]:
    """Return why a sampling request has no result yet, in the SDK's terms and in words."""
    if (sample := samples.get(request_id)) is None:
        return "active", None
    if (reason := token_limits.why_waiting(sample.owner)) is not None:
        return "paused_rate_limit", reason
    if (reason := limiter.why_full(sample.owner)) is not None:
        return (
            "paused_rate_limit",
            f"{reason}; further requests are rejected until some have finished",
        )
    return "active", f"{len(samples)} sampling requests are queued or running"
