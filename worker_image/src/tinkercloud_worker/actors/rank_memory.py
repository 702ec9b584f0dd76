"""The memory of ranks that models share: which are admitted, and which are paged out.

Every rank measures its own device, and the head decides for all, by the rank that has the least
left: an adapter is in the memory of all ranks or of none. Before a command that uses adapters that
are out, they are paged in, and others leave for them if necessary, the least recently used first.
So no rank pages anything by itself. Fully fine-tuned models stay, and count. They are admitted
without a check.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import Overloaded
from tinkercloud_worker.actors.rank_group import RankGroup
from tinkercloud_worker.engine.memory_report import (
    BYTES_PER_PARAMETER,
    MemoryReport,
    failed_return,
    returning_refusal,
)

Needed = Callable[[int, MemoryReport], int]
"""Returns the bytes that are needed at a rank, from its number and what it reports."""

_REPORT_SECONDS = 1.0
"""How old the reported capacity may become while passes run."""


class RankMemory:
    """See the module. Belongs to the engine's thread, apart from what any thread may read."""

    def __init__(self) -> None:
        """Start without models."""
        self._uses: dict[str, None] = {}
        """Adapters, the least recently used first."""
        self._out: frozenset[str] = frozenset()
        """Adapters that are paged out: at all ranks, unless one failed to page them in or out."""
        self._sizes: Mapping[str, int] = {}
        self._kept_for_passes = 0
        """What the last reports keep for passes, at the rank that keeps the most."""
        self._kept_before = 0
        """The most that a lost group kept: another has measured none, but its passes may run again.
        """
        self._is_limited = False
        self._measured_at = -math.inf
        self.capacity: HeadCapacity | None = None
        """How many models fit at the rank that has the least room, which any thread may read; None
        if nothing limits them."""

    def bytes_of(self, model_id: str) -> int:
        """Return the bytes of a model at the rank where it takes the most, with its moments.

        0 if it is paged out, or unknown. May be called on any thread.
        """
        return self._sizes.get(model_id, 0)

    def is_out(self, model_id: str) -> bool:
        """Whether a model is paged out."""
        return model_id in self._out

    @property
    def is_due(self) -> bool:
        """Whether the capacity should be measured again."""
        return self._is_limited and time.monotonic() - self._measured_at > _REPORT_SECONDS

    def measure(self, group: RankGroup) -> list[MemoryReport]:
        """Ask the ranks for their memory, and remember what it means.

        Raises:
            RanksLost: a rank was lost.
        """
        return self._noted(group.call_all_independently("memory"))

    def add(self, group: RankGroup, model_id: str, lora_config: LoraConfig | None) -> None:
        """Create a model at all ranks, if there is room for it.

        Raises:
            Overloaded: there is none; the message has the numbers.
            InvalidRequest: the base model does not support the configuration.
            RanksLost: a rank was lost.
        """
        if lora_config is not None:
            self._check(group, lora_config)
        self._create(group, model_id, lora_config)

    def add_back(self, group: RankGroup, model_id: str, lora_config: LoraConfig | None) -> None:
        """Create a model that was admitted to an earlier group, paging out others if possible.

        Raises:
            RanksLost: a rank was lost.
        """
        reports = self.measure(group)
        if lora_config is not None and _are_limited(reports):
            sizes = group.call_all_independently("adapter_size", lora_config)
            self._make_room(
                group,
                reports,
                lambda rank, each: sizes[rank] * BYTES_PER_PARAMETER + self._kept(each),
            )
        self._create(group, model_id, lora_config)

    def remove(self, model_id: str) -> None:
        """Forget a model. The capacity should be measured again."""
        self._uses.pop(model_id, None)
        self._out -= {model_id}
        self._sizes = {name: size for name, size in self._sizes.items() if name != model_id}
        self._measured_at = -math.inf
        if not self._sizes:
            self.capacity = None

    def note_loss(self) -> None:
        """Forget the capacity of a group that was lost: it says nothing about the next one."""
        self.capacity = None

    def restart(self, models: Collection[str]) -> list[str]:
        """Begin with another group, which has no models.

        Args:
            models: those that it gets.

        Returns:
            The models in the order in which to add them: the most recently used adapter last.
        """
        self._kept_before = max(self._kept_before, self._kept_for_passes) if models else 0
        self._uses = {name: None for name in self._uses if name in models}
        self._out, self._sizes = frozenset(), {}
        return [*(name for name in models if name not in self._uses), *self._uses]

    def bring_in(self, group: RankGroup, model_ids: Sequence[str]) -> None:
        """Page models in, at all ranks, before a command that uses them.

        Raises:
            Overloaded: there is no room for all of them.
            RanksLost: a rank was lost, now or earlier.
        """
        for model_id in model_ids:
            if model_id in self._uses:
                del self._uses[model_id]
                self._uses[model_id] = None
        for model_id in model_ids:
            if model_id in self._out:
                self._page_in(group, model_id, model_ids)

    def _create(self, group: RankGroup, model_id: str, lora_config: LoraConfig | None) -> None:
        group.call("add_model", model_id, lora_config)
        self._uses.pop(model_id, None)
        if lora_config is not None:
            self._uses[model_id] = None
        self.measure(group)

    def _check(self, group: RankGroup, lora_config: LoraConfig) -> None:
        """Check that there is room for an adapter at all ranks, and make it.

        Raises:
            Overloaded: there is none.
        """
        reports = self.measure(group)
        if not _are_limited(reports):
            return
        sizes: list[int] = group.call_all_independently("adapter_size", lora_config)
        swaps = [each.missing_to_swap(size) for each, size in zip(reports, sizes, strict=True)]
        if max(swaps) <= 0:
            reports = self._make_room(
                group, reports, lambda rank, each: each.needed_for(sizes[rank])
            )
        missing = [
            each.missing(each.needed_for(size)) for each, size in zip(reports, sizes, strict=True)
        ]
        if max(swaps) > 0 or max(missing) > 0:
            shortages = [max(pair) for pair in zip(swaps, missing, strict=True)]
            rank = shortages.index(max(shortages))
            kind = f"an adapter of rank {lora_config.rank}"
            where = f" at rank {rank} of the trainer"
            raise Overloaded(reports[rank].refusal(sizes[rank], kind, "a smaller rank", where))

    def _make_room(
        self,
        group: RankGroup,
        reports: list[MemoryReport],
        needed: Needed,
        used: Collection[str] = (),
    ) -> list[MemoryReport]:
        """Page out models until each rank has room, as far as possible; return the new reports.

        Args:
            group: the ranks.
            reports: what they report now.
            needed: the bytes that are needed at each.
            used: models that are not paged out.
        """
        # What a model frees is known only afterwards: an allocator may keep some of it.
        while leaving := self._leaving(reports, needed, used):
            before = self._out
            reports = self._page_out(group, leaving)
            if not self._out >= before.union(leaving):
                break
        return reports

    def _leaving(
        self, reports: Sequence[MemoryReport], needed: Needed, used: Collection[str]
    ) -> list[str]:
        """Return the models that should leave now; none if there is room, or if none can leave."""
        missing = [each.missing(needed(rank, each)) for rank, each in enumerate(reports)]
        leaving: list[str] = []
        for name in self._uses:
            if max(missing) <= 0:
                break
            if name not in used and all(_can_leave(each, name) for each in reports):
                leaving.append(name)
                missing = [
                    short - each.models[name].held
                    for short, each in zip(missing, reports, strict=True)
                ]
        return leaving

    def _page_in(self, group: RankGroup, model_id: str, used: Collection[str]) -> None:
        """Page a model in; raises as `bring_in`."""

        def needed(_: int, report: MemoryReport) -> int:
            # A pass without memory costs the group. But one that needs less may still run.
            return _bytes_to_return(report, model_id) + self._kept(report)

        reports = self._make_room(group, self.measure(group), needed, used)
        missing = [
            each.missing(size) for each in reports if (size := _bytes_to_return(each, model_id))
        ]
        if max(missing, default=0) > 0:
            raise Overloaded(returning_refusal(model_id, max(missing)))
        reports = self._noted(group.call_all_independently("page_in", [model_id]))
        if model_id in self._out:
            # The others give it back, so that all ranks have it or none.
            self._noted(group.call_all_independently("page_out", [model_id]))
            rank = next(rank for rank, each in enumerate(reports) if model_id in _out_at(each))
            raise Overloaded(failed_return(model_id, rank))

    def _kept(self, report: MemoryReport) -> int:
        """Return the bytes that stay free for passes at a rank, if possible."""
        return max(report.kept_for_passes, self._kept_before)

    def _page_out(self, group: RankGroup, leaving: Sequence[str]) -> list[MemoryReport]:
        """Page models out at all ranks or at none."""
        reports: list[MemoryReport] = group.call_all_independently("page_out", leaving)
        out = [_out_at(each) for each in reports]
        if halves := set[str]().union(*out) - set[str].intersection(*out):
            # A rank has no place for them. The others have the memory that they just left.
            reports = group.call_all_independently("page_in", sorted(halves))
        return self._noted(reports)

    def _noted(self, reports: list[MemoryReport]) -> list[MemoryReport]:
        """Remember what the ranks report."""
        self._out = frozenset().union(*map(_out_at, reports))
        sizes: dict[str, int] = {}
        for report in reports:
            for name, model in report.models.items():
                full = 0 if name in self._out else model.full
                sizes[name] = max(full, sizes.get(name, 0))
        self._sizes = sizes
        self._kept_for_passes = max(report.kept_for_passes for report in reports)
        self._is_limited = _are_limited(reports)
        self._measured_at = time.monotonic()
        capacities = [each for each in (report.capacity() for report in reports) if each]
        self.capacity = min(capacities, key=_by_room, default=None)
        return reports


def _are_limited(reports: Sequence[MemoryReport]) -> bool:
    return any(report.available is not None for report in reports)


def _can_leave(report: MemoryReport, name: str) -> bool:
    return report.has_place and name in report.models and report.models[name].can_leave


def _bytes_to_return(report: MemoryReport, name: str) -> int:
    """Return the bytes that a model needs at a rank to be there; 0 if it is."""
    model = report.models[name]
    return 0 if model.kept is None else model.full


def _out_at(report: MemoryReport) -> set[str]:
    return {name for name, model in report.models.items() if model.kept is not None}


def _by_room(capacity: HeadCapacity) -> tuple[int, int]:
    """Sort the capacity of the rank first that admits the fewest models."""
    return (capacity.more_models or 0, capacity.free_bytes)
