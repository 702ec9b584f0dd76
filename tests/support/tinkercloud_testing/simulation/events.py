"""What may happen to a simulated cluster: each kind of event by name, with its weight."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_testing.simulation.clients import Run
from tinkercloud_testing.simulation.cluster.api_server import Json
from tinkercloud_testing.simulation.cluster.nodes import OUT_OF_SERVICE
from tinkercloud_testing.simulation.world import World

SPOT_NOTICE = "aws-node-termination-handler/spot-itn"
OWNERS = ("ada", "bob", "cyd")
MODELS = ("Sim/Alone", "Sim/Ranks", "Sim/Pool", "Sim/Warm")
_MOST_SESSIONS = 10
"""Sessions of clients at a time."""


@dataclass(frozen=True)
class Event:
    """A kind of event."""

    name: str
    weight: int
    happen: Callable[[World], None]


EVENTS: dict[str, Event] = {}


def _event(weight: int = 2) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def register(happen: Callable[[World], None]) -> Callable[[World], None]:
        name = happen.__name__.strip("_").replace("_", " ")
        EVENTS[name] = Event(name, weight, happen)
        return happen

    return register


# Clients.


def _start(world: World, model: str, *, shared: bool = False, declared: bool = False) -> None:
    live = [each for each in world.clients if not each.is_over]
    if len(live) < _MOST_SESSIONS:
        prefix = model.partition("/")[2].lower()
        owner = world.random.choice(OWNERS)
        world.add_client(Run(world.next_name(prefix), owner, model, shared, declared))


@_event(4)
def a_client_starts_a_run_with_its_own_head(world: World) -> None:
    _start(world, "Sim/Alone")


@_event(4)
def a_client_starts_a_run_with_ranks(world: World) -> None:
    _start(world, "Sim/Ranks")


@_event(8)
def a_client_starts_a_run_in_the_pool(world: World) -> None:
    _start(world, "Sim/Pool", shared=True)


@_event(5)
def a_client_starts_a_run_that_may_take_a_spare(world: World) -> None:
    _start(world, "Sim/Warm")


@_event()
def a_person_declares_a_session(world: World) -> None:
    _start(world, world.random.choice(["Sim/Alone", "Sim/Ranks"]), declared=True)


@_event()
def one_owner_starts_many_runs(world: World) -> None:
    for _ in range(4):
        _start(world, world.random.choice(MODELS[:2]))


@_event()
def many_runs_start_in_the_pool(world: World) -> None:
    for _ in range(4):
        _start(world, "Sim/Pool", shared=True)


STARTS = frozenset(EVENTS)
"""Kinds of event with which clients start."""


def _sessions(world: World) -> list[Json]:
    """Return the sessions of clients, in the order of their names."""
    found = [each.session() for each in world.clients]
    return [each for each in found if each is not None]


def _a_session(world: World) -> Json | None:
    found = _sessions(world)
    return world.random.choice(found) if found else None


def _change(world: World, session: Json | None, change: Json) -> None:
    if session is not None:
        world.server.update("TrainingSession", session["metadata"]["name"], change)


@_event(4)
def a_session_is_deleted(world: World) -> None:
    session = _a_session(world)
    if session is not None:
        world.server.delete("TrainingSession", session["metadata"]["name"])


@_event()
def a_declared_session_is_created_again(world: World) -> None:
    gone = [each for each in world.clients if each.run.is_declared and each.session() is None]
    free = [each for each in gone if world.server.find("TrainingSession", each.run.name) is None]
    if free:
        world.add_client(free[0].run)


@_event()
def a_client_goes_silent(world: World) -> None:
    if world.clients:
        world.random.choice(world.clients).is_silent = True


@_event()
def all_clients_return(world: World) -> None:
    for client in world.clients:
        client.is_silent = False


@_event(3)
def a_session_is_suspended(world: World) -> None:
    _change(world, _a_session(world), {"spec": {"suspend": True}})


@_event(4)
def all_sessions_are_resumed(world: World) -> None:
    for session in world.server.all("TrainingSession"):
        _change(world, session, {"spec": {"suspend": False}})


@_event()
def a_session_is_retried(world: World) -> None:
    now = timestamp(world.server.clock.now())
    _change(world, _a_session(world), {"metadata": {"annotations": {labels.RETRY: now}}})


# Children.


def _delete_one(world: World, kind: str, ending: str = "") -> None:
    found = [
        each["metadata"]["name"]
        for each in world.server.all(kind)
        if each["metadata"]["name"].endswith(ending)
    ]
    if found:
        world.server.delete(kind, world.random.choice(found))


@_event(4)
def a_raycluster_is_deleted(world: World) -> None:
    _delete_one(world, "RayCluster")


@_event()
def a_service_is_deleted(world: World) -> None:
    _delete_one(world, "Service")


@_event()
def a_secret_is_deleted(world: World) -> None:
    _delete_one(world, "Secret")


@_event()
def a_marker_of_a_secret_is_deleted(world: World) -> None:
    _delete_one(world, "ConfigMap", "-token")


@_event()
def a_configuration_is_deleted(world: World) -> None:
    _delete_one(world, "ConfigMap", "-config")


@_event()
def a_network_policy_is_deleted(world: World) -> None:
    _delete_one(world, "NetworkPolicy")


@_event()
def a_disruption_budget_is_deleted(world: World) -> None:
    _delete_one(world, "PodDisruptionBudget")


@_event()
def somebody_edits_a_service(world: World) -> None:
    found = world.server.all("Service")
    if found:
        name = world.random.choice(found)["metadata"]["name"]
        world.server.update("Service", name, {"spec": {"selector": {"app": "other"}}})


@_event()
def somebody_edits_the_replicas_of_a_raycluster(world: World) -> None:
    for cluster in world.server.all("RayCluster"):
        groups = cluster["spec"].get("workerGroupSpecs", [])
        if groups:
            fewer = [{**each, "replicas": 1} for each in groups]
            spec = {"spec": {"workerGroupSpecs": fewer}}
            world.server.update("RayCluster", cluster["metadata"]["name"], spec)
            return


# Pods and containers.


def _a_pod(world: World, component: str) -> Json | None:
    found = [pod for pod in world.pods(component) if "nodeName" in pod["spec"]]
    return world.random.choice(found) if found else None


@_event(3)
def the_pod_of_a_head_is_deleted(world: World) -> None:
    pod = _a_pod(world, "head")
    if pod is not None:
        world.server.delete("Pod", pod["metadata"]["name"])


@_event()
def the_pod_of_a_head_is_deleted_by_force(world: World) -> None:
    pod = _a_pod(world, "head")
    if pod is not None:
        world.server.remove("Pod", pod["metadata"]["name"])


@_event(3)
def the_pod_of_a_trainer_is_deleted(world: World) -> None:
    pod = _a_pod(world, "trainer")
    if pod is not None:
        world.server.delete("Pod", pod["metadata"]["name"])


@_event()
def a_trainer_is_preempted(world: World) -> None:
    pod = _a_pod(world, "trainer")
    if pod is not None:
        world.nodes.disrupt(pod)


@_event(3)
def the_container_of_a_head_is_killed(world: World) -> None:
    pod = _a_pod(world, "head")
    if pod is not None:
        world.nodes.crash(pod["metadata"]["name"])


@_event()
def the_container_of_a_trainer_is_killed(world: World) -> None:
    pod = _a_pod(world, "trainer")
    if pod is not None:
        world.nodes.crash(pod["metadata"]["name"])


@_event(3)
def a_head_hangs(world: World) -> None:
    heads = [*world.nodes.heads.values()]
    if heads:
        head = world.random.choice(heads)
        head.hang(hangs=True)
        seconds = world.random.choice([5.0, 30.0, 120.0])
        world.loop.call_later(seconds, lambda: head.hang(hangs=False))


# Nodes.


def _a_node(world: World) -> str | None:
    found = [name for name, each in world.nodes.machines.items() if each.is_on]
    return world.random.choice(found) if found else None


@_event()
def a_node_is_lost(world: World) -> None:
    name = _a_node(world)
    if name is not None:
        world.nodes.power_off(name, world.loop.time())


@_event(3)
def all_nodes_return(world: World) -> None:
    for name, machine in world.nodes.machines.items():
        if not machine.is_on:
            world.nodes.power_on(name)


@_event()
def lost_nodes_are_out_of_service(world: World) -> None:
    for name, machine in world.nodes.machines.items():
        if not machine.is_on:
            world.nodes.taint(name, OUT_OF_SERVICE)


@_event()
def a_node_is_replaced(world: World) -> None:
    name = _a_node(world)
    if name is not None:
        gpus = world.nodes.machines[name].gpus
        world.nodes.delete_node(name, world.loop.time())
        world.nodes.add(world.next_name("node"), gpus)


@_event(3)
def a_node_is_cordoned(world: World) -> None:
    name = _a_node(world)
    if name is not None:
        world.server.update("Node", name, {"spec": {"unschedulable": True}})


@_event(4)
def all_nodes_are_uncordoned(world: World) -> None:
    for name in world.nodes.machines:
        world.server.update("Node", name, {"spec": {"unschedulable": None}})


@_event()
def a_spot_node_gets_its_notice(world: World) -> None:
    """Two minutes later the node is gone, and another one takes its place."""
    name = _a_node(world)
    if name is None:
        return
    world.nodes.taint(name, SPOT_NOTICE)

    def end() -> None:
        if name in world.nodes.machines:
            gpus = world.nodes.machines[name].gpus
            world.nodes.delete_node(name, world.loop.time())
            world.nodes.add(world.next_name("node"), gpus)

    world.loop.call_later(120.0, end)


# Administrators.


def _change_model(world: World, name: str, change: Json) -> None:
    found = [each for each in world.server.all("BaseModel") if each["metadata"]["name"] == name]
    if found:
        world.server.update("BaseModel", name, change)


@_event(3)
def the_pool_gets_another_size(world: World) -> None:
    least = world.random.choice([0, 0, 1])
    size = {"minClusters": least, "maxClusters": world.random.choice([1, 2, 3])}
    _change_model(world, "pool", {"spec": {"pool": size}})


@_event()
def clusters_get_another_number_of_slots(world: World) -> None:
    slots = {"slotsPerCluster": world.random.choice([1, 2, 4])}
    _change_model(world, "pool", {"spec": {"pool": slots}})


@_event()
def another_number_of_spares_is_wanted(world: World) -> None:
    _change_model(world, "warm", {"spec": {"warmSpares": world.random.choice([0, 1, 2])}})


@_event(3)
def a_base_model_gets_another_image(world: World) -> None:
    name = world.random.choice(["alone", "ranks", "pool", "warm"])
    _change_model(world, name, {"spec": {"head": {"image": world.next_name("worker:")}}})


@_event(1)
def a_base_model_is_created_again(world: World) -> None:
    found = world.server.all("BaseModel")
    if found:
        before = world.random.choice(found)
        name = before["metadata"]["name"]
        world.server.delete("BaseModel", name)
        again = {"metadata": {"name": name}, "spec": before["spec"]}
        world.loop.call_later(
            world.random.choice([1.0, 60.0]), lambda: world.server.create("BaseModel", again)
        )


@_event()
def the_pool_is_closed_for_a_while(world: World) -> None:
    until = timestamp(world.server.clock.now() + timedelta(seconds=120))
    closed = {"metadata": {"annotations": {labels.POOL_CLOSED_UNTIL: until}}}
    _change_model(world, "pool", closed)


@_event(3)
def a_cluster_of_the_pool_is_drained(world: World) -> None:
    _change(world, _a_cluster(world, "Pool"), {"metadata": {"annotations": {labels.DRAIN: "true"}}})


def _a_cluster(world: World, role: str) -> Json | None:
    found = [
        each for each in world.server.all("TrainingSession") if each["spec"].get("role") == role
    ]
    return world.random.choice(found) if found else None


@_event()
def a_cluster_of_the_pool_is_deleted(world: World) -> None:
    cluster = _a_cluster(world, "Pool")
    if cluster is not None:
        world.server.delete("TrainingSession", cluster["metadata"]["name"])


@_event()
def a_cluster_of_the_pool_is_suspended(world: World) -> None:
    _change(world, _a_cluster(world, "Pool"), {"spec": {"suspend": True}})


@_event()
def a_spare_is_deleted(world: World) -> None:
    spare = _a_cluster(world, "Spare")
    if spare is not None:
        world.server.delete("TrainingSession", spare["metadata"]["name"])


@_event()
def a_tenant_gets_limits(world: World) -> None:
    limits = {
        "sessions": world.random.choice([1, 2, 4]),
        "dedicatedGpus": world.random.choice([4, 8]),
        "models": world.random.choice([1, 3]),
    }
    spec = {"owners": ["ada", "bob"], "limits": limits}
    if world.server.update("Tenant", "research", {"spec": spec}) is None:
        world.server.create("Tenant", {"metadata": {"name": "research"}, "spec": spec})


@_event()
def the_tenant_is_deleted(world: World) -> None:
    _delete_one(world, "Tenant")


# The operator, the API server, the store.


@_event(3)
def the_operator_is_killed(world: World) -> None:
    world.background(world.operator.kill())
    world.loop.call_later(world.random.uniform(0.5, 20.0), world.operator.start)


@_event(4)
def the_operator_is_killed_at_one_of_its_next_writes(world: World) -> None:
    world.operator.kill_after(world.random.randint(1, 12))
    world.loop.call_later(30.0, world.operator.start)


@_event(3)
def the_api_server_fails_some_requests(world: World) -> None:
    weather = world.network.weather
    weather.failing = world.random.choice([0.05, 0.3])
    world.loop.call_later(60.0, lambda: setattr(weather, "failing", 0.0))


@_event()
def the_api_server_is_away(world: World) -> None:
    weather = world.network.weather
    weather.is_down = True
    seconds = world.random.choice([5.0, 60.0])
    world.loop.call_later(seconds, lambda: setattr(weather, "is_down", False))


@_event()
def the_api_server_is_slow(world: World) -> None:
    weather = world.network.weather
    weather.slowest_seconds = world.random.choice([1.0, 10.0])
    world.loop.call_later(60.0, lambda: setattr(weather, "slowest_seconds", 0.05))


@_event(3)
def watch_events_are_late(world: World) -> None:
    watches = world.operator.watches
    if watches is not None:
        watches.longest_delay = world.random.choice([2.0, 20.0])
        world.loop.call_later(90.0, lambda: setattr(watches, "longest_delay", 0.2))


@_event()
def the_watches_break_for_a_while(world: World) -> None:
    watches = world.operator.watches
    if watches is not None:
        watches.break_off()
        world.loop.call_later(world.random.choice([2.0, 30.0]), watches.reconnect)


@_event(3)
def the_store_is_away(world: World) -> None:
    if not world.store.is_away:
        world.store.is_away, world.store.away_until = True, float("inf")
        world.loop.call_later(world.random.choice([10.0, 120.0, 400.0]), world.end_outage)


@_event()
def the_clock_of_the_operator_jumps(world: World) -> None:
    world.clock.error = timedelta(seconds=world.random.uniform(-20.0, 20.0))


@_event(3)
def some_time_passes(world: World) -> None:
    world.wait_longer = world.random.choice([120.0, 600.0, 2000.0])
