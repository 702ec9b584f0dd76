"""Whose turn it is: a fair queue over owners, and over the models of each owner.

Every owner has an account: the tokens computed for it, divided by its weight. The next item is one
of the owner with the lowest account, and there of the model with the lowest account. This is
deficit round robin that remembers deficits: while two owners wait, their accounts differ by at most
one item of each, and an owner who has nothing to compute takes nothing from the others. An owner
that returns after a pause gets no credit for it, but does not owe what others have used meanwhile.

Items of one model are taken in the order in which they were put, so a queue of a single model is
first in, first out. Nothing here knows threads or clocks.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """Whose item it is, and what it costs."""

    owner: str
    model: str
    tokens: int
    """Tokens to compute. An item without tokens counts as one."""


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
        self._used[name] = self.used(name) + tokens / self._weights.get(name, 1)

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

    def copy(self) -> "Accounts":
        """Return a copy that changes independently."""
        other = Accounts(self._weights)
        other._used, other._level = dict(self._used), self._level
        return other


class _OwnerLine(Generic[T]):
    """The items of one owner, by model."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.lines: dict[str, deque[tuple[Share, T]]] = {}
        """Waiting items by model, the model that has waited longest first."""

    def copy(self) -> "_OwnerLine[T]":
        other = _OwnerLine[T]()
        other.accounts = self.accounts.copy()
        other.lines = {model: deque(line) for model, line in self.lines.items()}
        return other

    def pop(self, model: str) -> tuple[Share, T]:
        line = self.lines[model]
        first = line.popleft()
        if not line:
            del self.lines[model]
        return first


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
        owner = min(self._waiting, key=self._owners.used)
        models = self._lines[owner]
        model = min(models.lines, key=models.accounts.used)
        self._owners.take(owner)
        models.accounts.take(model)
        return self._pop(owner, model)

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
        self._owners.charge(share.owner, tokens)
        if share.owner in self._lines:
            self._lines[share.owner].accounts.charge(share.model, tokens)

    def ahead_of(self, owner: str, model: str) -> Ahead | None:
        """Return what is computed before a model's first item if no more arrive.

        None: the model has no items here.
        """
        if owner not in self._waiting or model not in self._lines[owner].lines:
            return None
        rest = self._copy()
        items = tokens = 0
        while True:
            share, _ = rest.next()
            if (share.owner, share.model) == (owner, model):
                return Ahead(items, tokens)
            rest.charge(share, share.tokens)
            items, tokens = items + 1, tokens + share.tokens

    def _copy(self) -> "FairQueue[T]":
        other = FairQueue[T]()
        other._owners = self._owners.copy()
        other._lines = {owner: line.copy() for owner, line in self._lines.items()}
        other._waiting = dict(self._waiting)
        return other

    def _pop(self, owner: str, model: str) -> tuple[Share, T]:
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
            line.accounts.forget_idle(line.lines)


def _cost(tokens: int) -> int:
    return max(tokens, 1)
