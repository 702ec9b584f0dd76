"""The checks of `tinkercloud doctor`."""

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import obstore

from tinkercloud_api.admin import machine_checks, preflight
from tinkercloud_api.admin.listening import PortTakenError, bind
from tinkercloud_api.admin.machine_checks import CheckResult
from tinkercloud_api.catalog.schema.connection import (
    CatalogUnreachableError,
    check_revision,
    described,
    open_database,
)
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config import added_models, server_settings, state_folder
from tinkercloud_api.config.readable import binary_size
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadFailed
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.providers.head_progress import resident_bytes
from tinkercloud_api.providers.local.head_folder import HeadFolder
from tinkercloud_api.providers.model_arguments import ModelNotFoundError, resolve
from tinkercloud_api.runs.server_disks import LOW_DISK_BYTES
from tinkercloud_crds import labels
from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import KubernetesError
from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable


async def examine(settings: Settings) -> AsyncIterator[CheckResult]:
    """Yield the results of all checks.

    They create the state folder if it is missing, and change nothing else.
    """
    settings = _with_served_models(settings)
    on_cluster = settings.provider == "kubernetes"
    yield _state_dir(settings)
    yield _disk(settings)
    yield machine_checks.disk_speed(settings.state_dir)
    yield machine_checks.packages()
    for result in await machine_checks.clock(settings):
        yield result
    yield await _cluster(settings) if on_cluster else _worker(settings)
    yield await _catalog(settings)
    yield await _checkpoints(settings)
    if not on_cluster:
        yield _kept(settings)
        yield _heads(settings)
        yield await _durability(settings)
        for result in await machine_checks.device(settings):
            yield result
    for name, where in settings.models.items():
        yield _model(name, where)
    yield await _server(settings)


def _with_served_models(settings: Settings) -> Settings:
    """Add the models that the running server of the state folder was started with, or was given."""
    file = settings.state_dir / server_settings.FILE
    if state_folder.running_server(settings.state_dir) is None or not file.is_file():
        return settings
    served = server_settings.models(file.read_text())
    with contextlib.suppress(added_models.AddedModelsError):
        served |= added_models.read(settings.state_dir)
    return settings.model_copy(update={"models": {**served, **settings.models}})


def _state_dir(settings: Settings) -> CheckResult:
    try:
        state_folder.make(settings.state_dir)
    except state_folder.StateFolderError as error:
        return CheckResult("state folder", is_good=False, detail=str(error))
    return CheckResult("state folder", is_good=True, detail=str(settings.state_dir))


def _disk(settings: Settings) -> CheckResult:
    folder = settings.state_dir if settings.state_dir.exists() else "/"
    free = shutil.disk_usage(folder).free
    is_good = free >= LOW_DISK_BYTES
    remedy = "" if is_good else "delete old checkpoints, or choose another state folder"
    return CheckResult("disk", is_good=is_good, detail=f"{binary_size(free)} free", remedy=remedy)


def _kept(settings: Settings) -> CheckResult:
    """Report the disk use of the state folder and how long the data is kept."""
    scratch = sum(map(_size, settings.state_dir.glob("heads/*/scratch")))
    heads = f"{binary_size(scratch)} of session heads' scratch space, kept until they restart"
    if settings.checkpoint_root is not None:
        return CheckResult("disk use", is_good=True, detail=heads)
    runs = settings.state_dir / "checkpoints" / "runs"
    all_bytes, suspended = _size(runs), list(runs.glob("*/suspended"))
    suspended_bytes = sum(map(_size, suspended))
    days = settings.session_expiry_days
    until = "until their sessions are deleted"
    if days is not None:
        until = f"until their clients have been inactive for {days:g} days (session_expiry_days)"
    detail = (
        f"{binary_size(suspended_bytes)} of {len(suspended)} suspended runs, kept {until};"
        f" {binary_size(all_bytes - suspended_bytes)} of checkpoints, kept until they expire or are"
        f" deleted; {heads}"
    )
    return CheckResult("disk use", is_good=True, detail=detail)


def _heads(settings: Settings) -> CheckResult:
    """Report the memory of running heads and the limits that apply to it."""
    limits = settings.limits
    detail = (
        "in addition to its base model, a session head keeps up to"
        f" {binary_size(limits.max_sampler_bytes)} of sampler weights (limits.max_sampler_bytes),"
        f" {binary_size(limits.max_result_bytes)} of results (limits.max_result_bytes), and each"
        " model whose client was active in the last"
        f" {settings.session_silence_seconds:g} s (session_silence_seconds)"
    )
    running = [
        f"{record.parent.name} uses {binary_size(resident)}"
        for record in sorted(settings.state_dir.glob("heads/*/head.json"))
        if (resident := _resident_bytes(record)) is not None
    ]
    return CheckResult("memory", is_good=True, detail="; ".join([detail, *running]))


async def _durability(settings: Settings) -> CheckResult:
    """Report whether the models of running heads would survive a killed head."""
    async with open_client() as client:
        records = sorted(settings.state_dir.glob("heads/*/head.json"))
        statuses = [await _status(client, record.parent) for record in records]
    silent = [
        f"{record.parent.name} (process {pid})"
        for record, status in zip(records, statuses, strict=True)
        if status is None and (pid := _running_pid(record.parent)) is not None
    ]
    if silent:
        return CheckResult(
            "durability",
            is_good=False,
            detail=f"session heads that do not respond: {', '.join(silent)}",
            remedy="wait if a model is being loaded; otherwise look at `tinkercloud logs`, and"
            " `kill -9` the process: the server starts it again, and its runs continue unless"
            " durability.level is none",
        )
    degraded = [
        status.model_name
        for status in statuses
        if status is not None and status.durability == "degraded"
    ]
    if not degraded:
        level = f"level {settings.durability.level} (durability.level)"
        return CheckResult("durability", is_good=True, detail=level)
    detail = (
        f"degraded: a killed head would lose training of {', '.join(degraded)}, because its"
        " journal can't be written; make room on the disk, and see head.log for the reason"
    )
    return CheckResult("durability", is_good=False, detail=detail)


async def _status(client: aiohttp.ClientSession, head: Path) -> HeadStatus | None:
    """Return the status of the head of a folder, or None if it does not respond."""
    try:
        url = json.loads((head / "head.json").read_text())["url"]
        headers = {routes.HEAD_TOKEN_HEADER: (head / "token").read_text()}
        timeout = aiohttp.ClientTimeout(total=5)
        async with client.get(
            url + routes.HEAD_STATUS, headers=headers, timeout=timeout, raise_for_status=True
        ) as response:
            return HeadStatus.model_validate_json(await response.read())
    except (OSError, ValueError, KeyError, aiohttp.ClientError, TimeoutError):
        return None


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, ignoring files that are deleted meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _resident_bytes(record: Path) -> int | None:
    """Return the memory of the head that a record names, or None if it is not running."""
    pid = _running_pid(record.parent)
    return resident_bytes(pid) if pid is not None else None


def _running_pid(head: Path) -> int | None:
    """Return the process of the head of a folder, or None if it is not running."""
    try:
        return HeadFolder(head).running_pid()
    except (HeadFailed, OSError):
        return None


def _worker(settings: Settings) -> CheckResult:
    try:
        preflight.check_installed(settings)
    except preflight.CannotServeError as error:
        return CheckResult("session head", is_good=False, detail=str(error))
    return CheckResult("session head", is_good=True, detail="installed")


async def _cluster(settings: Settings) -> CheckResult:
    try:
        api = await Client.connect(settings.namespace, labels.API_FIELD_MANAGER)
        try:
            offered = await api.list_all("BaseModel")
        finally:
            await api.close()
    except KubernetesError as error:
        remedy = "check KUBECONFIG and TINKERCLOUD_NAMESPACE with `tinkercloud cluster check`"
        return CheckResult("cluster", is_good=False, detail=str(error), remedy=remedy)
    detail = f"{len(offered.items)} BaseModels in namespace {settings.namespace}"
    return CheckResult("cluster", is_good=True, detail=detail)


async def _catalog(settings: Settings) -> CheckResult:
    try:
        check_revision(settings.catalog_url)
        catalog = Catalog(open_database(settings.catalog_url))
    except CatalogUnreachableError as error:
        return CheckResult("catalog", is_good=False, detail=str(error))
    try:
        await catalog.ping()
    except Unavailable as error:
        detail = described(error.__cause__ or error)
        is_file = settings.database_url is None
        remedy = "" if is_file else "start the database, or correct TINKERCLOUD_DATABASE_URL"
        return CheckResult("catalog", is_good=False, detail=detail, remedy=remedy)
    finally:
        await catalog.close()
    return CheckResult("catalog", is_good=True, detail="reachable")


async def _checkpoints(settings: Settings) -> CheckResult:
    url = settings.checkpoint_url
    try:
        await obstore.head_async(open_store(url), "ping")
    except FileNotFoundError:
        pass
    except (obstore.exceptions.BaseError, OSError) as error:
        detail = f"{url} does not respond: {str(error).splitlines()[0]}"
        remedy = "check TINKERCLOUD_CHECKPOINT_ROOT, the network and the store's credentials"
        return CheckResult("checkpoints", is_good=False, detail=detail, remedy=remedy)
    return CheckResult("checkpoints", is_good=True, detail=url)


def _model(name: str, where: str) -> CheckResult:
    try:
        model = resolve(name, where)
        preflight.check_weights(name, Path(model.local_path or ""))
        preflight.check_family(name, Path(model.local_path or ""))
    except (ModelNotFoundError, preflight.CannotServeError) as error:
        return CheckResult(f"model {name}", is_good=False, detail=str(error))
    return CheckResult(f"model {name}", is_good=True, detail=str(model.local_path))


async def _server(settings: Settings) -> CheckResult:
    server = state_folder.running_server(settings.state_dir)
    if server is None:
        detail = "no server runs here (if yours uses another folder: --state-dir)"
        try:
            if settings.provider == "local":
                bind(settings.host, settings.port).close()
        except PortTakenError as error:
            remedy = "if a server of yours has the port, name its folder with --state-dir"
            return CheckResult("server", is_good=False, detail=str(error), remedy=remedy)
        return CheckResult("server", is_good=True, detail=detail)
    url = f"{server.url}/healthz"
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as response:
            content = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        detail = f"process {server.pid} is running, but {url} does not respond: {error}"
        remedy = "wait until it has started, or read its output and start it again"
        return CheckResult("server", is_good=False, detail=detail, remedy=remedy)
    is_good = response.status == 200
    detail = f"process {server.pid} at {server.url}: {content['status']}"
    return CheckResult("server", is_good=is_good, detail=detail)
