"""Prompts of any chunks: text, images, damaged images, and what only looks like one."""

from base64 import b64encode
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_testing.clients.raw_run import MODEL, Run
from tinkercloud_testing.harness.fuzzing import Cases
from tinkercloud_testing.serving.servers import Server
from tinkercloud_testing.small_models.pictures import picture

_FILES = (picture(28, 28), picture(56, 28, file_format="jpeg"))

files = st.one_of(
    st.sampled_from(_FILES),
    st.tuples(st.sampled_from(_FILES), st.integers(0, 200), st.binary(max_size=9)).map(
        lambda change: change[0][: change[1]] + change[2] + change[0][change[1] + 3 :]
    ),
    st.binary(max_size=30),
)
formats = st.sampled_from(["png", "jpeg", "jpg", "gif", "", "\0"])
counts = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4) | st.none()
locations = st.one_of(
    files.map(lambda data: f"data:image/png;base64,{b64encode(data).decode()}"),
    st.sampled_from(["http://127.0.0.1:1/x", "file:///etc/passwd", "data:", "data:,", ""]),
    st.text(max_size=9).map(lambda text: "data:" + text),
)
anything: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just([])
)


def test_a_batch_of_any_chunks_is_computed_or_rejected_with_a_reason(
    server: Server, cases: Cases
) -> None:
    victim = Run(server)

    @settings(max_examples=cases.number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        images=st.lists(st.tuples(files, formats, counts, st.booleans()), max_size=4),
        audio=st.binary(max_size=4) | st.none(),
    )
    def check(images: list[tuple[bytes, str, int | None, bool]], audio: bytes | None) -> None:
        message = victim.batch()
        message.ClearField("seq_id")
        for data, file_format, count, overridden in images:
            chunk = pb.ImageChunk(data=data, format=file_format, expected_tokens=count)
            if overridden:
                chunk.override_dimensions.width = 28
            message.data[0].model_input.add().image.CopyFrom(chunk)
        if audio is not None:
            message.data[0].model_input.add().dmel.dmel = audio

        answer = victim.train(message.SerializeToString())

        cases.count()
        assert answer.status in {200, 400}, (answer.status, answer.body)
        if answer.status == 200:
            result = victim.server.result(str(answer.json()["request_id"]))
            assert result.status == 200, (result.status, result.body)
            assert images == [] or "error" in result.json()

    check()


def test_a_sample_of_any_chunks_is_computed_or_rejected_with_a_reason(
    server: Server, cases: Cases
) -> None:
    victim = Run(server)
    body = {"session_id": victim.session, "sampling_session_seq_id": 7, "base_model": MODEL}
    session = server.post("create_sampling_session", body).json()["sampling_session_id"]
    chunks = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["encoded_text", "image", "image_asset_pointer", "dmel", "x"]),
            "tokens": st.lists(st.integers(0, 300), max_size=3) | anything,
            "data": files.map(lambda data: b64encode(data).decode()) | anything,
            "location": locations | anything,
            "format": formats | anything,
            "expected_tokens": counts | anything,
            "override_dimensions": anything,
        },
    )

    @settings(max_examples=cases.number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(prompt=st.lists(chunks, max_size=4))
    def check(prompt: list[dict[str, Any]]) -> None:
        request = {
            "sampling_session_id": session,
            "prompt": {"chunks": prompt},
            "sampling_params": {"max_tokens": 1},
        }

        answer = server.post("asample", request)

        cases.count()
        assert answer.status in {200, 400, 422, 429}, (answer.status, answer.body)
        assert answer.status == 200 or answer.detail

    check()
