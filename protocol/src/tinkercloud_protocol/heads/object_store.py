"""Access to the object store of checkpoints, shared by the API server and heads.

It needs this package's extra `store`.
"""

import os
from collections.abc import Mapping

from obstore.store import ObjectStore, from_url

_ENDPOINT_VARIABLES = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
)
"""Variables that configure the endpoints of object store clients."""


def allows_http(environment: Mapping[str, str]) -> bool:
    """Return whether an object store may be accessed over HTTP, which must be requested explicitly.

    An endpoint that starts with `http://` requests it, and so does Azure's emulator. Credentials of
    workload identities are always fetched over HTTP, from the machine itself.
    """
    endpoints = [environment.get(name, "") for name in _ENDPOINT_VARIABLES]
    is_emulator = environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in {"1", "true"}
    return is_emulator or any(each.startswith("http://") for each in endpoints)


def has_endpoint(environment: Mapping[str, str]) -> bool:
    """Return whether the store is configured to be elsewhere than at its provider's address."""
    return any(environment.get(name) for name in _ENDPOINT_VARIABLES)


def open_store(url: str) -> ObjectStore:
    """Open the object store at a URL; credentials come from the environment.

    A local folder is created if it does not exist.
    """
    if url.startswith("file:"):
        return from_url(url, mkdir=True, automatic_cleanup=True)
    return from_url(url, client_options={"allow_http": allows_http(os.environ)})
