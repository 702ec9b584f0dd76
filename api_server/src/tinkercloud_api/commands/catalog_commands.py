"""`tinkercloud catalog`: backing up this machine's catalog, and rebuilding a lost one."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from obstore.exceptions import BaseError
from sqlalchemy import make_url

from tinkercloud_api.catalog.backup import BackupError, back_up
from tinkercloud_api.commands.local_catalog import Change, StateDir, change_catalog
from tinkercloud_api.commands.shared import Json, fail, read_settings
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import WireError

app = typer.Typer(
    help="Manage the catalog, the index of training runs and checkpoints.", no_args_is_help=True
)


@app.command("backup")
def back_up_catalog(
    file: Annotated[Path, typer.Argument(help="File to create.")], state_dir: StateDir = None
) -> None:
    """Copy the catalog to a new file, also while a server uses it.

    Do not copy `catalog.db` itself: the newest changes are in another file. A catalog in
    PostgreSQL is backed up with pg_dump.
    """
    url = make_url(read_settings(state_dir=state_dir).catalog_url)
    if url.get_backend_name() != "sqlite":
        shown = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
        fail(
            f"the catalog is the database {shown}; back it up with `pg_dump --format=custom"
            f" --file={file} --dbname={shown}`"
        )
    try:
        back_up(Path(url.database or ""), file)
    except BackupError as error:
        fail(str(error))


@app.command("rebuild")
def rebuild_catalog(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """Rebuild a lost catalog from the runs and checkpoints in the checkpoint store.

    Existing entries are kept. API keys, the public flag of checkpoints and the metadata of runs
    cannot be restored, as they are not in the checkpoint store.
    """
    # These take a while to load, which other commands need not.
    from tinkercloud_api.admin.catalog_rebuild import rebuild  # noqa: PLC0415
    from tinkercloud_api.checkpoints.checkpoint_store import ObjectStoreClient  # noqa: PLC0415

    settings = read_settings(state_dir=state_dir)
    try:
        objects = ObjectStoreClient(open_store(settings.checkpoint_url))
        change = Change("catalog_rebuild", ["catalog", "rebuild"])
        rebuilt = change_catalog(state_dir, change, lambda catalog: rebuild(catalog, objects))
    except (WireError, BaseError) as error:
        fail(f"{settings.checkpoint_url}: {error}")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(rebuilt)))
        return
    typer.echo(f"found {rebuilt.runs} training runs and {rebuilt.checkpoints} checkpoints")
    for sentence in rebuilt.damaged:
        typer.echo(f"damaged: {sentence}")
