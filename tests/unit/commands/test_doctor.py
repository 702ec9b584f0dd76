"""`tinkercloud doctor` on a machine where no server of the state folder runs."""

import socket
from pathlib import Path

from tinkercloud_api.admin.doctor import examine
from tinkercloud_api.admin.machine_checks import CheckResult
from tinkercloud_api.config.settings import Settings


async def results(folder: Path, port: int) -> dict[str, CheckResult]:
    settings = Settings(state_dir=folder, host="127.0.0.1", port=port)
    return {result.check: result async for result in examine(settings)}


async def test_a_port_that_another_program_has_is_found(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = (await results(tmp_path, port))["server"]

    assert not found.is_good
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in found.detail
    assert "--state-dir" in found.remedy


async def test_a_damaged_catalog_is_to_be_restored_or_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(b"no database" * 100)

    found = await results(tmp_path, 0)

    assert not found["catalog"].is_good
    assert "restore a backup" in found["catalog"].detail
    assert found["catalog"].remedy == ""
    assert found["server"].is_good
