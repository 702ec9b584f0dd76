"""A real PostgreSQL server with the programs of the operating system.

It has its own data folder, listens on a free port of one address, requires a password, and ends
with the test run.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import (
    ROOT,
    Program,
    state_folder,
    system_tool,
)
from tinkercloud_testing.harness.ports import free_port

_USER = "tinkercloud"
_SYSTEM_USER = "postgres"
_SETTINGS = {
    "unix_socket_directories": "",
    # Durability after a power failure is irrelevant here.
    "fsync": "off",
}


@dataclass(frozen=True)
class PostgreSQL:
    """A server. `start` and `stop` may be called repeatedly."""

    program: Program
    programs: Path
    address: str
    port: int
    password: str

    def start(self) -> None:
        """Start it unless it is running."""
        self.program.start()

    def stop(self) -> None:
        """Stop it immediately, and disconnect all clients."""
        if self.program.is_running and self.program.process is not None:
            self.program.process.send_signal(signal.SIGINT)
            self.program.process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend it and its connections during a block."""
        assert self.program.process is not None
        main = self.program.process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        processes = [main, *map(int, children)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)

    def new_database(self) -> str:
        """Create an empty database and return its URL for `TINKERCLOUD_DATABASE_URL`."""
        name = f"db_{secrets.token_hex(8)}"
        self._run("createdb", name)
        return f"postgresql+asyncpg://{_USER}:{self.password}@{self.address}:{self.port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        where = (f"--host={self.address}", f"--port={self.port}", f"--username={_USER}")
        environment = {**os.environ, "PGPASSWORD": self.password}
        command = [str(self.programs / program), *where, "--no-password", *arguments]
        subprocess.run(command, env=environment, check=True)


@contextlib.contextmanager
def a_postgresql(address: str = "127.0.0.1") -> Iterator[PostgreSQL]:
    """Run PostgreSQL; install it first if it is missing (Debian, as root).

    Args:
        address: The address to listen on.
    """
    subprocess.run([str(ROOT / "tools" / "install_postgresql.sh")], check=True)
    programs = _programs()
    port, password = free_port(), secrets.token_urlsafe(16)
    with state_folder() as folder:
        data = _initialised(programs, folder, password)
        settings = {**_SETTINGS, "listen_addresses": address, "port": str(port)}
        options = [f"-c{name}={value}" for name, value in settings.items()]
        # Dropping root clears the parent-death signal, so it is set again: SIGINT is a fast
        # shutdown that removes shared memory.
        as_nobody = _as_nobody_special("--pdeathsig", "INT")
        command = [*as_nobody, str(programs / "postgres"), "-D", str(data)]
        is_ready = [str(programs / "pg_isready"), "--quiet", f"--host={address}", f"--port={port}"]
        program = Program(
            "postgres",
            [*command, *options],
            folder / "postgres.log",
            lambda: subprocess.run(is_ready, check=False).returncode == 0,
        )
        server = PostgreSQL(program, programs, address, port, password)
        server.start()
        try:
            yield server
        finally:
            server.stop()
            _remove_soon(data)


def _remove_soon(data: Path) -> None:
    """Remove the databases in the background.

    They are thousands of files: on a busy disk, that takes longer than the last test may.
    """
    removed = Path(tempfile.mkdtemp(prefix="tinkercloud-removed-"))
    data.rename(removed / data.name)
    os.posix_spawnp("rm", ["rm", "-rf", str(removed)], os.environ)


def _programs() -> Path:
    """Return the folder of the latest installed version, which Debian does not add to PATH."""
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    found = max(folders, key=lambda path: int(path.parent.name), default=None)
    return found or Path(system_tool("initdb")).resolve().parent


def _initialised(programs: Path, folder: Path, password: str) -> Path:
    """Return a new data folder, owned by the user of the server."""
    # The user of the server must be able to traverse this folder of root.
    folder.chmod(0o711)
    data, password_file = folder / "data", folder / "password"
    data.mkdir(mode=0o700)
    password_file.write_text(password)
    password_file.chmod(0o600)
    if os.geteuid() == 0:
        shutil.chown(data, _SYSTEM_USER)
        shutil.chown(password_file, _SYSTEM_USER)
    subprocess.run(
        [
            *_as_nobody_special(),
            *(str(programs / "initdb"), "--pgdata", str(data), f"--username={_USER}"),
            *("--auth=scram-sha-256", f"--pwfile={password_file}"),
            *("--encoding=UTF8", "--no-locale", "--no-sync"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=folder,
    )
    with (data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all all scram-sha-256\n")
    return data


def _as_nobody_special(*options: str) -> Sequence[str]:
    """Return the prefix for a command that does not run as root."""
    if os.geteuid() != 0:
        return ()
    user = pwd.getpwnam(_SYSTEM_USER)
    groups = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    return (system_tool("setpriv"), *groups, *options)
