"""`tinkercloud catalog`: rebuilding a lost catalog of this machine."""

import dataclasses
import json

import typer

from tinkercloud_api.commands.common.local_catalog import Change, StateDir, change_catalog
from tinkercloud_api.commands.common.progress import waiting
from tinkercloud_api.commands.common.shared import Json, fail, read_settings, say_line

app = typer.Typer(
    help="Manage the catalog, the index of training runs and checkpoints.", no_args_is_help=True
)


@app.command("rebuild")
def rebuild_catalog(state_dir: StateDir = None, *, as_json: Json = False) -> None:
    """Rebuild a lost catalog from the runs and checkpoints in the checkpoint store.

    Existing entries are kept. API keys, the public flag of checkpoints and the metadata of runs
    cannot be restored, as they are not in the checkpoint store.
    """
    from obstore.exceptions import BaseError

    from tinkercloud_api.admin.catalog_rebuild import Rebuilt, rebuild
    from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
    from tinkercloud_protocol.heads.object_store import open_store
    from tinkercloud_protocol.wire.errors import WireError

    settings = read_settings(state_dir=state_dir)
    try:
        objects = ObjectStoreClient(open_store(settings.checkpoint_url))
        change, rebuilt = Change("catalog_rebuild", ["catalog", "rebuild"]), Rebuilt()
        with waiting(
            lambda: (
                f"reading {settings.checkpoint_url}: {rebuilt.runs} of {rebuilt.folders} training"
                f" runs, {rebuilt.checkpoints} checkpoints"
            )
        ):
            change_catalog(state_dir, change, lambda catalog: rebuild(catalog, objects, rebuilt))
    except (WireError, BaseError) as error:
        fail(f"{settings.checkpoint_url}: {error}")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(rebuilt)))
        return
    typer.echo(f"found {rebuilt.runs} training runs and {rebuilt.checkpoints} checkpoints")
    for sentence in rebuilt.damaged:
        say_line(f"damaged: {sentence}")
