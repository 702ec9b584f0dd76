"""A read-only mirror of the served models' tokenizers, with the API of the Hugging Face hub.

The SDK loads tokenizers from the hub on the client, and the cookbook the configuration of image
processors. With `HF_ENDPOINT=http://<server>/hf`, they load those of the served models from this
server instead, without internet access. No other files are served, and never weights.
"""

import hashlib
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from tinkercloud_api.context import Server
from tinkercloud_api.model_names import model_with_tokenizer
from tinkercloud_api.providers.base import ServedModel

router = APIRouter(prefix="/hf", tags=["tokenizers"])

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
    "tiktoken.*",
    "*.tiktoken",
    "tokenizer*.json",
    "tokenizer.model*",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.*",
)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files in a model's folder."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _SERVED_FILES)
    )


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
def tree(repo: str, revision: str, server: Server) -> Response:
    """List a model's tokenizer files."""
    del revision
    model = _find(server, repo)
    if model is None or model.local_path is None:
        return _missing("RepoNotFound")
    return JSONResponse(
        [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _commit([file])}
            for file in tokenizer_files(Path(model.local_path))
        ]
    )


@router.get("/api/models/{repo:path}/tree/{revision}/{folder:path}")
def subtree(repo: str, revision: str, folder: str, server: Server) -> Response:
    """Report that a model has no subfolders."""
    del revision, folder
    return _missing("RepoNotFound" if _find(server, repo) is None else "EntryNotFound")


@router.get("/api/models/{repo:path}/revision/{revision}")
def revision(repo: str, revision: str, server: Server) -> Response:
    """Describe a model at a revision; a model has only one."""
    del revision
    return describe(repo, server)


@router.get("/api/models/{repo:path}")
def describe(repo: str, server: Server) -> Response:
    """Describe a model."""
    model = _find(server, repo)
    if model is None or model.local_path is None:
        return _missing("RepoNotFound")
    files = tokenizer_files(Path(model.local_path))
    return JSONResponse(
        {
            "id": repo,
            "modelId": repo,
            "sha": _commit(files),
            "private": False,
            "gated": False,
            "tags": [],
            "siblings": [{"rfilename": file.name} for file in files],
        }
    )


@router.head("/{repo:path}/resolve/{revision}/{name}")
@router.get("/{repo:path}/resolve/{revision}/{name}")
def resolve(repo: str, revision: str, name: str, request: Request, server: Server) -> Response:
    """Return one file."""
    del revision
    model = _find(server, repo)
    if model is None or model.local_path is None:
        return _missing("RepoNotFound")
    files = {file.name: file for file in tokenizer_files(Path(model.local_path))}
    if name not in files:
        return _missing("EntryNotFound")
    headers = {
        "ETag": f'"{_commit([files[name]])}"',
        "X-Repo-Commit": _commit(list(files.values())),
        "Accept-Ranges": "bytes",
    }
    if request.method == "HEAD":
        headers["Content-Length"] = str(files[name].stat().st_size)
        return Response(headers=headers)
    return FileResponse(files[name], headers=headers, media_type="application/octet-stream")
