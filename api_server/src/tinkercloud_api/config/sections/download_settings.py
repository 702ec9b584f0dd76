"""Settings of downloads."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

MIN_KEY_CHARACTERS = 32
_DIFFERENT_CHARACTERS = 8
"""Minimum number of distinct characters of a key; one with fewer is not random."""
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


def _check_url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise ValueError(
            "is not an address that begins with http:// or https://, such as"
            " https://tinker.example.com"
        )
    return text


PublicUrl = Annotated[str, AfterValidator(_check_url)]
"""Address of a server: scheme, host, and possibly a port and a path."""


class DownloadSettings(BaseModel):
    """How checkpoints are downloaded through signed URLs."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    url_seconds: Annotated[int, Field(ge=60, le=7 * 24 * 3600)] = 3600
    """How long, in seconds, the URL of a download is valid. Everyone who has the URL can use it."""
    source: Literal["auto", "server", "store"] = "auto"
    """Where the URLs of external weights refer to. `server`: to this server, which streams the
    files. `store`: to the object store (S3, Google Cloud Storage or Azure), which signs the URLs.
    `auto`: to the store if it can sign URLs and is at its provider's public address, otherwise to
    this server."""
    max_concurrent_per_owner: Annotated[int, Field(ge=1)] = 4
    """Maximum number of concurrent downloads through one server for each owner. Further ones
    wait."""
    signing_key: SecretStr | None = None
    """Key that signs the URLs of this server: at least 32 random characters. All replicas need the
    same one; changing it invalidates all URLs. Default: a random key, which is generated once and
    kept in the catalog."""

    def check_key(self) -> None:
        """Check that the signing key cannot be guessed, without showing it.

        Raises:
            ValueError: the message names the field and what is accepted.
        """
        if self.signing_key is None:
            return
        key = self.signing_key.get_secret_value()
        if len(key) < MIN_KEY_CHARACTERS or len(set(key)) < _DIFFERENT_CHARACTERS:
            raise ValueError(
                f"downloads.signing_key: has {len(key)} characters, {len(set(key))} of them"
                f" distinct; at least {MIN_KEY_CHARACTERS} random characters are required, such as"
                " from `openssl rand -hex 32`"
            )
