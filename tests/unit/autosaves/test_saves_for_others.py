"""A head saves a model for somebody who is not its client, and says how the model is doing."""

from pathlib import Path

import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.serving.bare_heads import MODEL, a_head, described, train

pytestmark = pytest.mark.timeout(120)

NAME = str(MODEL)


async def test_a_model_is_saved_in_the_state_after_its_last_step_while_its_client_trains(
    tmp_path: Path,
) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g0") as head:
        await head.begin()
        await train(head, 1, 2)
        head.add(3)
        await head.loss(3)

        named = await head.service.save_model(NAME, "kept")
        numbered = [await head.service.save_model(NAME, None) for _ in range(2)]
        with pytest.raises(InvalidRequest, match="kept"):
            await head.service.save_model(NAME, "kept")
        head.apply(4)
        await head.answer(4)
        later = await head.service.save_model(NAME, None)

    assert (named.path.name, named.step, named.files.keys()) == (
        "kept",
        1,
        numbered[0].files.keys(),
    )
    assert [each.path.name for each in numbered] == ["saved-step-000001"] * 2
    assert not [name for name in named.files if "gradient" in name]
    assert (later.path.name, later.step) == ("saved-step-000002", 2)


async def test_a_head_says_how_many_steps_a_model_has_and_what_its_next_request_waits_for(
    tmp_path: Path,
) -> None:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g0") as head:
        await head.begin()
        await train(head, 1, 4)
        idle = described(head)
        head.apply(6)
        stuck = described(head)

    assert (idle.step, idle.queue_state, idle.queue_reason) == (2, "idle", None)
    assert idle.tokens_per_minute > 0
    assert stuck.queue_state == "waiting"
    assert "which has not arrived" in (stuck.queue_reason or "")
