"""The base models of a server: what it serves, and adding and removing models while it runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config import added_models
from tinkercloud_api.config.added_models import AddedModelsError
from tinkercloud_api.config.model_places import PlaceError, absolute
from tinkercloud_api.config.readable import binary_size
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadFailed, ServedModel, SessionProvider
from tinkercloud_api.providers.local.local_provider import LocalProvider
from tinkercloud_protocol.responses.listings import ListedModel, ModelRemoved
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable

log = structlog.get_logger(__name__)

_RUNS_NAMED = 5


class ModelRefusedError(Exception):
    """A model can't be found, downloaded or served; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Finds the files of models on this machine. The functions without `await` block."""

    is_missing: Callable[[str, str], bool]
    """Whether a model, by its name and place, has to be downloaded."""
    download: Callable[[str, str], Awaitable[None]]
    """Downloads it. Raises ModelRefusedError. Cancelling ends the download."""
    downloaded_bytes: Callable[[str], int]
    """Returns how much of a place the local cache has."""
    checked: Callable[[str, str], ServedModel]
    """Finds it, and checks that this machine can serve it. Raises ModelRefusedError."""


@dataclass(slots=True)
class _Unserved:
    """A model that is not served, because it is downloaded or because that has failed."""

    where: str
    began_at: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    failure: str | None = None


class BaseModels:
    """Lists, adds and removes base models."""

    def __init__(
        self, settings: Settings, provider: SessionProvider, catalog: Catalog, files: ModelFiles
    ) -> None:
        self._settings = settings
        self._provider = provider
        self._local = provider if isinstance(provider, LocalProvider) else None
        self._catalog = catalog
        self._files = files
        self._where = {name: _whole_path(where) for name, where in settings.models.items()}
        """Where the served models are, by name."""
        self._added: dict[str, str] = {}
        """Those of them that the next start serves as well, although no setting names them."""
        self._unserved: dict[str, _Unserved] = {}
        self._change = asyncio.Lock()

    async def start(self) -> None:
        """Serve the models that were added to earlier servers of the state folder.

        The server starts without those that can't be served any more; `listed` says why.

        Raises:
            AddedModelsError: it can't be read which ones they are.
        """
        if self._local is None:
            return
        self._added = added_models.read(self._settings.state_dir)
        for name, where in self._added.items():
            if name in self._where:
                continue
            try:
                await self._serve(self._local, name, where)
            except (ModelRefusedError, HeadFailed) as error:
                log.warning("an added model is not served", model=name, reason=str(error))
                self._unserved[name] = _Unserved(where, failure=str(error))

    async def stop(self) -> None:
        """End all downloads."""
        for each in self._unserved.values():
            await _end(each)

    async def listed(self, caller: Principal) -> list[ListedModel]:
        """Return the base models, and the number of the runs of each that the caller may see."""
        runs = await self._catalog.count_open_runs(caller.visible("accessible"))
        is_admin, pools = caller.role is Role.ADMIN, self._provider.pools()
        served = [
            ListedModel(
                model_name=model.name,
                aliases=list(model.aliases),
                max_context_length=model.max_context_length,
                reads_images=model.reads_images,
                state=self._provider.state_of(model),
                source=self._where.get(model.name) if is_admin else None,
                runs=runs.get(model.name, 0),
                pool=pools.get(model.name),
                gpus=self._provider.gpus_of(model),
            )
            for model in self._provider.models()
        ]
        return served + [
            ListedModel(
                model_name=name,
                max_context_length=None,
                state=self._progress(each),
                source=each.where if is_admin else None,
                runs=runs.get(name, 0),
            )
            for name, each in self._unserved.items()
        ]

    def _progress(self, download: _Unserved) -> str:
        if download.failure is not None:
            return f"failed: {download.failure}"
        seconds = time.monotonic() - download.began_at
        size = binary_size(self._files.downloaded_bytes(download.where))
        return f"downloading for {seconds:.0f} s; {size} so far"

    async def add(self, name: str, where: str) -> None:
        """Begin to serve a base model, now and after each restart. This is idempotent.

        Args:
            name: name of the model in the API.
            where: a folder of this machine, or the id of a model, which is downloaded if needed.

        Raises:
            InvalidRequest: the model can't be served, or the name is taken.
            HeadFailed: it has failed to load just now, and is not tried again yet.
            Unavailable: the change can't be recorded.
        """
        local = self._local_provider()
        try:
            where = await asyncio.to_thread(absolute, where)
        except PlaceError as error:
            raise InvalidRequest(f"source: {error}") from None
        async with self._change:
            self._check_free(name, where)
            waiting = self._unserved.get(name)
            if waiting is not None and waiting.failure is None:
                return
            try:
                if await asyncio.to_thread(self._files.is_missing, name, where):
                    new = self._unserved[name] = _Unserved(where)
                    new.task = asyncio.create_task(self._download(local, name, new))
                    return
                await self._serve(local, name, where)
            except ModelRefusedError as error:
                raise InvalidRequest(f"source: {error}") from None
            self._unserved.pop(name, None)
            self._record({**self._added, name: where})

    def _check_free(self, name: str, where: str) -> None:
        """Check that a name is not that of another model.

        Raises:
            InvalidRequest: it is.
        """
        if name in self._settings.aliases:
            raise InvalidRequest(
                f"name: {name!r} is an alias of {self._settings.aliases[name]!r} on this server;"
                " add the model under another name, or start the server without the alias"
            )
        other = self._where.get(name)
        if (waiting := self._unserved.get(name)) is not None and waiting.failure is None:
            other = waiting.where
        if other not in {None, where}:
            raise InvalidRequest(
                f"name: {name!r} is already served from {other!r}, not from {where!r}; remove it"
                " first, or choose another name"
            )

    async def _serve(self, local: LocalProvider, name: str, where: str) -> None:
        """Check a model and begin to load it.

        Raises:
            ModelRefusedError: this machine can't serve it.
            HeadFailed: it has failed to load just now.
        """
        model = await asyncio.to_thread(self._files.checked, name, where)
        await local.add_model(model)
        self._where[name] = where

    async def _download(self, local: LocalProvider, name: str, download: _Unserved) -> None:
        try:
            await self._files.download(name, download.where)
            async with self._change:
                await self._serve(local, name, download.where)
                self._unserved.pop(name, None)
                self._record({**self._added, name: download.where})
        except (ModelRefusedError, HeadFailed, Unavailable) as error:
            log.warning("a model could not be added", model=name, reason=str(error))
            download.failure = str(error)
        except Exception as error:
            log.exception("a model could not be added", model=name)
            download.failure = f"{type(error).__name__}: {error}; add it again"

    async def remove(self, name: str) -> ModelRemoved:
        """Serve a base model no longer, and free its memory. This is idempotent.

        Raises:
            InvalidRequest: the name is an alias, or the next start needs the model for one, or
                runs use it; the message names them.
            Unavailable: the change can't be recorded.
        """
        local = self._local_provider()
        async with self._change:
            self._check_aliases(name)
            await self._check_unused(name)
            was_served = name in self._where or name in self._unserved
            self._record({each: at for each, at in self._added.items() if each != name})
            if (waiting := self._unserved.pop(name, None)) is not None:
                await _end(waiting)
            await local.remove_model(name)
            self._where.pop(name, None)
        return ModelRemoved(was_served=was_served, returns_at_start=name in self._settings.models)

    def _check_aliases(self, name: str) -> None:
        """Check that a model may be removed as far as the aliases of the settings are concerned.

        Raises:
            InvalidRequest: the name is an alias, or the next start needs the model for one.
        """
        aliases = self._settings.aliases
        if name in aliases:
            raise InvalidRequest(
                f"name: {name!r} is an alias of {aliases[name]!r} on this server; remove"
                f" {aliases[name]!r}, or start the server without the alias"
            )
        # The next start serves those of the settings again.
        if name in self._added and (of := [each for each in aliases if aliases[each] == name]):
            raise InvalidRequest(
                f"name: {name!r} has aliases in the settings: {', '.join(map(repr, of))}; the next"
                " start would refuse them without the model. Restart the server without these"
                " aliases, then remove the model"
            )

    async def _check_unused(self, name: str) -> None:
        found = await self._catalog.open_runs(name, _RUNS_NAMED + 1)
        if not found:
            return
        shown = [f"{run.id} of {run.owner}" for run in found[:_RUNS_NAMED]]
        more = " and others" if len(found) > _RUNS_NAMED else ""
        raise InvalidRequest(
            f"name: runs use {name!r}: {', '.join(shown)}{more}; end each with `tinkercloud runs"
            " stop RUN`, which saves it, then remove the model"
        )

    def _record(self, added: Mapping[str, str]) -> None:
        """Record which models the next start adds; those of the settings need no record.

        Raises:
            Unavailable: they can't be written.
        """
        kept = {name: at for name, at in added.items() if name not in self._settings.models}
        if kept == self._added:
            return
        try:
            added_models.write(self._settings.state_dir, kept)
        except AddedModelsError as error:
            raise Unavailable(str(error)) from None
        self._added = kept

    def _local_provider(self) -> LocalProvider:
        """Return the provider of heads on this machine.

        Raises:
            InvalidRequest: heads are pods, and base models are resources of the cluster.
        """
        if self._local is None:
            raise InvalidRequest(
                "base models of a cluster are BaseModel resources, and not changed through the API:"
                " `tinkercloud plan MODEL --gpus GPUS --json` writes one, `kubectl apply` adds it,"
                " and `kubectl delete basemodel NAME` removes it"
            )
        return self._local


def _whole_path(where: str) -> str:
    """Return the place of a model of the settings as `add` compares it."""
    try:
        return absolute(where)
    except PlaceError:
        # Without its folder, the server does not start.
        return where


async def _end(download: _Unserved) -> None:
    if download.task is not None:
        download.task.cancel()
        await asyncio.gather(download.task, return_exceptions=True)
