"""Where heads in pods keep their journals, and how large these may become."""

import pytest

from tinkercloud_operator.children import support_objects
from tinkercloud_operator.children.pods import SCRATCH_FOLDER
from tinkercloud_testing.resources.sessions import a_base_model, a_build, a_session

ON_A_VOLUME = {"volume": {"claimName": "models", "path": "qwen"}}


@pytest.mark.parametrize("level", ["local", "remote"])
def test_journals_are_in_the_scratch_volume_which_survives_a_container(level: str) -> None:
    head = {"image": "worker:1", "durability": {"level": level, "waitForStore": False}}

    config = support_objects.head_config(a_build(a_base_model(head=head, source=ON_A_VOLUME)))

    assert config.journal_dir == f"{SCRATCH_FOLDER}/journals"
    assert (config.durability.level, config.durability.wait_for_store) == (level, False)
    assert config.durability.max_disk_bytes == (8 << 30) // 5
    assert config.durability.max_journal_bytes == (8 << 30) // 20


def test_journals_fit_into_a_small_scratch_volume() -> None:
    resources = {"cpu": "1", "memory": "1Gi", "scratch": "1Gi"}
    head = {"image": "worker:1", "durability": {"level": "local"}, "resources": resources}

    config = support_objects.head_config(a_build(a_base_model(head=head)))

    assert config.durability.max_disk_bytes == (1 << 30) // 10
    assert config.durability.max_journal_bytes == (1 << 30) // 40


def test_heads_in_pods_have_journals_unless_the_base_model_sets_another_level() -> None:
    head = {"image": "worker:1", "durability": {"level": "none"}}

    by_default = support_objects.head_config(a_build(a_base_model()))
    without = support_objects.head_config(a_build(a_base_model(head=head)))

    assert by_default.durability.level == "local"
    assert by_default.journal_dir is not None
    assert without.journal_dir is None


@pytest.mark.parametrize(
    ("lora", "room"),
    [(None, 8 * (1 << 30)), ({"rank": 8}, 2 * (1 << 30))],
    ids=["a whole model", "adapters"],
)
def test_a_whole_model_has_a_larger_share_of_the_scratch_volume_for_its_snapshots(
    lora: dict[str, int] | None, room: int
) -> None:
    head = {"image": "w", "resources": {"scratch": "10Gi"}}
    offered = a_base_model(head=head, source=ON_A_VOLUME)

    config = support_objects.head_config(a_build(offered, a_session(lora=lora)))

    assert config.durability.max_disk_bytes == room
    assert config.durability.max_journal_bytes == 512 << 20
