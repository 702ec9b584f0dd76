"""What `tinkercloud doctor` says about the machine, and what to do."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tinkercloud_api.admin import machine_checks
from tinkercloud_api.admin.machine_checks import Gpus
from tinkercloud_api.config.settings import Settings
from tinkercloud_testing.harness.ports import free_port

PROBE = {
    "names": ["NVIDIA H200", "NVIDIA H200"],
    "memory": [[140_000_000_000, 150_000_000_000], [1_000_000_000, 150_000_000_000]],
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
}


@pytest.fixture
async def store_with_a_wrong_clock() -> AsyncIterator[str]:
    """Serve what an object store answers whose clock is in the past."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=403, headers={"Date": "Wed, 21 Oct 2015 07:28:00 GMT"})

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


def test_gpus_are_described_with_memory_torch_and_cuda() -> None:
    described = Gpus.parse(json.dumps(PROBE)).describe()

    assert described.startswith(
        "NVIDIA H200, 130.4 GiB of 139.7 GiB free; NVIDIA H200, 953.7 MiB of"
    )
    assert "torch 2.13.0+cu130 for CUDA 13.0" in described


@pytest.mark.parametrize("line", ["{}", "CUDA driver is too old", '{"names": [], "memory": 3}'])
def test_other_output_of_the_probe_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Gpus.parse(line)


async def test_a_machine_without_gpu_says_so_once(tmp_path: Path) -> None:
    lines = await machine_checks.device(Settings(state_dir=tmp_path))

    assert [line.check for line in lines] == ["device", "room for models"]
    assert all(line.is_good for line in lines)
    assert [("GPU" in line.detail) for line in lines] == [True, False]


async def test_a_wrong_clock_is_found_by_that_of_the_store(
    store_with_a_wrong_clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_with_a_wrong_clock)

    settings = Settings(state_dir=tmp_path, checkpoint_root="s3://b/c")
    _, line = await machine_checks.clock(settings)

    assert not line.is_good
    assert "from that of the checkpoint store" in line.detail
    assert "NTP" in line.remedy


async def test_a_machine_alone_says_whether_ntp_sets_its_clock(tmp_path: Path) -> None:
    (line,) = await machine_checks.clock(Settings(state_dir=tmp_path))

    assert (line.check, line.is_good) == ("clock", True)
    assert "NTP" in line.detail
    assert ("timedatectl" in line.remedy) == ("does not know" in line.detail)


def test_the_speed_of_a_disk_leaves_no_file_behind(tmp_path: Path) -> None:
    line = machine_checks.disk_speed(tmp_path)

    assert line.is_good
    assert "MB/s" in line.detail
    assert line.as_row()["result"] == ("warning" if "slow" in line.remedy else "ok")
    assert list(tmp_path.iterdir()) == []
    assert not machine_checks.disk_speed(tmp_path / "absent").is_good


def test_packages_of_one_release_belong_together() -> None:
    line = machine_checks.packages()

    assert line.is_good
    assert "torch " in line.detail
