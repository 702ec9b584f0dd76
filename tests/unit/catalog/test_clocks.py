"""The clock of the catalog's server is compared with that of this machine."""

from pathlib import Path

from pydantic import SecretStr

from tinkercloud_api.admin import machine_checks
from tinkercloud_api.config.settings import Settings


async def test_only_a_catalog_on_a_server_has_a_clock(database_url: str, tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, database_url=SecretStr(database_url))

    _, *lines = await machine_checks.clock(settings)

    assert len(lines) == database_url.startswith("postgresql")
    assert all(line.is_good and "the catalog's server" in line.detail for line in lines)
