"""How the object store of checkpoints is reached, the same in the API server and in heads."""

from collections.abc import Mapping

_ENDPOINT_VARIABLES = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
)
"""By which object stores' clients are configured with an address of their own."""


def allows_http(environment: Mapping[str, str]) -> bool:
    """Return whether an object store may be reached by HTTP: only if it is asked for.

    An endpoint that begins with `http://` asks for it, and so does Azure's emulator. Credentials
    of workload identities come over HTTP in any case, from the machine itself.
    """
    endpoints = [environment.get(name, "") for name in _ENDPOINT_VARIABLES]
    is_emulator = environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in {"1", "true"}
    return is_emulator or any(each.startswith("http://") for each in endpoints)
