"""Ids and `tinker://` paths: what is written can be read back, and nothing else can."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, RequestId, SamplingSessionId, new_session_id
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

sessions = st.from_regex(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}", fullmatch=True)
indices = st.integers(0, 2**31 - 1)
models = st.builds(ModelId, sessions, indices)
samplers = st.builds(SamplingSessionId, sessions, indices)
names = st.from_regex(r"[0-9A-Za-z_][0-9A-Za-z_.=+@,-]{0,127}", fullmatch=True)
paths = st.builds(CheckpointPath, models.map(str), st.sampled_from(CheckpointKind), names)


@given(models)
def test_a_model_id_is_read_back(model_id: ModelId) -> None:
    assert ModelId.parse(str(model_id)) == model_id


@given(st.one_of(models, samplers), indices)
def test_a_request_id_says_where_its_result_lives(
    target: ModelId | SamplingSessionId, seq_id: int
) -> None:
    request_id = RequestId(target, seq_id)

    assert RequestId.parse(str(request_id)) == request_id


@given(st.text(), st.integers())
def test_ids_of_other_forms_are_refused(text: str, number: int) -> None:
    for parse in (ModelId.parse, SamplingSessionId.parse, RequestId.parse):
        for candidate in (text, f"s:{text}:{number}", f"{text}:train:{number}:x"):
            try:
                parsed = parse(candidate)
            except InvalidRequest:
                continue
            assert str(parsed) == candidate


def test_session_ids_are_different_every_time() -> None:
    assert len({new_session_id() for _ in range(100)}) == 100


@given(paths)
def test_a_path_is_read_back(path: CheckpointPath) -> None:
    assert CheckpointPath.parse(str(path)) == path
    assert CheckpointPath.of_checkpoint_id(path.run_id, path.checkpoint_id) == path


@given(st.text(alphabet=string.printable), st.text(alphabet=string.printable))
def test_a_path_never_leaves_its_run(kind: str, name: str) -> None:
    run_id = "s:train:0"
    try:
        path = CheckpointPath.parse(f"tinker://{run_id}/{kind}/{name}")
    except InvalidRequest:
        return

    assert path.prefix == f"runs/{run_id}/{kind}/{name}"
    assert path.prefix.count("/") == 3
    assert ".." not in path.prefix.split("/")


@pytest.mark.parametrize(
    "uri",
    [
        "tinker://s:train:0/weights/.",
        "tinker://s:train:0/weights/..",
        "tinker://s:train:0/weights/.hidden",
        "tinker://s:train:0/weights/a b",
        "tinker://s:train:0/weights/a\n",
        "tinker://s:train:0/weights/é",
        "tinker://s:train:0/weights/" + "x" * 129,
        "tinker://s:train:00/weights/x",
        "tinker://s:sample:0/weights/x",
        "TINKER://s:train:0/weights/x",
    ],
)
def test_paths_outside_the_grammar_are_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest):
        CheckpointPath.parse(uri)


def test_two_paths_never_share_a_folder() -> None:
    folders = {
        CheckpointPath(run, kind, name).prefix
        for run in ("a:train:0", "a:train:1", "b:train:0")
        for kind in CheckpointKind
        for name in ("x", "y", "weights")
    }

    assert len(folders) == 3 * len(CheckpointKind) * 3
