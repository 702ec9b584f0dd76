"""Questions to session heads that are under way.

A head that saves a large model takes minutes, and many may do so at once. Nobody waits for them:
sessions are looked at meanwhile, and the one whose head has answered is looked at then.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from tinkercloud_operator import metrics
from tinkercloud_operator.decide.actions import AskHead
from tinkercloud_operator.run.head_client import Heads
from tinkercloud_operator.spec.snapshot import Done

log = structlog.get_logger(__name__)


class Questions:
    """What heads are being asked, and what they have done. Belongs to one event loop.

    Args:
        heads: who is asked.
        answered: told the session whose head has done what it was asked to.
    """

    def __init__(self, heads: Heads, answered: Callable[[str], object]) -> None:
        self._heads = heads
        self._answered = answered
        self._begun: asyncio.Queue[tuple[str, AskHead]] = asyncio.Queue()
        self._open: set[tuple[str, Done]] = set()
        """With the session's name."""
        self._answers: dict[str, Mapping[Done, str | None]] = {}

    def answers(self, session: str) -> Mapping[Done, str | None]:
        """Return what a session's heads have done, each with the last checkpoint it was for."""
        return self._answers.get(session, {})

    def asked(self, session: str) -> frozenset[Done]:
        """Return what a session's heads are being asked to do."""
        return frozenset(done for name, done in self._open if name == session)

    def ask(self, session: str, question: AskHead) -> None:
        """Ask a head, unless it is being asked that already."""
        key = session, (question.what, question.incarnation)
        if key not in self._open:
            self._open.add(key)
            self._begun.put_nowait((session, question))

    def forget(self, session: str) -> None:
        """Forget a session that is gone; what its head still says is of no use."""
        self._answers.pop(session, None)
        self._open = {key for key in self._open if key[0] != session}

    async def work(self) -> None:
        """Have questions answered, without end; all at the same time."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._ask(*await self._begun.get()))

    async def _ask(self, session: str, question: AskHead) -> None:
        done = (question.what, question.incarnation)
        try:
            answer = await self._heads.ask(session, question)
        except Exception:
            log.exception(
                "the save request failed unexpectedly", session=session, asked=question.what
            )
            answer = None
        if (session, done) not in self._open:
            return
        self._open.discard((session, done))
        if answer is None:
            metrics.SAVES_FAILED.labels(question.what).inc()
        else:
            self._answers[session] = {**self.answers(session), done: answer.latest_checkpoint}
            self._answered(session)
