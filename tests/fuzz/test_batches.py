"""Batches in protobuf with changed bytes and with any values, which are never half computed."""

import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_testing.clients.raw_run import Run, a_tensor
from tinkercloud_testing.harness.fuzzing import Cases
from tinkercloud_testing.serving.servers import Answer, Server

_ACCEPTED = {200, 400, 401, 404, 409, 413, 422, 429}

Edit = tuple[float, int, bytes]
"""A position as a share of the body, the number of bytes to remove there, and bytes to insert."""

edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=9)), min_size=1, max_size=4
)
numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda each: np.asarray([each], "<i8")),
    st.lists(st.floats(width=32), max_size=5).map(lambda each: np.asarray(each, np.float32)),
    st.lists(st.integers(-3, 300), max_size=5).map(lambda each: np.asarray(each, "<i8")),
)
names = st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "mask", "", "ø"])
losses = st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "", "x"])


def test_a_batch_with_changed_bytes_is_accepted_or_rejected_with_a_reason(
    server: Server, cases: Cases
) -> None:
    victim = Run(server)

    @settings(max_examples=cases.number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes=edits)
    def check(changes: list[Edit]) -> None:
        body = _unnumbered(victim.batch())
        for place, removed, added in changes:
            start = math.floor(place * len(body))
            body = body[:start] + added + body[start + removed :]
        # Nobody waits for the result: the changed bytes may number the request after missing ones.
        _accepted(victim, body)
        cases.count()

    check()


def test_a_batch_of_any_values_is_computed_or_rejected_with_a_reason(
    server: Server, cases: Cases
) -> None:
    victim = Run(server)

    @settings(max_examples=cases.number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        tokens=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 263), max_size=9),
        inputs=st.dictionaries(names, numbers, max_size=4),
        shape=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3) | st.none(),
        loss=losses,
        config=st.dictionaries(
            st.sampled_from(["clip_low_threshold", "beta", "", "x"]),
            st.floats() | st.text(max_size=4),
            max_size=2,
        ),
    )
    def check(
        tokens: list[int],
        inputs: dict[str, np.ndarray],
        shape: list[int] | None,
        loss: str,
        config: dict[str, float | str],
    ) -> None:
        message = victim.batch(tokens, loss_fn=loss, config=config)
        for name, array in inputs.items():
            tensor = a_tensor(array)
            if shape is not None:
                tensor = pb.Tensor(dense=tensor.dense, dtype=tensor.dtype, shape=shape)
            message.data[0].loss_fn_inputs[name].CopyFrom(tensor)
        answer = _accepted(victim, _unnumbered(message))
        if answer.status == 200:
            result = victim.server.result(str(answer.json()["request_id"]))
            assert result.status == 200, (result.status, result.body)
        cases.count()

    check()


def _unnumbered(message: pb.ForwardBackwardRequest) -> bytes:
    """Return the body of a batch without a position in its run, so that it waits for no other."""
    message.ClearField("seq_id")
    return message.SerializeToString()


def _accepted(victim: Run, body: bytes) -> Answer:
    """Send a batch; check that it is accepted, or rejected with a reason."""
    answer = victim.train(body)
    assert answer.status in _ACCEPTED, (answer.status, answer.body)
    assert answer.status == 200 or answer.detail
    return answer
