"""Where heads in pods keep their journals, and how large these may become."""

import pytest

from tinkercloud_operator.children import support_objects
from tinkercloud_operator.children.pods import SCRATCH_FOLDER
from tinkercloud_testing.sessions import a_base_model, a_build, a_session


@pytest.mark.parametrize("level", ["local", "remote"])
def test_journals_are_in_the_scratch_volume_which_survives_a_container(level: str) -> None:
    head = {"image": "worker:1", "durability": {"level": level, "waitForStore": False}}

    config = support_objects.head_config(a_build(a_base_model(head=head)))

    assert config.journal_dir == f"{SCRATCH_FOLDER}/journals"
    assert (config.durability.level, config.durability.wait_for_store) == (level, False)
    assert config.durability.max_journal_bytes == 512 << 20


def test_journals_fit_into_a_small_scratch_volume() -> None:
    resources = {"cpu": "1", "memory": "1Gi", "scratch": "1Gi"}
    head = {"image": "worker:1", "durability": {"level": "local"}, "resources": resources}

    config = support_objects.head_config(a_build(a_base_model(head=head)))

    assert config.durability.max_journal_bytes == (1 << 30) // 10


def test_heads_in_pods_have_no_journals_by_default() -> None:
    assert support_objects.head_config(a_build(a_base_model())).journal_dir is None


@pytest.mark.parametrize(
    ("level", "lora", "room"),
    [
        ("local", None, 6 * (1 << 30)),
        ("local", {"rank": 8}, None),
        ("none", None, None),
    ],
    ids=["a whole model", "an adapter", "without journals"],
)
def test_whole_models_have_a_share_of_the_scratch_volume_for_their_snapshots(
    level: str, lora: dict[str, int] | None, room: int | None
) -> None:
    head = {"image": "w", "durability": {"level": level}, "resources": {"scratch": "10Gi"}}
    offered = a_base_model(head=head, source={"volume": {"claimName": "models", "path": "qwen"}})

    config = support_objects.head_config(a_build(offered, a_session(lora=lora)))

    assert config.durability.max_whole_model_bytes == room
