"""The configuration and the backup script of docs/operate/shared-machine.md."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tinkercloud_api.config.settings import load_settings

PAGE = (Path(__file__).parents[3] / "docs" / "operate" / "shared-machine.md").read_text()
(CONFIG,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
(BACK_UP,) = re.findall(r"^```sh\n(#!/bin/sh\n.*?)^```", PAGE, re.M | re.S)
(FOR_GPUS,) = re.findall(r"`(trainer = .*?)`", PAGE)


@pytest.mark.parametrize("above", ["", f"{FOR_GPUS}\n"])
def test_the_server_reads_the_configuration(
    above: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tinkercloud.toml"
    file.write_text(above + CONFIG)
    monkeypatch.setenv("TINKERCLOUD_CONFIG_FILE", str(file))

    settings = load_settings()

    assert settings.model_fields_set >= tomllib.loads(above + CONFIG).keys()
    assert settings.tenants["team"].owners == ["ada", "bob"]
    assert settings.prices.currency == "EUR"
    assert settings.trainer.device == ("cuda" if above else "cpu")


def test_the_backup_script_deletes_old_backups_after_a_new_one(tmp_path: Path) -> None:
    def here(text: str) -> str:
        return re.sub(r"/(?:etc|opt|var/lib|var/backups)/tinkercloud", f"{tmp_path}\\g<0>", text)

    config, program, backups = (
        Path(here(path))
        for path in (
            "/etc/tinkercloud/tinkercloud.toml",
            "/opt/tinkercloud/bin/tinkercloud",
            "/var/backups/tinkercloud/tinkercloud-old.tar",
        )
    )
    for file in (config, program, backups):
        file.parent.mkdir(parents=True)
    config.write_text(here(CONFIG))
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tinkercloud_api "$@"\n')
    program.chmod(0o700)
    backups.touch()
    os.utime(backups, (0, 0))
    environment = {**os.environ, "TINKERCLOUD_CONFIG_FILE": str(config)}
    create: list[str | Path] = [program, "keys", "create", "ada", "--role", "admin"]
    subprocess.run(create, env=environment, check=True, capture_output=True)

    subprocess.run(["/bin/sh", "-c", here(BACK_UP)], check=True, capture_output=True)

    (made,) = backups.parent.iterdir()
    assert re.fullmatch(r"tinkercloud-\d{4}-\d\d-\d\d-\d{6}\.tar", made.name)
