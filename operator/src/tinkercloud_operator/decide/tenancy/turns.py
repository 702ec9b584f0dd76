"""In which order owners get what is scarce: places in a pool, devices for sessions. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import TypeVar

WaitingT = TypeVar("WaitingT")


def in_turn(
    waiting: Iterable[WaitingT], owner_of: Callable[[WaitingT], str], held: Mapping[str, int]
) -> Iterator[WaitingT]:
    """Yield what waits: next is the oldest of the owner with the fewest places.

    So an owner who asks for many places at once delays another one by none.

    Args:
        waiting: what waits for a place, oldest first.
        owner_of: returns the owner of each.
        held: number of places that each owner has; 0 for an owner that is missing.
    """
    queues: dict[str, deque[tuple[int, WaitingT]]] = {}
    for index, each in enumerate(waiting):
        queues.setdefault(owner_of(each), deque()).append((index, each))
    heap = [(held.get(owner, 0), queue[0][0], owner) for owner, queue in queues.items()]
    heapify(heap)
    while heap:
        places, _, owner = heap[0]
        queue = queues[owner]
        yield queue.popleft()[1]
        if queue:
            heapreplace(heap, (places + 1, queue[0][0], owner))
        else:
            heappop(heap)
