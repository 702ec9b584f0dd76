"""Operators that are broken in one place each: histories must show it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tinkercloud_operator.children.secret_marker import has_secret
from tinkercloud_operator.decide.pool import slots_plan, spare_clusters
from tinkercloud_operator.decide.pool.pool_model import PoolFacts
from tinkercloud_operator.decide.session import reconcile as sessions
from tinkercloud_operator.decide.session.actions import Plan
from tinkercloud_operator.run import controller
from tinkercloud_operator.run.cluster import resource_store
from tinkercloud_operator.run.cluster.executor import Executor
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.pool.pool_runner import Pools
from tinkercloud_operator.run.pool.spare_runner import Spares
from tinkercloud_operator.spec.observed import ChildKey, Observed

Break = contextlib.AbstractContextManager[object]


def _stops_without_a_save() -> Break:
    return patch.object(sessions, "needs_save", lambda *_: False)


def _starts_a_second_head() -> Break:
    return patch.object(sessions, "awaited_head", lambda _: None)


def _never_removes_a_finalizer() -> Break:
    async def nothing(*_: object) -> None:
        return

    return patch.object(Executor, "_remove_finalizer", nothing)


def _sets_no_finalizer() -> Break:
    async def nothing(*_: object) -> None:
        return

    return patch.object(Executor, "_add_finalizer", nothing)


def _forgets_a_spare() -> Break:
    return patch.object(spare_clusters, "_unused", lambda _: set())


def _takes_a_spare_twice() -> Break:
    def takes(facts: Any) -> dict[str, str]:
        waiting = [each.name for each in facts.takers if each.may_take]
        usable = [each.name for each in facts.spares if each.is_ready and not each.is_stopping]
        return {name: usable[0] for name in waiting if usable}

    return patch.object(spare_clusters, "_takes", takes)


def _counts_no_slots() -> Break:
    return patch.object(PoolFacts, "has_slot", lambda *_: True)


def _moves_a_run_before_its_head_has_left_it() -> Break:
    def plan(facts: PoolFacts) -> Any:
        sessions = [replace(each, has_left=True) for each in facts.sessions]
        return slots_plan.plan_pool(replace(facts, sessions=sessions))

    return patch("tinkercloud_operator.run.pool.pool_runner.plan_pool", plan)


def _takes_a_failed_save_for_a_save() -> Break:
    def record(self: HeadSaver, session: str, key: Any, _: object) -> None:
        self._completed[session] = {**self.completed(session), key: None}
        self._on_saved(session)

    return patch.object(HeadSaver, "_record_failure", record)


def _ignores_lost_secrets() -> Break:
    def ignoring(session: str, children: Mapping[ChildKey, Any]) -> bool:
        return has_secret(session, children) or ChildKey("RayCluster", session) in children

    return patch.object(resource_store, "has_secret", ignoring)


def _repairs_nothing_while_a_head_is_to_save() -> Break:
    return patch.object(sessions, "_actions_to_save", lambda *_: ())


def _leaves_clusters_of_pools() -> Break:
    return patch.object(Pools, "_delete", lambda *_: _nothing())


def _leaves_spares() -> Break:
    return patch.object(Spares, "_delete", lambda *_: _nothing())


async def _nothing() -> None:
    return


@contextlib.contextmanager
def _writes_every_second() -> Iterator[None]:
    """Write the status although nothing has changed."""
    reconcile = sessions.reconcile

    def restless(observed: Observed, settings: Any) -> Plan:
        plan = reconcile(observed, settings)
        return replace(
            plan, status=plan.status or observed.session.status, requeue_after_seconds=1.0
        )

    with patch.object(controller, "reconcile", restless):
        yield


BROKEN: Mapping[str, Callable[[], Break]] = {
    each.__name__.strip("_").replace("_", " "): each
    for each in (
        _stops_without_a_save,
        _starts_a_second_head,
        _never_removes_a_finalizer,
        _sets_no_finalizer,
        _forgets_a_spare,
        _takes_a_spare_twice,
        _counts_no_slots,
        _moves_a_run_before_its_head_has_left_it,
        _takes_a_failed_save_for_a_save,
        _ignores_lost_secrets,
        _repairs_nothing_while_a_head_is_to_save,
        _leaves_clusters_of_pools,
        _leaves_spares,
        _writes_every_second,
    )
}
