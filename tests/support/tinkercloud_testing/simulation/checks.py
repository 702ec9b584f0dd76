"""What must hold once a history has settled."""

from collections import Counter
from collections.abc import Iterable, Iterator

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_operator.decide.read.session_facts import condition
from tinkercloud_testing.simulation.cluster.api_server import Json, owners_of
from tinkercloud_testing.simulation.cluster.nodes import gpus_of, session_of
from tinkercloud_testing.simulation.world import World

_CHILDREN = (
    "RayCluster",
    "Pod",
    "Service",
    "Secret",
    "ConfigMap",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ResourceClaimTemplate",
    "Job",
)
_STOPPED = frozenset({Reason.SUSPENDED, Reason.IDLE, Reason.FINISHED, Reason.LIFETIME_EXCEEDED})
_REJECTED = frozenset({Reason.NOT_ALLOWED, Reason.BASE_MODEL_NOT_FOUND})


def violations(world: World) -> list[str]:
    """Return what does not hold in a world at rest."""
    checks = (
        _sessions(world),
        _orphans(world),
        _heads(world),
        _gpus(world),
        _pools(world),
        _spares(world),
        _models(world),
    )
    return [each for found in checks for each in found]


def leftovers(world: World) -> list[str]:
    """Return what is left after everything was deleted."""
    kinds = ("TrainingSession", "BaseModel", *_CHILDREN)
    left = [
        f"{kind} {each['metadata']['name']}" for kind in kinds for each in world.server.all(kind)
    ]
    heads = [f"the process of head {each}" for each in world.nodes.heads]
    return [f"left after the end: {each}" for each in (*left, *heads)]


def ready_of(session: Json) -> Json:
    """Return the Ready condition of a session."""
    return dict(condition(session, ConditionType.READY))


def _sessions(world: World) -> Iterator[str]:
    """Yield sessions that are neither ready nor wait for a reason that is true."""
    for session in world.server.all("TrainingSession"):
        name, ready = session["metadata"]["name"], ready_of(session)
        if "deletionTimestamp" in session["metadata"]:
            yield f"{name} is not deleted: {ready.get('message')}"
        elif ready.get("status") == "True":
            yield from _serving(world, session)
        elif not _may_wait(world, session, ready.get("reason", "")):
            why = f"{ready.get('reason')}: {ready.get('message')}"
            yield f"{name} is not ready for no reason ({why})"


def _serving(world: World, session: Json) -> Iterator[str]:
    """Yield what is wrong with a session that is said to be ready."""
    name, status = session["metadata"]["name"], session["status"]
    head = world.nodes.heads.get(status.get("incarnation", ""))
    if head is None or not head.is_ready:
        yield f"{name} is said to be ready, but its head {status.get('incarnation')} is not"
    elif head.is_stopping:
        yield f"{name} is said to be ready, but its head {head.incarnation} has stopped"
    if session["spec"].get("suspend") and session["spec"].get("sharing") != "Shared":
        yield f"{name} is ready although it is to be suspended"


def _may_wait(world: World, session: Json, reason: str) -> bool:
    """Return whether a session that is not ready waits for a reason that is true."""
    spec, name = session["spec"], session["metadata"]["name"]
    base_model = _base_model(world, session)
    if reason in _STOPPED:
        return bool(spec.get("suspend")) or reason != Reason.SUSPENDED
    if reason in _REJECTED:
        return reason == Reason.NOT_ALLOWED or base_model is None
    if reason == Reason.QUOTA_EXCEEDED:
        return bool(world.server.all("Tenant")) or _is_limited(base_model)
    if reason in {Reason.UNSCHEDULABLE, Reason.NEVER_FITS}:
        pods = [pod for pod in world.pods(session=name) if "nodeName" not in pod["spec"]]
        return any(not world.nodes.fits_somewhere(pod) for pod in pods)
    if reason == Reason.QUEUED:
        return any(
            ready_of(other).get("reason") == Reason.UNSCHEDULABLE
            for other in world.server.all("TrainingSession")
        )
    if reason in {Reason.POOL_FULL, Reason.POOL_CLUSTER_NOT_READY}:
        return base_model is None or _pool_is_short(world, base_model)
    # What its pods have failed with; a person retries it.
    return reason in {Reason.START_FAILED, Reason.RESTART_LIMIT}


def _base_model(world: World, session: Json) -> Json | None:
    wanted = session["spec"]["baseModel"]
    found = (each for each in world.server.all("BaseModel") if each["spec"]["modelName"] == wanted)
    return next(found, None)


def _is_limited(base_model: Json | None) -> bool:
    return base_model is not None and "maxSessionsPerOwner" in base_model["spec"].get("limits", {})


def _pool_is_short(world: World, base_model: Json) -> bool:
    """Return whether a pool has no free slot, and may not or can't get another cluster."""
    spec = base_model["spec"]
    if spec.get("sharing") != "Shared" or _is_closed(base_model):
        return True
    clusters = _clusters(world, spec["modelName"])
    if any(ready_of(each).get("status") != "True" for each in clusters):
        # Those that are not ready have reasons of their own.
        return True
    load = _load(world, clusters)
    slots = _slots(world, base_model)
    # A drained cluster takes no more sessions, and keeps those that no other one has room for.
    is_full = all(_is_drained(each) or load[each["metadata"]["name"]] >= slots for each in clusters)
    return is_full and len(clusters) >= spec["pool"].get("maxClusters", 1)


def _is_closed(base_model: Json) -> bool:
    return labels.POOL_CLOSED_UNTIL in base_model["metadata"].get("annotations", {})


def _is_drained(cluster: Json) -> bool:
    return bool(cluster["metadata"].get("annotations", {}).get(labels.DRAIN) == "true")


def _slots(world: World, base_model: Json) -> int:
    return min(int(base_model["spec"]["pool"]["slotsPerCluster"]), world.nodes.most_models)


def _clusters(world: World, model_name: str) -> list[Json]:
    return [
        each
        for each in world.server.all("TrainingSession")
        if each["spec"].get("role") == "Pool" and each["spec"]["baseModel"] == model_name
    ]


def _load(world: World, clusters: Iterable[Json]) -> Counter[str]:
    names = {each["metadata"]["name"] for each in clusters}
    placed = (
        each["spec"].get("poolCluster")
        for each in world.server.all("TrainingSession")
        if each["spec"].get("sharing") == "Shared" and "finishedTime" not in each.get("status", {})
    )
    return Counter(name for name in placed if name in names)


def _orphans(world: World) -> Iterator[str]:
    """Yield objects whose session, or RayCluster, does not exist."""
    sessions = {each["metadata"]["uid"] for each in world.server.all("TrainingSession")}
    clusters = {each["metadata"]["uid"] for each in world.server.all("RayCluster")}
    for kind in _CHILDREN:
        for child in world.server.all(kind):
            name = child["metadata"]["name"]
            if kind == "Pod":
                if not set(owners_of(child, "RayCluster")) & clusters:
                    yield f"pod {name} belongs to no RayCluster"
            elif not set(owners_of(child, "TrainingSession")) & sessions:
                yield f"{kind} {name} belongs to no session"
    for session in world.server.all("TrainingSession"):
        yield from _support_objects(world, session)


def _support_objects(world: World, session: Json) -> Iterator[str]:
    """Yield children that a session lacks, or that one at rest without pods does not need."""
    name = session["metadata"]["name"]
    is_served = "poolCluster" in session["spec"]
    is_at_rest = is_served or session.get("status", {}).get("phase") in {"Suspended", "Finished"}
    is_running = world.server.find("RayCluster", name) is not None
    for kind, child in (
        ("Service", f"{name}-head"),
        ("ConfigMap", f"{name}-config"),
        ("NetworkPolicy", name),
        ("PodDisruptionBudget", name),
    ):
        found = world.server.find(kind, child)
        if is_running and found is None:
            yield f"{name} has no {kind} {child}"
        if is_at_rest and not is_running and found is not None:
            yield f"{name} has no pods, but {kind} {child}"
    if is_running and world.server.find("Secret", f"{name}-token") is None:
        yield f"{name} has no Secret"


def _heads(world: World) -> Iterator[str]:
    """Yield sessions with several heads."""
    pods = Counter(session_of(pod) for pod in world.pods("head"))
    processes = Counter(head.session for head in world.nodes.heads.values())
    for what, counts in (("pods", pods), ("processes", processes)):
        yield from (f"{name} has {n} head {what}" for name, n in counts.items() if n > 1)


def _gpus(world: World) -> Iterator[str]:
    for name, machine in world.nodes.machines.items():
        booked = sum(gpus_of(pod) for pod in world.pods() if pod["spec"].get("nodeName") == name)
        if max(booked, machine.used()) > machine.gpus:
            yield f"node {name} has {machine.gpus} GPUs, {booked} booked, {machine.used()} used"


def _pools(world: World) -> Iterator[str]:
    """Yield pools of a wrong size, and clusters with too many sessions."""
    for base_model in world.server.all("BaseModel"):
        spec = base_model["spec"]
        clusters = _clusters(world, spec["modelName"])
        load = _load(world, clusters)
        if spec.get("sharing") != "Shared":
            yield from (
                f"{each['metadata']['name']} is left of a pool that is gone"
                for each in clusters
                if not load[each["metadata"]["name"]]
            )
            continue
        pool = spec["pool"]
        if len(clusters) < pool.get("minClusters", 0) and not _is_closed(base_model):
            yield f"pool {spec['modelName']} has {len(clusters)} clusters, fewer than minClusters"
        empty = [each for each in clusters if not load[each["metadata"]["name"]]]
        for cluster in empty:
            if _is_drained(cluster):
                yield f"{cluster['metadata']['name']} is drained and empty, and not deleted"
        if len(clusters) > pool.get("maxClusters", 1) and empty:
            yield f"pool {spec['modelName']} has {len(clusters)} clusters, and {len(empty)} empty"
    for session in world.server.all("TrainingSession"):
        if labels.MOVING_TO in session["metadata"].get("annotations", {}):
            yield f"{session['metadata']['name']} is still being moved"


def _spares(world: World) -> Iterator[str]:
    """Yield BaseModels with a wrong number of spares, and spares that serve nobody."""
    sessions = world.server.all("TrainingSession")
    is_short = any(
        ready_of(each).get("reason") in {Reason.UNSCHEDULABLE, Reason.QUEUED} for each in sessions
    )
    users = {each["spec"].get("poolCluster") for each in sessions}
    uids = {each["metadata"]["uid"] for each in sessions}
    for base_model in world.server.all("BaseModel"):
        spec = base_model["spec"]
        spares = [
            each
            for each in sessions
            if each["spec"].get("role") == "Spare"
            and each["spec"]["baseModel"] == spec["modelName"]
        ]
        free = [each for each in spares if not owners_of(each, "TrainingSession")]
        wanted = spec.get("warmSpares", 0) if spec.get("sharing") != "Shared" else 0
        if len(free) > wanted or (len(free) < wanted and not (is_short or _is_closed(base_model))):
            yield f"{spec['modelName']} has {len(free)} free spares, not {wanted}"
        for spare in spares:
            owners = set(owners_of(spare, "TrainingSession"))
            name = spare["metadata"]["name"]
            if owners and not (owners & uids and name in users):
                yield f"spare {name} was taken, and serves nobody"


def _models(world: World) -> Iterator[str]:
    """Yield models that a head keeps although their sessions have ended or are elsewhere."""
    sessions = {
        each["spec"]["modelId"]: each
        for each in world.server.all("TrainingSession")
        if "modelId" in each["spec"]
    }
    for head in world.nodes.heads.values():
        for run in head.models:
            session = sessions.get(run)
            if session is None:
                if run.startswith("trainingsession-"):
                    continue
                yield f"head {head.incarnation} of {head.session} keeps {run}, which is gone"
            elif head.session not in {
                session["spec"].get("poolCluster"),
                session["metadata"]["name"],
            }:
                yield f"head {head.incarnation} of {head.session} keeps {run}, which is elsewhere"
