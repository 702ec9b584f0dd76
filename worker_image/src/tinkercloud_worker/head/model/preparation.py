"""Where a batch is prepared and its output encoded, and how the latter is done."""

from dataclasses import dataclass

from tinkercloud_protocol.requests.payloads import encode_forward_backward_output
from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.expert_load import balance_metrics
from tinkercloud_worker.engine.trainer import LossOutput

_SMALL_DATA = 16
"""Most data of a small batch."""
_SMALL_BYTES = 16 << 10
"""The tokens and tensors of a small batch have fewer bytes."""


def is_small(request: ForwardBackwardRequest) -> bool:
    """Return whether to prepare a batch, and to encode its output, on the event loop.

    Each takes about as long as handing it to a thread, which delays the model's next request, and
    with it all models that share its passes. Each datum takes time, however small it is.
    """
    return (
        len(request.data) <= _SMALL_DATA
        and request.loss_fn != "custom"
        and not request.images
        and request.num_bytes < _SMALL_BYTES
    )


@dataclass(frozen=True, slots=True)
class EncodedOutput:
    """The result of a batch."""

    body: bytes
    """Body of the response."""
    metrics: dict[str, float]
    """The metrics in the body."""


def encode_output(
    request: ForwardBackwardRequest, batch: Batch, output: LossOutput
) -> EncodedOutput:
    """Return the result of a batch."""
    outputs = {"logprobs": output.logprobs}
    # An uploaded loss has one value for each datum, not for each target.
    is_elementwise = batch.uploaded is None
    if is_elementwise and (request.wants_losses or request.loss_fn == "cross_entropy"):
        outputs["elementwise_loss"] = batch.elementwise_loss(output.logprobs)
    metrics = {
        **batch.custom_metrics(),
        **batch.reported_metrics(output.metrics),
        **batch.policy_metrics(output.logprobs),
        **balance_metrics(output.expert_tokens),
    }
    return EncodedOutput(encode_forward_backward_output(outputs, metrics), metrics)
