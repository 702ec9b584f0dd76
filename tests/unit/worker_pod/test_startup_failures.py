"""A head that fails to load its engine writes the reason where Kubernetes reads it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig
from tinkercloud_worker.run_head import read_config

pytestmark = pytest.mark.timeout(120)

ABSENT = "no-such-folder"


@pytest.mark.slow
def test_a_head_without_its_model_writes_the_reason_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token")
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=str(tmp_path / ABSENT)),
        token_file=str(tmp_path / "token"),
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
        reason_file=str(tmp_path / "reason"),
    )
    (tmp_path / "head.json").write_text(config.model_dump_json())

    command = [sys.executable, "-m", "tinkercloud_worker", str(tmp_path / "head.json")]
    ended = subprocess.run(command, check=False)

    [line] = (tmp_path / "reason").read_text().splitlines()
    assert ended.returncode != 0
    assert line.startswith("failed to load the engine: ")
    assert ABSENT in line


def test_a_head_that_does_not_know_a_new_setting_says_so_in_a_sentence(tmp_path: Path) -> None:
    reason, file = tmp_path / "reason", tmp_path / "head.json"
    config = HeadConfig(
        head="h",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root="",
        scratch_dir="",
        reason_file=str(reason),
    )
    later = {**json.loads(config.model_dump_json(exclude_defaults=True)), "mood": "good"}
    file.write_text(json.dumps(later))

    with pytest.raises(SystemExit) as ended:
        read_config(file)

    assert reason.read_text() == f"{ended.value}\n"
    assert re.fullmatch(
        r"a head of release 0\.1\.0 does not understand its configuration \(mood: .*\); use an"
        r" image of the release that wrote it, or of the one before without its new settings",
        str(ended.value),
    )
