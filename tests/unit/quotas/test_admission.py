"""What starts and what waits under the limits of a tenant, in any order of events."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_crds.quota_fields import (
    Amounts,
    Claimant,
    Tenant,
    tenant_of,
    usage,
    waiting_message,
)
from tinkercloud_crds.tenant import TenantLimits, TenantSpec

NOTHING = Amounts()


def a_tenant(name: str = "research", owners: tuple[str, ...] = ("ada",), **most: int) -> Tenant:
    return Tenant(name, TenantSpec(owners=list(owners), limits=TenantLimits(**most)))


def waiting(name: str, second: int, gpus: int = 0) -> Claimant:
    return Claimant(name, (f"{second:09}", name), NOTHING, Amounts(1, gpus, 1))


def started(name: str, second: int, gpus: int = 0) -> Claimant:
    return Claimant(name, (f"{second:09}", name), Amounts(1, gpus, 1), NOTHING)


def test_a_run_over_the_limit_waits_and_its_message_says_for_what() -> None:
    message = waiting_message(a_tenant(models=1), waiting("b", 2), [started("a", 1)])

    assert message == (
        "tenant 'research' uses 1 of 1 models (limits.models); this is number 1 in the tenant's"
        " queue, and starts when others have ended; end one that you no longer need, or ask an"
        " administrator to raise the limit"
    )


def test_without_limits_nothing_waits() -> None:
    many = [started(f"run-{number}", number, gpus=8) for number in range(50)]

    assert waiting_message(a_tenant(), waiting("last", 99, gpus=8), many) is None


def test_a_small_session_does_not_overtake_a_large_one_that_waits_for_gpus() -> None:
    tenant = a_tenant(dedicated_gpus=8)
    others = [started("running", 1, gpus=4), waiting("large", 2, gpus=8)]

    assert waiting_message(tenant, waiting("small", 3, gpus=1), others) is not None
    assert waiting_message(tenant, waiting("in a pool", 3), others) is None


def test_a_session_larger_than_the_limit_stops_no_other() -> None:
    tenant = a_tenant(dedicated_gpus=8)
    never = waiting("never", 1, gpus=16)

    assert "more than the limit" in str(waiting_message(tenant, never, []))
    assert waiting_message(tenant, waiting("small", 2, gpus=1), [never]) is None


def test_an_owner_belongs_to_the_tenant_that_names_it_most_precisely() -> None:
    everyone, team, ada = (
        a_tenant("everyone", ("*",)),
        a_tenant("team", ("team-*",)),
        a_tenant("ada", ("team-ada",)),
    )
    tenants = [everyone, team, ada]

    assert tenant_of("team-ada", tenants) == ada
    assert tenant_of("team-bob", tenants) == team
    assert tenant_of("eve", tenants) == everyone
    assert tenant_of("eve", [team, ada]) is None
    assert tenant_of("team.*", [a_tenant("literal", ("team.",))]) is None


def test_of_equal_entries_the_oldest_tenant_has_the_owner() -> None:
    first, second = a_tenant("first"), a_tenant("second")

    assert tenant_of("ada", [first, second]) == first


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 6)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("limit"), st.integers(0, 8)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(EVENTS)
def test_whatever_happens_no_limit_is_exceeded_and_the_oldest_that_fits_is_next(
    events: list[tuple[str, int]],
) -> None:
    tenant, runs, arrivals = a_tenant(sessions=3, dedicated_gpus=6), {}, 0
    for kind, number in events:
        if kind == "arrive":
            arrivals += 1
            runs[f"run-{arrivals}"] = waiting(f"run-{arrivals}", arrivals, gpus=number)
        elif kind == "limit":
            tenant = a_tenant(sessions=3, dedicated_gpus=number)
        else:
            runs.pop(f"run-{number}", None)
        before = usage(runs.values())
        admit_all(tenant, runs)
        after = usage(runs.values())
        assert after.sessions <= 3
        # A lowered limit ends nothing, but nothing starts above it.
        limit = tenant.spec.limits.dedicated_gpus or 0
        assert after.dedicated_gpus <= max(limit, before.dedicated_gpus)
        assert_oldest_is_blocked(tenant, runs)


def admit_all(tenant: Tenant, runs: dict[str, Claimant]) -> None:
    """Start all that may start, in any order: here the youngest is asked first."""
    is_changed = True
    while is_changed:
        is_changed = False
        for name in sorted(runs, reverse=True):
            own = runs[name]
            others = [each for each in runs.values() if each.name != name]
            if own.waits and waiting_message(tenant, own, others) is None:
                runs[name] = replace(own, held=own.missing, missing=NOTHING)
                is_changed = True


def assert_oldest_is_blocked(tenant: Tenant, runs: dict[str, Claimant]) -> None:
    """The oldest that would ever fit waits only for what is really in use."""
    limit = tenant.spec.limits.dedicated_gpus or 0
    queue = [each for each in runs.values() if each.waits and each.missing.dedicated_gpus <= limit]
    used = usage(runs.values())
    if queue:
        first = min(queue, key=lambda each: each.age)
        needs_gpus = first.missing.dedicated_gpus > 0
        is_over = needs_gpus and used.dedicated_gpus + first.missing.dedicated_gpus > limit
        assert used.sessions == 3 or is_over
