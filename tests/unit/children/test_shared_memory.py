"""Containers start without the shared memory that killed ranks and engines have left behind."""

import mmap
import subprocess
from pathlib import Path

import pytest

from tinkercloud_operator.children.pods import CLEAR_SHARED_MEMORY
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
)

LEFTOVERS = ["torch_812_3291_0", "psm_1f0c2a", "nccl-QX3mZk", "cuda.shm.fffe.2c1.1"]
OFFERS = {
    "head alone": a_base_model(),
    "trainers": a_base_model(trainer=TRAINERS),
    "engines": a_base_model(trainer=TRAINERS, sampler=ENGINES),
    "colocated engines": a_base_model(trainer=TRAINERS, sampler=COLOCATED),
}


def clear(folder: Path, sandbox: str = "pause") -> None:
    """Run the commands of a starting container on a folder in place of /dev/shm."""
    process = folder / "process-1"
    process.write_text(f"{sandbox}\n")
    commands = CLEAR_SHARED_MEMORY.replace("/proc/1/comm", str(process))
    script = commands.replace("/dev/shm", str(folder))  # noqa: S108 - replaced, not used
    subprocess.run(["/bin/bash", "-c", f"set -e; {script}"], check=True, timeout=60)
    process.unlink()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_segments_that_no_process_uses_are_removed(tmp_path: Path) -> None:
    for name in LEFTOVERS:
        (tmp_path / name).write_bytes(b"x" * 4096)

    clear(tmp_path)

    assert files(tmp_path) == set()


def test_segments_that_a_process_has_opened_or_mapped_are_kept(tmp_path: Path) -> None:
    opened, mapped = tmp_path / LEFTOVERS[0], tmp_path / LEFTOVERS[1]
    for path in (opened, mapped):
        path.write_bytes(b"x" * 4096)
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)

    with opened.open("rb"), memory:
        clear(tmp_path)

        assert files(tmp_path) == {opened.name, mapped.name}
    clear(tmp_path)
    assert files(tmp_path) == set()


def test_other_files_and_folders_are_kept(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    (tmp_path / "torch_folder").mkdir()

    clear(tmp_path)

    assert files(tmp_path) == {"weights.safetensors", "torch_folder"}


def test_nothing_is_removed_where_other_containers_processes_are_invisible(tmp_path: Path) -> None:
    (tmp_path / LEFTOVERS[0]).write_bytes(b"x")

    clear(tmp_path, sandbox="bash")

    assert files(tmp_path) == {LEFTOVERS[0]}


def pods(offer: str) -> list[Json]:
    spec = ray_cluster(a_build(OFFERS[offer]))["spec"]
    return [each["template"]["spec"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("offer", OFFERS)
def test_every_container_clears_shared_memory_and_sees_the_processes_of_its_pod(offer: str) -> None:
    for pod in pods(offer):
        assert pod["shareProcessNamespace"]
        for container in pod["containers"]:
            assert any(CLEAR_SHARED_MEMORY in word for word in container["command"])


@pytest.mark.parametrize("offer", OFFERS)
def test_no_ray_node_kills_ranks_by_its_own_measure_of_memory(offer: str) -> None:
    for pod in pods(offer):
        first = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert first["RAY_memory_monitor_refresh_ms"] == "0"
