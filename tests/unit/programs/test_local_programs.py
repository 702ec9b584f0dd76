"""What a program of a local server has started ends with it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tinkercloud_api.config.sections.program_settings import ProgramSettings
from tinkercloud_api.providers.local.local_programs import LocalPrograms
from tinkercloud_api.providers.program_runner import ProgramLaunch, ProgramState
from tinkercloud_protocol.programs.program_messages import ProgramPhase
from tinkercloud_testing.serving.bare_heads import until

DETACHED = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("PID.new").write_text(str(os.getpid()))
        os.rename("PID.new", "PID")
        time.sleep(3600)
    os._exit(0)
while not os.path.exists("PID"):
    time.sleep(0.01)
"""
"""A program that leaves a daemon behind, which holds its output open, and then continues."""


@dataclass
class World:
    """A runner of programs, and what it reports."""

    folder: Path
    runner: LocalPrograms
    states: list[ProgramState] = field(default_factory=list)

    async def run(self, source: str) -> int:
        """Run a program; return the process id of its daemon."""
        path = self.folder / "pid"
        launch = ProgramLaunch("p", "me", None, source.replace("PID", str(path)), (), None, {})
        await self.runner.run(launch)
        await until(path.exists)
        return int(path.read_text())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    runner = LocalPrograms(tmp_path, ProgramSettings(max_restarts=0))
    world = World(tmp_path, runner)
    await runner.start(lambda _, state: world.states.append(state))
    yield world
    await runner.close()


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("ending", "phase"),
    [("", ProgramPhase.SUCCEEDED), ("sys.exit(3)", ProgramPhase.FAILED)],
)
async def test_a_program_that_leaves_a_daemon_ends_and_so_does_the_daemon(
    world: World, ending: str, phase: ProgramPhase
) -> None:
    daemon = await world.run(DETACHED + "print('done')\n" + ending)

    await until(lambda: world.states[-1].phase is phase)

    assert not is_running(daemon)
    assert await world.runner.logs("p", 100) == b"done\n"
    assert world.states[-1].exit_code == (3 if ending else 0)


async def test_a_stopped_program_takes_its_daemon_along(world: World) -> None:
    daemon = await world.run(DETACHED + "time.sleep(3600)")
    assert is_running(daemon)

    await world.runner.halt("p")

    assert not is_running(daemon)


async def test_a_program_that_is_killed_is_reported_with_its_signal(world: World) -> None:
    daemon = await world.run(DETACHED + "os.kill(os.getpid(), 9)")

    await until(lambda: world.states[-1].phase is ProgramPhase.FAILED)

    assert "killed by SIGKILL" in (world.states[-1].message or "")
    assert not is_running(daemon)


async def test_a_daemon_that_kills_its_launcher_does_not_keep_the_program_running(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkercloud_api.providers.local.local_programs._KILL_SECONDS", 0.1)
    daemon = await world.run(DETACHED + "os.kill(os.getppid(), 9); time.sleep(3600)")
    try:
        async with asyncio.timeout(20):
            await until(lambda: world.states[-1].phase is ProgramPhase.FAILED)
    finally:
        os.kill(daemon, signal.SIGKILL)
