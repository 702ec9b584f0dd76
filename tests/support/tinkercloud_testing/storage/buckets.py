"""A real S3 server with a bucket of models."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

_BUCKET = "models"
_REGION = "us-east-1"
_KEY = "testing"


class _Server:
    """An S3 server that keeps its content while it is stopped."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        """Where it listens; a port of 0 is replaced once it has started."""
        self._moto: ThreadedMotoServer | None = None

    def start(self) -> None:
        host, port = self.address
        self._moto = ThreadedMotoServer(ip_address=host, port=port)
        self._moto.start()
        self.address = self._moto.get_host_and_port()

    def stop(self) -> None:
        assert self._moto is not None
        self._moto.stop()
        # Otherwise it still listens, and answers nobody.
        assert self._moto._server is not None
        self._moto._server.server_close()


@dataclass(frozen=True)
class Bucket:
    """A bucket that its key can read and write."""

    endpoint: str
    server: _Server

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with its address and key."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": _REGION,
        }

    def url(self, prefix: str) -> str:
        """Return the URL of a folder in it."""
        return f"s3://{_BUCKET}/{prefix}"

    def hold(self, folder: Path, prefix: str) -> str:
        """Upload a folder; return its URL."""
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            obstore.put(self._store, f"{prefix}/{path.relative_to(folder)}", path)
        return self.url(prefix)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the files in a folder of it, and in the folders in that."""
        found = [each for page in obstore.list(self._store, f"{prefix}/") for each in page]
        return [each["path"].removeprefix(f"{prefix}/") for each in found]

    def copy(self, prefix: str, folder: Path) -> None:
        """Download a folder of it."""
        for name in self.names(prefix):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(obstore.get(self._store, f"{prefix}/{name}").bytes())

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Let nothing listen at its address during a block; nothing is lost."""
        self.server.stop()
        try:
            yield
        finally:
            self.server.start()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Accept connections at its address during a block, while it is `away`, and do nothing."""
        with socket.create_server(self.server.address):
            yield

    def forget(self, prefix: str, name: str) -> None:
        """Delete a file."""
        obstore.delete(self._store, f"{prefix}/{name}")

    @property
    def _store(self) -> S3Store:
        return S3Store(
            _BUCKET,
            endpoint=self.endpoint,
            region=_REGION,
            access_key_id=_KEY,
            secret_access_key=_KEY,
            client_options={"allow_http": True},
        )


@contextlib.contextmanager
def a_bucket(address: str) -> Iterator[Bucket]:
    """Serve an empty bucket at a local address."""
    server = _Server((address, 0))
    server.start()
    try:
        host, port = server.address
        endpoint = f"http://{host}:{port}"
        urlopen(Request(f"{endpoint}/{_BUCKET}", method="PUT"), timeout=60).close()
        yield Bucket(endpoint, server)
    finally:
        server.stop()
