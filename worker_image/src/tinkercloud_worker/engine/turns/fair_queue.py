"""Whose turn it is: a fair queue over owners, and over the models of each owner.

Every owner has an account: the tokens computed for it, divided by its weight. The next item is one
of the owner with the lowest account, and there of the model with the lowest account. This is
deficit round robin that remembers deficits: while two owners wait, their accounts differ by at most
one turn of each, and an owner who has nothing to compute takes nothing from the others. An owner
that returns after a pause gets no credit for it, but does not owe what others have used meanwhile.

A turn is an item and the item behind it if that continues it, as an optimizer step continues its
batch. It runs before those of others, even if it arrives when another turn has started, and is
charged like any other.

Items of one model are taken in the order in which they were put, so a queue of a single model is
first in, first out. Nothing here knows threads or clocks.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


def _nothing_follows() -> bool:
    """Say that no further item is known."""
    return False


@dataclass(frozen=True, slots=True)
class Share:
    """Whose item it is, and what it costs."""

    owner: str
    model: str
    tokens: int
    """Tokens to compute. An item without tokens counts as one."""
    continues: bool = False
    """Whether it belongs to the turn of the item before it of its model."""
    is_followed: Callable[[], bool] = field(default=_nothing_follows, compare=False)
    """Says whether another item of its model comes as soon as this one has ended: its request is
    here. May be called on any thread."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is computed before an item."""

    items: int
    tokens: int


class Accounts:
    """Tokens computed for each of several names, divided by its weight."""

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        """Open no accounts.

        Args:
            weights: shares by name, at least 1; a name that is missing has 1.
        """
        self._weights = weights if weights is not None else {}
        self._used: dict[str, float] = {}
        self._level = 0.0
        """The account of the name whose turn was last, with which new accounts begin."""

    def enter(self, name: str) -> None:
        """Let a name take turns, without credit for the time in which it took none."""
        self._used[name] = max(self.used(name), self._level)

    def used(self, name: str) -> float:
        """Return what a name has used; a name that never took a turn has used as much as others."""
        return self._used.get(name, self._level)

    def take(self, name: str) -> None:
        """Record that it is the turn of a name; call `charge` with what it has cost."""
        self._level = max(self._level, self.used(name))

    def charge(self, name: str, tokens: int) -> None:
        """Add tokens to the account of a name; a negative number gives some back."""
        self._used[name] = self.used(name) + tokens / self.weight(name)

    def weight(self, name: str) -> int:
        """Return the share of a name."""
        return self._weights.get(name, 1)

    def is_open(self, name: str) -> bool:
        """Whether there is an account of this name."""
        return name in self._used

    def forget_idle(self, waiting: Mapping[str, object]) -> None:
        """Close accounts that owe nothing and whose names do not wait."""
        self._used = {
            name: used for name, used in self._used.items() if name in waiting or used > self._level
        }

    def in_turn(self, lines: Mapping[str, Iterator[T]]) -> Iterator[tuple[str, T]]:
        """Yield items with the name they belong to, each name's in the order given.

        The next one is of the name whose account is lowest at that time: the caller charges what it
        accepts. Of equal accounts, the first of `lines` is next.
        """
        left = dict(lines)
        while left:
            name = min(left, key=self.used)
            for item in left[name]:
                yield name, item
                break
            else:
                del left[name]


class _OwnerLine(Generic[T]):
    """The items of one owner, by model."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.lines: dict[str, deque[tuple[Share, T]]] = {}
        """Waiting items by model, the model that has waited longest first."""
        self.open_turns: set[str] = set()
        """Models whose last item may still be continued."""

    def continuing(self) -> Iterator[str]:
        """Yield the models whose first item continues a turn."""
        return (
            model
            for model in self.lines
            if model in self.open_turns and self.lines[model][0][0].continues
        )

    def turns(self) -> Iterator[Sequence[Share]]:
        """Yield the shares of all items, turn by turn, in their order if no more arrive.

        Items that continue a turn which has started are in turns of their own, before all others.
        """
        models, continuing = list[tuple[float, int, deque[Share]]](), set(self.continuing())
        for place, (model, line) in enumerate(self.lines.items()):
            shares, used = deque(share for share, _ in line), self.accounts.used(model)
            if model in continuing:
                used += _cost(shares[0].tokens)
                yield [shares.popleft()]
            models.append((used, place, shares))
        heapify(models)
        while models:
            used, place, shares = models[0]
            if not shares:
                heappop(models)
                continue
            turn = [shares.popleft()]
            if not turn[0].continues and shares and shares[0].continues:
                turn.append(shares.popleft())
            yield turn
            heapreplace(models, (used + _turn_cost(turn), place, shares))

    def pop(self, model: str) -> tuple[Share, T]:
        line = self.lines[model]
        share, item = line.popleft()
        if share.continues:
            self.open_turns.discard(model)
        else:
            self.open_turns.add(model)
        if not line:
            del self.lines[model]
        return share, item

    def forget_idle(self) -> None:
        self.accounts.forget_idle(self.lines)
        self.open_turns = {
            model
            for model in self.open_turns
            if model in self.lines or self.accounts.is_open(model)
        }


class FairQueue(Generic[T]):
    """Items that wait for their turn."""

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        """Create an empty queue.

        Args:
            weights: shares by owner, at least 1; an owner that is missing has 1.
        """
        self._owners = Accounts(weights)
        self._lines: dict[str, _OwnerLine[T]] = {}
        """Owners with open accounts."""
        self._waiting: dict[str, None] = {}
        """Owners with items, the owner that has waited longest first."""
        self._ahead: dict[tuple[str, str], Ahead] | None = None
        """What is ahead of each model's first item; None: not known since the last change."""

    def __len__(self) -> int:
        return sum(
            len(line) for owner in self._waiting for line in self._lines[owner].lines.values()
        )

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, share: Share, item: T) -> None:
        """Add an item behind the others of its model."""
        self._line(share).append((share, item))

    def put_back(self, share: Share, item: T) -> None:
        """Add an item before the others of its model, such as one that is not finished."""
        self._line(share).appendleft((share, item))

    def _line(self, share: Share) -> deque[tuple[Share, T]]:
        self._ahead = None
        if share.owner not in self._waiting:
            self._owners.enter(share.owner)
            self._waiting[share.owner] = None
        owner = self._lines.setdefault(share.owner, _OwnerLine())
        if share.model not in owner.lines:
            owner.accounts.enter(share.model)
            owner.lines[share.model] = deque()
        return owner.lines[share.model]

    def next(self) -> tuple[Share, T]:
        """Take the item whose turn it is. Call `charge` with what it has cost.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._waiting:
            raise IndexError("the queue is empty")
        self._forget_idle()
        for owner in self._waiting:
            for model in self._lines[owner].continuing():
                return self._pop(owner, model)
        owner = min(self._waiting, key=self._owners.used)
        models = self._lines[owner]
        model = min(models.lines, key=models.accounts.used)
        self._owners.take(owner)
        models.accounts.take(model)
        return self._pop(owner, model)

    def is_waiting(self, owner: str) -> bool:
        """Whether an owner has items here."""
        return owner in self._waiting

    def has_others(self, owners: Set[str]) -> bool:
        """Whether an owner who is none of these has items here."""
        return any(owner not in owners for owner in self._waiting)

    def is_before_others(self, owner: str) -> bool:
        """Whether others wait, and it would be the turn of this owner, who does not."""
        if not self._waiting or owner in self._waiting:
            return False
        return self._owners.used(owner) < min(map(self._owners.used, self._waiting))

    def take_joining(self, first: Share, joins: Callable[[Share, T], bool]) -> None:
        """Take every model's first item for which a function returns true, and charge all tokens.

        Args:
            first: the share of the item that was taken with `next`. Its tokens are charged if
                others join.
            joins: called in the order of turns.
        """
        lines = {
            owner: self._lines[owner].accounts.in_turn(
                {model: iter([line[0]]) for model, line in self._lines[owner].lines.items()}
            )
            for owner in self._waiting
        }
        self.charge(first, first.tokens)
        has_joined = False
        for owner, (model, (share, item)) in self._owners.in_turn(lines):
            if joins(share, item):
                has_joined = True
                self._pop(owner, model)
                self.charge(share, share.tokens)
        if not has_joined:
            self._charge(first, -_cost(first.tokens))

    def charge(self, share: Share, tokens: int) -> None:
        """Add computed tokens, at least one, to the accounts of an item's owner and model."""
        self._charge(share, _cost(tokens))

    def _charge(self, share: Share, tokens: int) -> None:
        self._ahead = None
        self._owners.charge(share.owner, tokens)
        if share.owner in self._lines:
            self._lines[share.owner].accounts.charge(share.model, tokens)

    def ahead_of(self, owner: str, model: str) -> Ahead | None:
        """Return what is computed before a model's first item if no more arrive.

        None: the model has no items here. Nothing is computed twice between two changes: many
        clients ask while one item is computed.
        """
        if self._ahead is None:
            self._ahead, items, tokens = {}, 0, 0
            for share in self._in_turn():
                self._ahead.setdefault((share.owner, share.model), Ahead(items, tokens))
                items, tokens = items + 1, tokens + share.tokens
        return self._ahead.get((owner, model))

    def _in_turn(self) -> Iterator[Share]:
        """Yield the shares of all items in the order of their turns if no more arrive."""
        owners = list[tuple[float, int, str, Iterator[Sequence[Share]]]]()
        for place, owner in enumerate(self._waiting):
            turns, used = self._lines[owner].turns(), self._owners.used(owner)
            for turn in islice(turns, sum(1 for _ in self._lines[owner].continuing())):
                used += _turn_cost(turn) / self._owners.weight(owner)
                yield from turn
            owners.append((used, place, owner, turns))
        heapify(owners)
        while owners:
            used, place, owner, turns = owners[0]
            for turn in turns:
                yield from turn
                used += _turn_cost(turn) / self._owners.weight(owner)
                heapreplace(owners, (used, place, owner, turns))
                break
            else:
                heappop(owners)

    def _pop(self, owner: str, model: str) -> tuple[Share, T]:
        self._ahead = None
        models = self._lines[owner]
        first = models.pop(model)
        if not models.lines:
            del self._waiting[owner]
        return first

    def _forget_idle(self) -> None:
        self._owners.forget_idle(self._waiting)
        for owner in [name for name in self._lines if name not in self._waiting]:
            if not self._owners.is_open(owner):
                del self._lines[owner]
        for line in self._lines.values():
            line.forget_idle()


def _cost(tokens: int) -> int:
    return max(tokens, 1)


def _turn_cost(turn: Sequence[Share]) -> int:
    return sum(_cost(share.tokens) for share in turn)
