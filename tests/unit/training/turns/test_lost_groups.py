"""What the loss of a group of ranks has cost its models."""

import pytest

from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_worker.actors.replaceable_group import HeldModels
from tinkercloud_worker.engine.trainer import GradientLost, TrainingState, WeightsCopy

STATE = TrainingState(WeightsCopy(None, {}), None, 3)


def held(*models: str) -> HeldModels:
    holder = HeldModels()
    for model_id in models:
        holder.add(model_id, is_whole=False)
    return holder


def test_a_model_that_no_surviving_rank_has_is_lost_with_the_reason() -> None:
    models = held("saved", "lost")

    models.note_group_lost({"saved": STATE}, "rank 1 died")

    assert models.salvaged == {"saved": STATE}
    models.check_exists("saved", None)
    with pytest.raises(StateLost, match=r"model lost was lost .*rank 1 died"):
        models.check_exists("lost", None)


def test_only_an_unapplied_gradient_is_lost_and_its_model_shares_no_pass() -> None:
    models = held("stepped", "waiting")
    models.unapplied.update({"stepped", "waiting"})
    models.unapplied.discard("stepped")

    models.note_group_lost({"stepped": STATE, "waiting": STATE}, "rank 1 died")

    models.check_gradient("stepped")
    with pytest.raises(GradientLost, match=r"rank 1 died; .*send the data of this step again"):
        models.check_gradient("waiting")
    assert models.may_share("stepped")
    assert not models.may_share("waiting")
    assert not models.unapplied
    models.forget_gradient("waiting")
    models.check_gradient("waiting")


def test_a_removed_model_leaves_no_state_behind_and_may_be_created_again() -> None:
    models = held("m")
    models.note_group_lost({"m": STATE}, "rank 1 died")

    assert models.remove("m")
    assert not models.remove("m")

    assert models.salvaged == {}
    models.add("m", is_whole=True)
    models.check_exists("m", None)
    assert not models.may_share("m")
