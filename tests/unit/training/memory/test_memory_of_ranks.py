"""What the head decides from the memory that ranks report."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_worker.actors.rank_group import RankGroup
from tinkercloud_worker.actors.rank_memory import RankMemory
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES, MemoryReport, ModelBytes

LORA = LoraConfig(rank=4)
PARAMETERS = 1 << 20
SIZE = 16 * PARAMETERS


class SomeRanks:
    """The reports of ranks whose devices have memory for adapters of one size."""

    def __init__(self, room: float, ranks: int = 1) -> None:
        self.room, self.pass_bytes = int(room * SIZE), 0
        self.models: list[dict[str, bool]] = [{} for _ in range(ranks)]
        """Whether each is on the device, at each ranks."""
        self.fails: tuple[str, int] | None = None
        """The command that changes nothing at a ranks."""

    def call(self, method: str, model_id: str, _: LoraConfig) -> None:
        """Create a model."""
        assert method == "add_model"
        for models in self.models:
            models[model_id] = True

    def call_all_independently(self, method: str, *args: Any) -> list[Any]:
        """Run a command."""
        if method == "adapter_size":
            return [PARAMETERS] * len(self.models)
        for rank, models in enumerate(self.models):
            if method != "memory" and (method, rank) != self.fails:
                models.update(dict.fromkeys(cast("Sequence[str]", args[0]), method == "page_in"))
        return [self.report(models) for models in self.models]

    def report(self, models: dict[str, bool]) -> MemoryReport:
        """Return what is at a ranks."""
        here = ModelBytes(full=SIZE, held=SIZE, promised=0, kept=None, can_leave=True)
        away = replace(here, kept=SIZE, can_leave=False)
        return MemoryReport(
            available=self.room + KEPT_FREE_BYTES - SIZE * sum(models.values()),
            pass_bytes=self.pass_bytes,
            has_place=True,
            place_free=1 << 40,
            models={name: here if is_here else away for name, is_here in models.items()},
        )

    def here(self) -> list[set[str]]:
        """Return the models on each device."""
        return [{name for name, is_here in models.items() if is_here} for models in self.models]

    @property
    def group(self) -> RankGroup:
        """These ranks as a group."""
        return cast("RankGroup", self)


def added(memory: RankMemory, ranks: SomeRanks, names: str) -> None:
    for name in names:
        memory.add(ranks.group, name, LORA)


def test_a_model_that_returns_leaves_as_much_free_as_passes_were_measured_to_take() -> None:
    ranks, memory = SomeRanks(2.5), RankMemory()
    added(memory, ranks, "abc")
    ranks.pass_bytes = KEPT_FREE_BYTES + SIZE

    memory.bring_in(ranks.group, ["a"])

    assert ranks.here() == [{"a"}]


def test_a_model_returns_even_if_the_largest_pass_then_has_too_little_memory() -> None:
    ranks, memory = SomeRanks(1.5), RankMemory()
    added(memory, ranks, "ab")
    ranks.pass_bytes = KEPT_FREE_BYTES + SIZE

    memory.bring_in(ranks.group, ["a"])

    assert ranks.here() == [{"a"}]


def test_the_next_group_keeps_the_memory_that_passes_took_in_the_lost_one() -> None:
    ranks, memory = SomeRanks(3), RankMemory()
    added(memory, ranks, "ab")
    ranks.pass_bytes = KEPT_FREE_BYTES + SIZE
    memory.measure(ranks.group)
    another = SomeRanks(2)

    for name in memory.restart(["a", "b"]):
        memory.add_back(another.group, name, LORA)
    assert another.here() == [{"b"}]
    memory.bring_in(another.group, ["a"])

    assert another.here() == [{"a"}]


def test_a_whole_model_that_stays_needs_no_place_and_is_no_measure_of_adapters() -> None:
    gib, adapter = 1 << 30, 160 << 20
    stays = ModelBytes(full=16 * gib, held=16 * gib, promised=0, kept=None, can_leave=False)
    here = ModelBytes(full=adapter, held=adapter, promised=0, kept=None, can_leave=True)
    report = MemoryReport(
        available=KEPT_FREE_BYTES,
        pass_bytes=0,
        has_place=True,
        place_free=20 * gib,
        models={"whole": stays, **dict.fromkeys("abcd", here)},
    )

    capacity = report.capacity()

    assert report.missing_to_swap(adapter // 16) < 0
    assert capacity is not None
    assert capacity.model_bytes == adapter
    assert capacity.more_models is not None
    assert capacity.more_models > 50


def test_a_whole_model_that_stays_is_the_measure_if_there_is_nothing_else() -> None:
    stays = ModelBytes(full=SIZE, held=SIZE, promised=0, kept=None, can_leave=False)
    report = MemoryReport(SIZE + KEPT_FREE_BYTES, 0, False, None, {"whole": stays})

    capacity = report.capacity()

    assert capacity is not None
    assert (capacity.model_bytes, capacity.more_models) == (SIZE, 1)


def test_nothing_is_reported_of_a_group_that_was_lost_or_has_no_models() -> None:
    ranks, memory = SomeRanks(2.5), RankMemory()
    added(memory, ranks, "a")
    assert memory.capacity is not None
    memory.note_loss()
    assert memory.capacity is None
    memory.measure(ranks.group)
    assert memory.capacity is not None

    memory.remove("a")

    assert memory.capacity is None


def test_a_model_that_one_rank_cannot_take_back_leaves_the_others_again() -> None:
    ranks, memory = SomeRanks(2.5, ranks=3), RankMemory()
    added(memory, ranks, "abc")
    ranks.fails = "page_in", 1

    with pytest.raises(Overloaded, match="rank 1 of the trainer could not allocate memory for it"):
        memory.bring_in(ranks.group, ["a"])

    assert ranks.here() == [{"c"}] * 3
    ranks.fails = None
    memory.bring_in(ranks.group, ["a"])
    assert ranks.here() == [{"c", "a"}] * 3


def test_a_model_that_only_some_ranks_have_is_out_until_all_have_it() -> None:
    ranks, memory = SomeRanks(2.5, ranks=2), RankMemory()
    added(memory, ranks, "abc")
    ranks.models[0]["a"] = True
    memory.measure(ranks.group)
    assert memory.is_out("a")
    assert memory.bytes_of("a") == 0

    memory.bring_in(ranks.group, ["a"])

    assert not memory.is_out("a")
    assert ranks.here() == [{"c", "a"}] * 2
