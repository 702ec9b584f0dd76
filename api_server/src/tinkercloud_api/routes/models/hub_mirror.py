"""A read-only mirror of the served models' tokenizers, with the API of the Hugging Face hub.

The SDK loads tokenizers from the hub on the client, and the cookbook the configuration of image
processors. With `HF_ENDPOINT=http://<server>/hf`, they load those of the served models from this
server instead, without internet access. No other files are served, and never weights.

A model has one revision, `main`, whose commit id follows from the files: a client that pins another
one is refused, since it would get other files than it asked for.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from tinkercloud_api.context import Server
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.providers.model_names import model_with_tokenizer
from tinkercloud_api.web.statuses import statuses

router = APIRouter(
    prefix="/hf", tags=["tokenizers"], responses=statuses("206", "304", "400", "404", "416")
)

_SERVED_FILES = (
    "added_tokens.json",
    "chat_template.*",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.*",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.*",
    "*.tiktoken",
    "tokenizer*.json",
    "tokenizer.model*",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.*",
)


_TEMPLATES = "additional_chat_templates"
"""Folder of named chat templates, `<name>.jinja`."""
_MAIN = "main"


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files in a model's folder, and its named chat templates."""
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _SERVED_FILES)
    )
    return files + sorted(file for file in folder.glob(f"{_TEMPLATES}/*.jinja") if file.is_file())


@dataclass(frozen=True, slots=True)
class _Mirrored:
    """The files of a model at its only revision."""

    files: Mapping[str, Path]
    """By their path in the repository."""
    commit: str

    def listed(self, prefix: str) -> list[dict[str, object]]:
        """Return the entries of the files whose paths start with a prefix."""
        return [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _commit([file])}
            for name, file in self.files.items()
            if name.startswith(prefix)
        ]


def _mirrored(server: Server, repo: str, revision: str) -> _Mirrored | Response:
    """Return the files of a model, or the answer that the model or the revision is unknown."""
    model = _find(server, repo)
    if model is None or model.local_path is None:
        return _missing("RepoNotFound")
    folder = Path(model.local_path)
    files = {file.relative_to(folder).as_posix(): file for file in tokenizer_files(folder)}
    commit = _commit(list(files.values()))
    if revision not in {_MAIN, commit}:
        return _missing("RevisionNotFound")
    return _Mirrored(files, commit)


def _find(server: Server, repo: str) -> ServedModel | None:
    model = model_with_tokenizer(repo, server.provider.models())
    is_served = server.settings.hf_mirror and model is not None and model.local_path is not None
    return model if is_served else None


def _commit(files: list[Path]) -> str:
    """Return a revision derived from the files' content, in the format of a git commit id."""
    digest = hashlib.sha1(usedforsecurity=False)
    for file in files:
        known = file.stat()
        digest.update(file.name.encode() + b"\0" + _digest(file, known.st_mtime_ns, known.st_size))
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _digest(file: Path, _mtime_ns: int, _size: int) -> bytes:
    """Return a digest of a file's content; the file is read again when it has changed."""
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).digest()


def _missing(code: str) -> Response:
    """Return a 404 in the hub's format, which distinguishes missing files and repositories."""
    return JSONResponse({"error": code}, 404, {"X-Error-Code": code})


@router.get("/api/models/{repo:path}/tree/{revision}")
def tree(repo: str, revision: str, server: Server, recursive: bool = False) -> Response:  # noqa: FBT001, FBT002 - a field of the hub's API
    """List a model's tokenizer files."""
    found = _mirrored(server, repo, revision)
    if isinstance(found, Response):
        return found
    inner = found.listed(f"{_TEMPLATES}/")
    outer = [entry for entry in found.listed("") if entry not in inner]
    folder = {"type": "directory", "path": _TEMPLATES, "size": 0, "oid": found.commit}
    return JSONResponse([*outer, *([folder] if inner else []), *(inner if recursive else [])])


@router.get("/api/models/{repo:path}/tree/{revision}/{folder:path}")
def subtree(repo: str, revision: str, folder: str, server: Server) -> Response:
    """List a subfolder of a model; only named chat templates are in one."""
    found = _mirrored(server, repo, revision)
    if isinstance(found, Response):
        return found
    entries = found.listed(f"{folder.rstrip('/')}/")
    return JSONResponse(entries) if entries else _missing("EntryNotFound")


@router.get("/api/models/{repo:path}/revision/{revision:path}")
def revision(repo: str, revision: str, server: Server) -> Response:
    """Describe a model at a revision: `main`, or the commit id that `describe` reports."""
    found = _mirrored(server, repo, revision)
    if isinstance(found, Response):
        return found
    return JSONResponse(
        {
            "id": repo,
            "modelId": repo,
            "sha": found.commit,
            "private": False,
            "gated": False,
            "tags": [],
            "siblings": [{"rfilename": name} for name in found.files],
        }
    )


@router.get("/api/models/{repo:path}")
def describe(repo: str, server: Server) -> Response:
    """Describe a model."""
    return revision(repo, _MAIN, server)


@router.head("/{repo:path}/resolve/{revision}/{name:path}")
@router.get("/{repo:path}/resolve/{revision}/{name:path}")
def resolve(repo: str, revision: str, name: str, request: Request, server: Server) -> Response:
    """Return one file, or that the client has it already."""
    found = _mirrored(server, repo, revision)
    if isinstance(found, Response):
        return found
    file = found.files.get(name)
    if file is None:
        return _missing("EntryNotFound")
    etag = f'"{_commit([file])}"'
    headers = {"ETag": etag, "X-Repo-Commit": found.commit, "Accept-Ranges": "bytes"}
    known = [
        each.strip().removeprefix("W/")
        for each in request.headers.get("if-none-match", "").split(",")
    ]
    if etag in known or "*" in known:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    if request.method == "HEAD":
        headers["Content-Length"] = str(file.stat().st_size)
        return Response(headers=headers)
    return FileResponse(file, headers=headers, media_type="application/octet-stream")
