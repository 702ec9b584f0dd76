"""Our compiled protobuf messages are the SDK's, under other names."""

import re
from pathlib import Path

from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as sdk

from tinkercloud_protocol import messages_pb2 as ours

MESSAGES = sorted(ours.DESCRIPTOR.message_types_by_name)


def fields(message: Descriptor) -> dict[str, tuple[object, ...]]:
    """Return the number, type and label of each field of a message."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.name if field.message_type else None,
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in message.fields
    }


def test_every_message_has_the_fields_of_the_sdks() -> None:
    theirs = sdk.DESCRIPTOR.message_types_by_name
    for name, message in ours.DESCRIPTOR.message_types_by_name.items():
        assert fields(message) == fields(theirs[name]), name
        for inner in message.nested_types:
            assert fields(inner) == fields(theirs[name].nested_types_by_name[inner.name])
    for name, enum in ours.DESCRIPTOR.enum_types_by_name.items():
        values = {value.name: value.number for value in enum.values}
        assert values == {
            value.name: value.number for value in sdk.DESCRIPTOR.enum_types_by_name[name].values
        }


def test_the_compiled_module_is_that_of_the_source() -> None:
    source = Path(ours.__file__).with_name("messages.proto").read_text()
    messages = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
    written = {
        (name, field, int(number))
        for name, body in messages.findall(source)
        for field, number in re.findall(r" (\w+) = (\d+);", body)
    }

    assert written == {
        (name, field.name, field.number)
        for name in MESSAGES
        for field in ours.DESCRIPTOR.message_types_by_name[name].fields
    }


@given(st.binary(max_size=20), st.integers(0, 2**31 - 1), st.floats(allow_nan=False), st.booleans())
def test_each_parses_the_others_bytes(
    data: bytes, seq_id: int, number: float, forward_only: bool
) -> None:
    request = sdk.ForwardBackwardRequest(
        model_id="m", seq_id=seq_id, loss_fn="ppo", forward_only=forward_only
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = data
    datum.loss_fn_inputs["w"].sparse_csr.values = data
    request.loss_fn_config_v2["beta"].number = number
    whole = request.SerializeToString(deterministic=True)

    message = ours.ForwardBackwardRequest.FromString(whole)

    assert message.data[0].loss_fn_inputs["w"].WhichOneof("encoding") == "sparse_csr"
    assert message.SerializeToString(deterministic=True) == whole
    answer = ours.SampleResponse(prompt_logprobs=data, prompt_cache_hit_tokens=seq_id)
    answer.sequences.add(tokens=data, stop_reason=ours.STOP_REASON_LENGTH)
    encoded = answer.SerializeToString(deterministic=True)
    assert sdk.SampleResponse.FromString(encoded).SerializeToString(deterministic=True) == encoded
