"""A real S3 server with a bucket of models."""

import contextlib
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


@dataclass(frozen=True)
class Bucket:
    """A bucket that its key can read and write."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with its address and key."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _KEY,
            "AWS_REGION": _REGION,
        }

    def hold(self, folder: Path, prefix: str) -> str:
        """Upload a folder; return its URL."""
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            obstore.put(self._store, f"{prefix}/{path.relative_to(folder)}", path)
        return f"s3://{_BUCKET}/{prefix}"

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
    server = ThreadedMotoServer(ip_address=address, port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urlopen(Request(f"{endpoint}/{_BUCKET}", method="PUT"), timeout=60).close()
        yield Bucket(endpoint)
    finally:
        server.stop()
