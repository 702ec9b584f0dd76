"""The console of an API server on Kubernetes, whose pool has the runs of two owners.

The kube-apiserver and the head are real. The test takes the role of the operator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
import tinker
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_testing.clients.browsers import Observed, Open
from tinkercloud_testing.clients.console_runs import ATTACK
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.image_build.programs import state_folder
from tinkercloud_testing.cluster.kube_api.control_plane import a_control_plane
from tinkercloud_testing.cluster.provider_world import World, a_base_model, a_world
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server

pytestmark = pytest.mark.slow

MODEL = "tiny/shared"
THIS_MONTH = datetime.now(UTC).replace(day=1)
MONTHS = [f"{each:%Y-%m}" for each in (THIS_MONTH, THIS_MONTH - timedelta(days=1))]
FULL = f"all 2 slots are taken {ATTACK}"


@pytest.fixture(autouse=True)
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables of commands have room for the texts of their cells, which they would fold."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(scope="module")
def world(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    assert chromium.is_connected()
    with (
        state_folder() as folder,
        a_control_plane(folder) as plane,
        a_world(plane.cluster, tmp_path_factory.mktemp("world")) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    one = world.server("one")
    one.start()
    yield one
    one.clients.close()
    one.stop()


@dataclass(frozen=True)
class Owner:
    """An owner with a run in the pool."""

    name: str
    key: str
    run: str


@dataclass(frozen=True)
class Pool:
    """A pool with two slots and the runs of two owners."""

    ann: Owner
    bob: Owner
    waiting: str
    """Another run of bob, which waits for a slot."""


def a_run(world: World, server: Server, owner: str, cluster: str) -> Owner:
    key, known = server.new_key(owner), world.sessions()
    client = tinker.ServiceClient(
        base_url=server.url, api_key=key, display_name=f"{owner} {ATTACK}"
    )
    server.clients.made.append(client)
    creating = client.create_lora_training_client(MODEL, rank=4)
    world.place(world.new_session(known), cluster)
    training = creating.result()
    step(training)
    return Owner(owner, key, str(training.model_id))


def a_waiting_run(world: World, server: Server, key: str) -> str:
    session_id = server.post("create_session", {"sdk_version": "1"}, key=key).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    made = server.post("create_model", {**create, "lora_config": {"rank": 4}}, key=key)
    assert made.status == 200
    run = f"{session_id}:train:0"
    full = (ConditionType.READY, "False", Reason.POOL_FULL, FULL)
    world.say(world.session_of(run), full)
    return run


@pytest.fixture(scope="module")
def pool(world: World, server: Server) -> Pool:
    shared = a_base_model("shared", world.namespace, MODEL)
    shared["spec"] |= {"sharing": "Shared", "pool": {"slotsPerCluster": 2}}
    world.cluster.apply(shared)
    cluster = world.a_pool_cluster("pool-a", world.a_head(MODEL))
    world.wait_for_model(server, MODEL)
    ann, bob = (a_run(world, server, owner, cluster) for owner in ("ann", "bob"))
    waiting = a_waiting_run(world, server, bob.key)
    use = {"clusters": 1, "ready": 1, "slots": 2, "models": 2, "waiting": 1}
    idle = {"gpuHours": 40.5, "gpuHoursByMonth": dict(zip(MONTHS, (12.25, 3), strict=True))}
    status = {"pool": use, "gpus": 4, "idle": idle}
    world.cluster.patch_status("basemodel", "shared", status, world.namespace)

    def is_known() -> bool:
        models = server.request("GET", "/api/v1/base_models").json()["base_models"]
        runs = server.request("GET", "/api/v1/runs?access_scope=accessible").json()["runs"]
        pools = [each["pool"] for each in models if each["pool"] is not None]
        return any(use.items() <= each.items() for each in pools) and FULL[:9] in str(runs)

    wait_until(is_known, "the server to know what the operator wrote")
    return Pool(ann, bob, waiting)


@pytest.fixture
def console(anonymous: Open) -> "Console":
    return Console(anonymous)


@dataclass(frozen=True)
class Console:
    """Browsers of owners."""

    anonymous: Open

    def of(self, key: str) -> Page:
        """Open the console with a key."""
        window = self.anonymous()
        window.goto("/console/login")
        window.get_by_label("API key").fill(key)
        window.get_by_role("button", name="Log in").click()
        window.get_by_role("heading", name="Runs", exact=True).wait_for()
        return window


def cells(window: Page, region: str, row: str) -> list[str]:
    """Return the texts of a table's row, which has a text."""
    found = window.get_by_role("region", name=region).get_by_role("row").filter(has_text=row)
    return found.locator("th, td").all_inner_texts()


def test_each_owner_sees_the_pool_and_where_only_the_own_runs_are(
    console: Console, pool: Pool
) -> None:
    for owner, others in (
        (pool.ann, [pool.bob.run, pool.waiting, "bob"]),
        (pool.bob, [pool.ann.run, "ann"]),
    ):
        window = console.of(owner.key)
        for page in ("Runs", "Models"):
            window.get_by_role("navigation").get_by_role("link", name=page).click()
            expect(window.get_by_role("link", name=owner.run, exact=True).first).to_be_visible()
            shown = window.locator("main").inner_text()
            assert [each for each in others if each in shown] == [], page
        ready, slots, memory, _, *shown_use = cells(window, "Base models", MODEL)[-7:]
        hours = f"40.5 in all\n{MONTHS[0]}: 12.25\n{MONTHS[1]}: 3"
        assert [ready, slots, *shown_use] == ["1 of 1", "2 of 2", "1", "0 of 4", hours]
        assert memory.endswith("iB")
        assert cells(window, "Runs with a place", owner.run)[1:5] == [
            *(owner.name, MODEL, "live", "pool-a")
        ]
        cluster = cells(window, "Clusters", "pool-a")
        assert cluster[1:5] == [MODEL, "Ready", "2 of 2", "0"]
        assert cluster[5].endswith("iB")
        assert cluster[-1].split() == [owner.run, owner.name]


def test_the_commands_show_each_cluster_and_the_own_runs_on_it(server: Server, pool: Pool) -> None:
    caller = ("--base-url", server.url, "--api-key", pool.ann.key)

    listed = server.command("pools", "list", *caller)
    shown = server.command("pools", "show", "pool-a", *caller)

    assert {"pool-a", "Ready", "2", "ann:", "1"} <= set(listed.split())
    assert f"in all: 40.5, {MONTHS[0]}: 12.25, {MONTHS[1]}: 3" in listed
    assert "bob" not in listed + shown
    assert pool.ann.run in shown


def test_the_command_shows_idle_gpu_hours_in_all_of_this_month_and_of_the_last(
    server: Server, pool: Pool
) -> None:
    listed = server.command(
        *("models", "list", "--base-url", server.url, "--api-key", pool.ann.key)
    )

    assert "0 of 4" in listed
    assert f"in all: 40.5, {MONTHS[0]}: 12.25, {MONTHS[1]}: 3" in listed


def test_an_admin_sees_who_is_where_and_why_a_run_waits(console: Console, pool: Pool) -> None:
    window = console.of(API_KEY)
    window.goto("/console/models")

    for owner in (pool.ann, pool.bob):
        assert cells(window, "Runs with a place", owner.run)[1:4] == [owner.name, MODEL, "live"]
    waiting = cells(window, "Runs with a place", pool.waiting)
    assert (waiting[1], waiting[3].partition("\n")[0]) == ("bob", "waiting")
    assert FULL in waiting[-1]


def test_a_run_of_another_owner_in_the_pool_has_no_page(console: Console, pool: Pool) -> None:
    window = console.of(pool.ann.key)
    for run in (pool.bob.run, pool.waiting):
        for page in ("", "/trace", "/surplus_checkpoints?keep=1"):
            answer = window.goto(f"/console/runs/{run}{page}")
            assert answer is not None
            assert answer.status == 404, page
            expect(window.locator("main")).to_contain_text("belongs to another owner")


def test_the_timeline_of_a_run_in_the_pool_has_its_own_requests(
    console: Console, pool: Pool
) -> None:
    window = console.of(pool.ann.key)
    window.goto(f"/console/runs/{pool.ann.run}")

    rows = window.get_by_role("region", name="Timeline").locator("tbody tr")

    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("optim_step")
    expect(rows.last).to_contain_text("forward_backward")
    with window.expect_download() as trace:
        window.get_by_role("link", name="Download the trace").click()
    assert trace.value.suggested_filename.endswith(".trace.json")


def test_pages_of_a_pool_exclude_nobody_and_run_nothing(
    console: Console, pool: Pool, server: Server, observed: Observed
) -> None:
    window = console.of(API_KEY)
    for path in (
        "models",
        "runs",
        "sessions",
        "problems",
        *(f"runs/{run.run}" for run in (pool.ann, pool.bob)),
    ):
        window.goto(f"/console/{path}")
        answer = Axe().run(window)
        assert answer.violations_count == 0, (path, answer.generate_report())

    assert (observed.dialogs, observed.errors, observed.origins) == ([], [], {server.url})
