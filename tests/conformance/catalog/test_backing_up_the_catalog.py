"""The commands of "Backing up" in docs/operate/operations.md, run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tinkercloud_testing.servers import a_server

PAGE = (Path(__file__).parents[3] / "docs/operate/operations.md").read_text()
SECTION = PAGE.partition("\n## Backing up\n")[2].partition("\n## ")[0]
BACK_UP, RESTORE = re.findall(r"^```sh\n(.*?)^```", SECTION, re.M | re.S)


def test_a_backup_of_a_running_server_can_be_restored(tmp_path: Path) -> None:
    with a_server(tmp_path / "state", {}) as server:
        environment = {**server.environment(), "PATH": os.environ["PATH"]}

        def run(commands: str) -> None:
            program = f'tinkercloud() {{ "{sys.executable}" -m tinkercloud_api "$@"; }}\n'
            subprocess.run(
                ["/bin/sh", "-eu", "-c", program + commands],
                env=environment,
                cwd=tmp_path,
                check=True,
            )

        def projects() -> set[str]:
            listed = server.request("GET", "/api/v1/projects").json()["projects"]
            return {project["name"] for project in listed}

        for index in range(5):
            server.new_project(f"project-{index}")
        wanted = {f"project-{index}" for index in range(5)}

        run(BACK_UP)
        server.new_project("later")
        assert projects() != wanted
        server.kill()
        run(RESTORE)
        server.start()

        assert projects() == wanted
