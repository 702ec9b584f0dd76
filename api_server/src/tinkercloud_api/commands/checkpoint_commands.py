"""`tinkercloud checkpoints`: list, publish, export, merge, import and delete checkpoints."""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tinkercloud_api.commands.common.progress import copying, waiting
from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Csv,
    Json,
    Yes,
    confirm,
    fail,
    pip_install,
    request,
    say,
    say_line,
    show,
    show_csv,
)
from tinkercloud_api.config.readable import binary_size, moment

app = typer.Typer(
    help="List, publish, keep, export, merge, import and delete checkpoints of a running server.",
    no_args_is_help=True,
)

_COMPLETE = "checkpoint_complete"
"""Empty file at the end of a complete archive."""
_PART_BYTES = 1 << 20
_FOR_MERGING = {"tinkercloud_worker": ["tinkercloud"], "peft": ["peft", "accelerate"]}
"""What merging imports, and the packages that have it."""
_WEIGHTS = {".safetensors", ".bin"}
"""Endings of files with weights."""
_UPLOAD_COLUMNS = ["upload_id", "name", "base_model", "size", "is_received", "expires"]
_COLUMNS = ["path", "type", "base model", "size", "saved", "expires", "public"]

_DAY_SECONDS = 24 * 3600
_MAX_DAYS = 3650

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="Path of the checkpoint: tinker://...")
]


@app.command("list")
def list_checkpoints(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of checkpoints to list.")
    ] = 100,
    *,
    everybody: Annotated[
        bool,
        typer.Option(
            "--all",
            help="List what you may see: also that of your projects, and for admins of all owners.",
        ),
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List checkpoints, newest first."""
    if as_csv and as_json:
        fail("--csv, --json: choose one of them")
    scope = "accessible" if everybody else "owned"
    answer = request("GET", base_url, api_key, f"checkpoints?limit={limit}&access_scope={scope}")
    found: list[dict[str, Any]] = answer["checkpoints"]
    if as_csv:
        from tinkercloud_protocol.responses.listings import CheckpointInfo

        show_csv(found, list(CheckpointInfo.model_fields))
        return
    show(found if as_json else [_row(each) for each in found], _COLUMNS, as_json=as_json)


def _row(checkpoint: dict[str, Any]) -> dict[str, object]:
    return {
        "path": checkpoint["tinker_path"],
        "type": checkpoint["checkpoint_type"],
        "base model": checkpoint.get("base_model") or "",
        "size": binary_size(checkpoint["size_bytes"]),
        "saved": moment(checkpoint["time"]),
        "expires": moment(checkpoint.get("expires_at")) or "never",
        "public": "yes" if checkpoint["public"] else "no",
    }


@app.command("publish")
def publish_checkpoint(
    path: PathArgument, api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False
) -> None:
    """Let everybody with a key of the server read a checkpoint."""
    request("POST", base_url, api_key, f"{_url_of(path)}/publish")
    say(f"everybody may read {path}", {"tinker_path": path, "public": True}, as_json=as_json)


@app.command("unpublish")
def unpublish_checkpoint(
    path: PathArgument, api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False
) -> None:
    """Let only those read a checkpoint who may see its run."""
    request("DELETE", base_url, api_key, f"{_url_of(path)}/publish")
    say(
        f"not everybody may read {path} any more",
        {"tinker_path": path, "public": False},
        as_json=as_json,
    )


@app.command("ttl")
def set_ttl(
    path: PathArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    days: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_DAYS, help="Delete it after so many days from now."),
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Keep it until it is deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Set how long a checkpoint is kept."""
    if never == (days is not None):
        fail("--days, --never: choose one of them")
    seconds = None if days is None else days * _DAY_SECONDS
    request("PUT", base_url, api_key, f"{_url_of(path)}/ttl", {"ttl_seconds": seconds})
    until = "until it is deleted" if days is None else f"for {days} day{'s' * (days != 1)}"
    say(f"{path} is kept {until}", {"tinker_path": path, "ttl_seconds": seconds}, as_json=as_json)


@app.command("delete")
def delete_checkpoints(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Paths of checkpoints: tinker://...")
    ],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete checkpoints, whose files can't be restored."""
    urls = {path: _url_of(path) for path in paths}
    what = paths[0] if len(paths) == 1 else f"these {len(paths)} checkpoints"
    confirm(f"Delete {what}?", skipped=yes)
    for path, url in urls.items():
        request("DELETE", base_url, api_key, url)
        if not as_json:
            say_line(f"deleted {path}")
    if as_json:
        typer.echo(json.dumps({"deleted": list(urls)}))


@app.command("keep")
def keep_newest(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")],
    count: Annotated[
        int, typer.Argument(metavar="K", min=1, max=100_000, help="How many of each kind to keep.")
    ],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Show which checkpoints of a run are older than its newest K, and delete them.

    Those that everybody may read, and those that something refers to, stay.
    """
    path = f"runs/{quote(run, safe=':')}/surplus_checkpoints?keep={count}"
    found = request("GET", base_url, api_key, path)
    if not as_json:
        for each in found["spared"]:
            say_line(f"{each['tinker_path']} stays: {each['reason']}")
    if found["checkpoints"]:
        # On standard error, as the question is: with --json, only JSON is on standard output.
        for each in found["checkpoints"]:
            typer.echo(f"{each['tinker_path']} ({binary_size(each['size_bytes'])}) goes", err=True)
        confirm(f"Delete these {len(found['checkpoints'])} checkpoints?", skipped=yes)
        found = request("DELETE", base_url, api_key, f"{path}&until={quote(found['until'])}")
    number = len(found["checkpoints"])
    say(f"deleted {number} checkpoint{'s' * (number != 1)}", found, as_json=as_json)


@app.command("export")
def export_checkpoint(
    path: PathArgument,
    folder: Annotated[Path, typer.Argument(help="Folder to create; it may exist if it is empty.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
) -> None:
    """Download the weights of a checkpoint, of an adapter as a PEFT folder."""
    _check_empty(folder)
    files = [str(folder / name) for name in _export(path, folder, base_url, api_key)]
    say("\n".join(files), {"folder": str(folder), "files": files}, as_json=as_json)


@app.command("merge")
def merge_checkpoint(
    path: PathArgument,
    folder: Annotated[Path, typer.Argument(help="Folder to create; it may exist if it is empty.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    base: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of the base model.")
    ],
    as_json: Json = False,
) -> None:
    """Merge an adapter into its base model, and write a model for other programs."""
    _check_empty(folder)
    if not any(file.suffix in _WEIGHTS for file in base.iterdir()):
        fail(
            f"{base} has no weights; was it downloaded with HF_ENDPOINT=<a Tinkercloud server>/hf?"
        )
    for module, packages in _FOR_MERGING.items():
        if importlib.util.find_spec(module) is None:
            fail(f"merging needs {module}; run `{pip_install(*packages)}`")
    with tempfile.TemporaryDirectory(prefix="tinkercloud-merge-") as temporary:
        adapter = Path(temporary) / "adapter"
        _export(path, adapter, base_url, api_key)
        folders = [str(each) for each in (base, adapter, folder)]
        command = [sys.executable, "-m", "tinkercloud_worker.merge", *folders]
        status, said = _merge(command, folder, _bytes_in(base))
    if status != 0:
        lines = said.strip().splitlines()
        fail(lines[-1] if lines else f"merging ended with status {status}")
    sys.stderr.write(said)
    say(str(folder), {"folder": str(folder)}, as_json=as_json)


def _merge(command: list[str], folder: Path, size: int) -> tuple[int, str]:
    """Run the program that merges, and show its step and what it has written.

    Args:
        command: the program, which prints a line at each step.
        folder: the folder that it creates at its end.
        size: bytes of the base model, which are about those of the result.

    Returns:
        Its status, and what it has printed on standard error.
    """
    step, done = "loading the program that merges", 0

    def progress() -> str:
        nonlocal done
        # A finished model has left the folder that is looked at.
        done = max(done, sum(map(_bytes_in, folder.absolute().parent.glob(".merge-*/merged"))))
        return f"{step}: {binary_size(done)} of {binary_size(max(size, done))} written"

    with (
        tempfile.TemporaryFile("w+") as errors,
        waiting(progress),
        subprocess.Popen(  # noqa: S603 - our own program
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as merging,
    ):
        for line in merging.stdout or ():
            step = line.strip()
        status = merging.wait()
        errors.seek(0)
        return status, errors.read()


def _bytes_in(folder: Path) -> int:
    """Return how many bytes the files with weights in a folder have; they may vanish meanwhile."""
    size = 0
    for file in folder.glob("*"):
        with suppress(FileNotFoundError):
            size += file.stat().st_size if file.suffix in _WEIGHTS else 0
    return size


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} exists and is not an empty folder; choose another one")


def _export(path: str, folder: Path, base_url: str | None, api_key: str) -> list[str]:
    """Download a checkpoint into a folder that is empty or missing; return the files' names."""
    answer = request("GET", base_url, api_key, f"{_url_of(path)}/archive")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as temporary:
        archive, unpacked = Path(temporary) / "archive.tar", Path(temporary) / "files"
        asyncio.run(_download(answer["url"], archive))
        total = binary_size(archive.stat().st_size)
        with waiting(lambda: f"unpacked {binary_size(_bytes_in(unpacked))} of {total}"):
            names = _unpack(archive, unpacked)
        folder.mkdir(exist_ok=True)
        for name in names:
            shutil.move(unpacked / name, folder / name)
    return names


async def _download(url: str, target: Path) -> None:
    import aiohttp

    limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)
    try:
        async with aiohttp.ClientSession(timeout=limits) as client, client.get(url) as response:
            if response.status != 200:
                fail(f"{response.status}: {(await response.text())[:500]}")
            total = response.content_length
            with target.open("wb") as file, copying("downloaded", total) as progress:
                async for part in response.content.iter_chunked(_PART_BYTES):
                    file.write(part)
                    progress(len(part))
    except (aiohttp.ClientError, TimeoutError) as error:
        fail(f"the download failed ({str(error) or type(error).__name__}); repeat the command")


def _unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack a complete archive and return the names of its files."""
    try:
        with tarfile.open(archive) as opened:
            names = opened.getnames()
            if _COMPLETE not in names:
                fail("the download is incomplete; repeat the command")
            opened.extractall(folder, filter="data")
    except tarfile.TarError as error:
        fail(f"the downloaded archive can't be read ({error}); repeat the command")
    return [name for name in names if name != _COMPLETE]


@app.command("import")
def import_adapter(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of an adapter of Hugging Face PEFT.")
    ],
    *,
    api_key: ApiKey,
    base_model: Annotated[str, typer.Option(help="Base model of the adapter, as it is served.")],
    base_url: BaseUrl = None,
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "imported",
    owner: Annotated[
        str | None,
        typer.Option(help="Owner of the checkpoint (admins only). Default: the key's owner."),
    ] = None,
    ttl_seconds: Annotated[
        int | None, typer.Option(help="Seconds until it expires. Default: never.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Import an adapter of Hugging Face PEFT as a training checkpoint, and print its path."""
    from tinkercloud_protocol.heads.checkpoint_manifest import ADAPTER_WEIGHTS

    fields = {
        "base_model": base_model,
        "adapter_config": _config_of(folder),
        "size_bytes": (folder / ADAPTER_WEIGHTS).stat().st_size,
        "name": name,
        "owner": owner,
        "ttl_seconds": ttl_seconds,
    }
    body = {field: value for field, value in fields.items() if value is not None}
    upload = request("POST", base_url, api_key, "checkpoints/uploads", body)
    target = f"checkpoints/uploads/{upload['upload_id']}"
    try:
        request("PUT", base_url, api_key, f"{target}/{ADAPTER_WEIGHTS}", folder / ADAPTER_WEIGHTS)
        finished = request("POST", base_url, api_key, f"{target}/finish", {})
    except typer.Exit:
        # Others of the owner would wait until it expires. The server ends some by itself.
        unfinished = request("GET", base_url, api_key, "checkpoints/uploads")["uploads"]
        if any(each["upload_id"] == upload["upload_id"] for each in unfinished):
            request("DELETE", base_url, api_key, target)
        raise
    say(finished["tinker_path"], finished, as_json=as_json)


@app.command("uploads")
def list_uploads(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    delete: Annotated[
        list[str] | None,
        typer.Option(metavar="UPLOAD", help="Id of an upload to delete first. Can be repeated."),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """List unfinished uploads of adapters, oldest first."""
    if delete:
        confirm(f"Delete the uploads {', '.join(delete)}?", skipped=yes)
    for upload_id in delete or []:
        request("DELETE", base_url, api_key, f"checkpoints/uploads/{quote(upload_id)}")
    found: list[dict[str, Any]] = request("GET", base_url, api_key, "checkpoints/uploads")[
        "uploads"
    ]
    rows = [
        {**each, "size": binary_size(each["size_bytes"]), "expires": moment(each["expires"])}
        for each in found
    ]
    show(found if as_json else rows, _UPLOAD_COLUMNS, as_json=as_json)


def _config_of(folder: Path) -> dict[str, Any]:
    from tinkercloud_protocol.heads.checkpoint_manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / file).is_file():
            fail(
                f"{folder / file} does not exist; expected the folder of an adapter that PEFT saved"
                " with safe_serialization=True"
            )
    try:
        content = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    except ValueError as error:
        fail(f"{folder / ADAPTER_CONFIG} is not JSON: {error}")
    if not isinstance(content, dict):
        fail(f"{folder / ADAPTER_CONFIG}: expected a JSON object, got {type(content).__name__}")
    return content


def _url_of(path: str) -> str:
    from tinkercloud_protocol.wire.errors import InvalidRequest
    from tinkercloud_protocol.wire.paths import CheckpointPath

    try:
        parsed = CheckpointPath.parse(path)
    except InvalidRequest as error:
        fail(error.message)
    run_id = quote(parsed.run_id, safe=":")
    return f"training_runs/{run_id}/checkpoints/{quote(parsed.checkpoint_id)}"
