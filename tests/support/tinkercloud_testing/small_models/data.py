"""Builders of valid training data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tinkercloud_protocol.requests.tensors import Array, Datum, ForwardBackwardRequest
from tinkercloud_testing.small_models.models import VOCAB_SIZE


def a_datum(tokens: Sequence[int] = (1, 2, 3), **inputs: Array) -> Datum:
    """Return a datum that predicts each next token and ends in token 0; inputs override that."""
    ids = np.asarray(tokens, dtype=np.int32)
    targets = np.append(ids[1:], 0).astype(np.int64)
    return Datum(ids, {"target_tokens": targets, **inputs})


def a_request(
    data: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    *,
    config: Mapping[str, float | str] | None = None,
    seq_id: int = 1,
    forward_only: bool = False,
) -> ForwardBackwardRequest:
    """Return a forward_backward request for a model that may not exist."""
    return ForwardBackwardRequest(
        model_id="s:train:0",
        seq_id=seq_id,
        data=tuple(data),
        loss_fn=loss_fn,
        loss_fn_config=config or {},
        forward_only=forward_only,
    )


def random_data(
    lengths: Sequence[int], *, policy: bool = False, seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[Datum]:
    """Return data of these lengths with random tokens and weights, or policy-gradient inputs."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length).astype(np.int32)
        inputs: dict[str, Array] = {"target_tokens": rng.integers(0, vocab_size, length)}
        if policy:
            inputs["logprobs"] = rng.normal(-5.5, 0.5, length).astype(np.float32)
            inputs["advantages"] = rng.normal(0, 1, length).astype(np.float32)
        else:
            inputs["weights"] = rng.uniform(0, 1, length).astype(np.float32)
        data.append(Datum(tokens, inputs))
    return data


def counting_every_token(data: Sequence[Datum]) -> list[Datum]:
    """Return data with a mask for sequence losses that includes every token."""
    masks = [np.ones(len(datum.tokens), np.float32) for datum in data]
    return [
        replace(datum, inputs={**datum.inputs, "sequence_ratio_mask": mask})
        for datum, mask in zip(data, masks, strict=True)
    ]
