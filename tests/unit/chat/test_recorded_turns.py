"""Recorded turns as data: which turns share a datum, and what its positions mean."""

from typing import Any

import pytest

from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_worker.chat import recorded
from tinkercloud_worker.chat.recorded import RecordedSessions, Turn, datums


def a_turn(prompt: list[int], tokens: list[int]) -> Turn:
    return Turn(prompt, tokens, [-0.5 * token for token in tokens])


def values(datum: dict[str, Any], name: str) -> list[float]:
    tensor = datum["loss_fn_inputs"][name]
    assert tensor["shape"] == [len(tensor["data"])]
    return list(tensor["data"])


def test_a_turn_that_extends_the_conversation_continues_its_datum() -> None:
    [datum] = datums([a_turn([1, 2], [3]), a_turn([1, 2, 3, 9], [4, 5])])

    assert datum["turns"] == [0, 1]
    assert datum["model_input"]["chunks"][0]["tokens"] == [1, 2, 3, 9, 4]
    assert values(datum, "target_tokens") == [2, 3, 9, 4, 5]
    assert values(datum, "mask") == [0, 1, 0, 1, 1]
    assert values(datum, "logprobs") == [0, -1.5, 0, -2.0, -2.5]


def test_branches_of_a_conversation_are_data_of_their_own() -> None:
    first, other = a_turn([1, 2], [3]), a_turn([1, 2], [4])
    data = datums([first, other, a_turn([1, 2, 3, 9], [5])])

    assert [datum["turns"] for datum in data] == [[0, 2], [1]]
    assert sum(sum(values(datum, "mask")) for datum in data) == 3


def test_an_idle_session_expires_and_is_then_unknown() -> None:
    clock = [0.0]
    sessions = RecordedSessions(lambda: clock[0])
    name = sessions.create("s:sample:1", "ann", "m")
    sessions.add(name, a_turn([1], [2]))
    clock[0] += recorded.IDLE_SECONDS + 1

    with pytest.raises(NotFound, match="expired"):
        sessions.add(name, a_turn([1], [2]))


def test_full_sessions_of_one_owner_do_not_stop_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_OWNER_TOKENS", 2)
    sessions = RecordedSessions()
    full, other = (sessions.create("s:sample:1", owner, "m") for owner in ("ann", "bob"))
    sessions.add(full, a_turn([1], [2]))

    with pytest.raises(InvalidRequest, match="maximum is 2"):
        sessions.check_room(full, "m")
    sessions.check_room(other, "m")
