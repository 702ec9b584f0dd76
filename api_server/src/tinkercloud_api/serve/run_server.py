"""Runs the API server in this process until a signal stops or restarts it."""

import asyncio
import getpass
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from obstore.exceptions import BaseError

from tinkercloud_api.access import server_acts
from tinkercloud_api.access.auth import hash_key, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.admin import preflight
from tinkercloud_api.admin.catalog_rebuild import has_checkpoints
from tinkercloud_api.admin.listening import bind
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.schema.connection import check_revision, migrate, open_database
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.config import added_models, server_settings, state_folder
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.lasting_objects import lasting_objects
from tinkercloud_api.providers.base import SessionProvider
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.local.local_provider import LocalProvider
from tinkercloud_api.providers.model_arguments import check_aliases, resolve
from tinkercloud_api.providers.model_names import with_aliases
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.serve.model_download import download_missing
from tinkercloud_api.web import connections
from tinkercloud_protocol.heads import descriptors
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import WireError

log = structlog.get_logger(__name__)

_GRACE_SECONDS = 10

Waiting = Callable[[str], AbstractContextManager[None]]
"""Returns a context that shows a clause, such as `loading the program`, while it lasts."""


class _Server(uvicorn.Server):
    """A server that restarts on SIGHUP."""

    restart_wanted = False

    def __init__(self, config: uvicorn.Config, app: Application) -> None:
        super().__init__(config)
        self._app = app

    def restart(self, number: int, frame: FrameType | None) -> None:
        """Stop, and have `run` restart the process (a signal handler)."""
        self.restart_wanted = True
        self.handle_exit(number, frame)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and end all long polls (uvicorn's signal handler)."""
        if self._app.context is not None:
            self._app.context.long_polls.shut_down()
        super().handle_exit(sig, frame)


def run(settings: Settings, waiting: Waiting) -> None:
    """Serve until stopped.

    SIGINT and SIGTERM stop the server and its session heads; SIGHUP restarts the server.

    Args:
        settings: the settings.
        waiting: is used for each part of the start that may take long.

    Raises:
        PortTakenError: the port is not available.
        StateFolderError: the state folder is unusable or of a newer release, or another server uses
            it.
        CatalogUnreachableError: the catalog does not respond, or is of a newer release.
        AddedModelsError: it can't be read which models were added to earlier servers.
        ModelNotFoundError: a configured model is not on this machine and cannot be downloaded.
        CannotServeError: another setting can't work.
    """
    os.umask(0o077)
    bound = settings.max_connections or connections.default_bound(descriptors.raise_limit())
    provider = _provider(settings)
    served = provider.models() if settings.provider == "local" else []
    with waiting(f"checking models and state in {settings.state_dir.absolute()}"):
        _check_versions(settings)
        _make_state_folder(settings)
        preflight.check(settings, {each.name: each.local_path or "" for each in served})
    with lasting_objects():
        app = Application(settings, provider)
    listener = bind(settings.host, settings.port)
    listener.listen(2048)
    app.own_url = _url(settings, listener.getsockname()[1])
    with _exclusive(settings, app.own_url):
        _record_settings(settings)
        preflight.check_metrics_port(settings)
        asyncio.run(_print_welcome(settings, listener.getsockname()[1], waiting))
        config = uvicorn.Config(
            app,
            loop="auto",
            http=connections.bounded(bound),
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            **proxy_options(settings),
        )
        server = _Server(config, app)
        signal.signal(signal.SIGHUP, server.restart)
        server.run(sockets=[listener])
    if server.restart_wanted:
        log.info("restarting")
        listener.close()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def proxy_options(settings: Settings) -> dict[str, Any]:
    """Return uvicorn's options for the proxies that may name the address of a client."""
    networks = settings.trusted_proxies
    trusted = [str(network) for network in networks]
    # How a socket of both protocols (--host ::) names peers with IPv4 addresses.
    trusted += [
        f"::ffff:{network.network_address}/{96 + network.prefixlen}"
        for network in networks
        if network.version == 4
    ]
    # Otherwise uvicorn trusts this machine, or the variable FORWARDED_ALLOW_IPS.
    return {"proxy_headers": bool(trusted), "forwarded_allow_ips": trusted}


def _provider(settings: Settings) -> SessionProvider:
    if settings.provider == "kubernetes":
        return KubernetesProvider(settings.namespace, settings.models_dir, settings.aliases)
    check_aliases(settings.aliases, {**added_models.read(settings.state_dir), **settings.models})
    download_missing(settings.models)
    models = [resolve(name, where) for name, where in settings.models.items()]
    return LocalProvider(with_aliases(models, settings.aliases), settings)


def _url(settings: Settings, port: int) -> str:
    """Return the URL of the server for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check_versions(settings: Settings) -> None:
    """Refuse the state of a newer release before anything is written to its folder."""
    state_folder.finish_restore(settings.state_dir)
    state_folder.check_version(settings.state_dir)
    check_revision(settings.catalog_url)


def _make_state_folder(settings: Settings) -> None:
    if _has_state_folder(settings):
        state_folder.make(settings.state_dir)


def _has_state_folder(settings: Settings) -> bool:
    """Return whether the server has one: on Kubernetes, only if it contains the catalog."""
    return settings.database_url is None or settings.provider == "local"


def _record_settings(settings: Settings) -> None:
    """Write the settings to the state folder, where backups find them."""
    if not _has_state_folder(settings):
        return
    try:
        server_settings.write(settings.state_dir, settings)
    except OSError as error:
        log.warning("the settings can't be recorded for backups", reason=str(error))


def _exclusive(settings: Settings, url: str) -> AbstractContextManager[object]:
    """Return a context in which no other server, and no restore, uses the state folder."""
    if not _has_state_folder(settings):
        return nullcontext()
    return state_folder.StateFolderLock(settings.state_dir, url)


async def _print_welcome(settings: Settings, port: int, waiting: Waiting) -> None:
    """Create the first API key if there is none, and print how to connect.

    On Kubernetes no key is created, because the output of pods is usually collected as logs.
    """
    engine = open_database(settings.catalog_url)
    catalog, key = Catalog(engine), None
    with waiting("opening the catalog and the checkpoint store"):
        await migrate(engine)
        await _warn_of_lost_catalog(settings, catalog)
    keys = await catalog.keys()
    has_keys = settings.bootstrap_key is not None or bool(keys)
    if settings.bootstrap_key is None and keys and not any(each.is_valid(now()) for each in keys):
        log.warning(
            "all API keys are revoked or have expired; create a new one",
            command=_command(settings, "keys", "create", "NAME"),
        )
    if settings.provider == "kubernetes":
        await catalog.close()
        if not has_keys:
            log.warning("there is no API key; set TINKERCLOUD_BOOTSTRAP_KEY from a Secret")
        return
    if not has_keys:
        key, audit_log = new_key(), AuditLog(engine)
        entry = await server_acts.begin_key(audit_log, "first key of the server")
        row = await catalog.add_key(
            key_hash=hash_key(key), name="first", owner=_user_name(), role=Role.ADMIN
        )
        await server_acts.finish_key(audit_log, entry, row)
    await catalog.close()
    sys.stderr.write(_welcome(settings, port, key) + "\n\n")


async def _warn_of_lost_catalog(settings: Settings, catalog: Catalog) -> None:
    """Log a warning if the catalog is empty but the checkpoint store is not."""
    try:
        is_lost = await catalog.is_empty() and await has_checkpoints(
            ObjectStoreClient(open_store(settings.checkpoint_url))
        )
    except (WireError, BaseError) as error:
        log.warning("cannot determine whether the store contains checkpoints", error=str(error))
        return
    if is_lost:
        log.warning(
            "the catalog is empty, but the store contains checkpoints: they can be loaded by path"
            " but are not listed until the catalog is rebuilt",
            checkpoints=settings.checkpoint_url,
            command=_command(settings, "catalog", "rebuild"),
        )


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "admin"


def _welcome(settings: Settings, port: int, key: str | None) -> str:
    url = _url(settings, port)
    models = {**settings.models, **added_models.read(settings.state_dir)}
    model = next(iter(models), None)
    lines = [f"Serving {', '.join(models) or 'no models'} at {url}", ""]
    if models and settings.preload:
        lines[0] = f"Loading {', '.join(models)}; clients of {url} wait until that is done"
    if model is None:
        lines += [
            "To serve one, start with --model NAME=FOLDER, or set TINKERCLOUD_MODELS; or add one to"
            " the running server with `tinkercloud models add NAME`.",
            "",
        ]
    if key is not None:
        lines += ["Created an API key. It is shown only once and stored as a hash:", ""]
    else:
        lines += [
            "The API keys of before stay valid. To create another one:",
            "",
            _command(settings, "keys", "create", "NAME"),
            "",
        ]
    lines += [
        f"export TINKER_BASE_URL={url}",
        f"export TINKER_API_KEY={key or 'tml-...'}",
        f"export HF_ENDPOINT={url}/hf    # tokenizers from this server, not the public hub",
        f"export OPENAI_BASE_URL={url}{routes.OPENAI} OPENAI_API_KEY=$TINKER_API_KEY",
        f"export ANTHROPIC_BASE_URL={url}{routes.ANTHROPIC} ANTHROPIC_API_KEY=$TINKER_API_KEY",
        "",
        "In a browser: `tinkercloud console` prints a link.",
    ]
    if model is not None:
        lines += [
            "",
            "import tinker",
            "client = tinker.ServiceClient()",
            f'training = client.create_lora_training_client(base_model="{model}").result()',
            "tokenizer = training.get_tokenizer()",
        ]
    return "\n".join(lines)


def _command(settings: Settings, *arguments: str) -> str:
    """Return a command for this server's catalog that works in any folder."""
    installed = Path(sys.executable).with_name("tinkercloud")
    program = str(installed) if installed.exists() else "tinkercloud"
    if settings.database_url is None:
        state_dir = str(settings.state_dir.absolute())
        return shlex.join([program, *arguments, "--state-dir", state_dir])
    return shlex.join([program, *arguments]) + "    # with this server's database_url"
