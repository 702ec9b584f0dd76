"""What `tinkercloud runs export` copies of a curve."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_api.commands.runs import export_command
from tinkercloud_api.commands.runs.export_command import points_of


def metric(mean: float | None, low: float | None = None, high: float | None = None) -> Any:
    return {"mean": mean, "low": low, "high": high, "not_finite": int(mean is None)}


def at(second: int) -> str:
    return f"1970-01-01T00:00:{second:02}Z"


def exported(points: list[Any], logged: dict[str, Any] | None = None) -> list[Any]:
    found = points_of({"points": points, "logged": logged or {}})
    return [(each.time, each.step, each.values) for each in found]


def test_points_of_several_steps_have_their_lowest_and_highest_values() -> None:
    one = {"step": 1, "steps": 1, "time": at(1), "metrics": {"loss": metric(2.0, 2.0, 2.0)}}
    two = {"step": 3, "steps": 2, "time": at(3), "metrics": {"loss": metric(1.5, 1.0, 2.0)}}

    assert exported([one, two]) == [
        (1.0, 1, {"loss": 2.0}),
        (3.0, 3, {"loss": 1.5, "loss_min": 1.0, "loss_max": 2.0}),
    ]


def test_values_that_are_not_finite_are_left_out() -> None:
    metrics = {"loss": metric(None), "tokens": metric(4.0)}
    point = {"step": 1, "steps": 1, "time": at(1), "metrics": metrics}
    empty = {"step": 2, "steps": 1, "time": at(2), "metrics": {"loss": metric(None)}}

    assert exported([point, empty]) == [(1.0, 1, {"tokens": 4.0})]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("loss", "logged/loss"),
        ("env/reward mean", "logged/env/reward mean"),
        ("Δ%", "logged/Δ_"),
        ("../loss", "logged/loss"),
        ("/", "logged/_"),
    ],
)
def test_what_a_client_logs_is_apart_and_in_the_order_of_time(name: str, accepted: str) -> None:
    point = {"step": 2, "steps": 1, "time": at(2), "metrics": {"loss": metric(2.0)}}
    values = [{"step": step, "time": at(step), "value": 7.0} for step in (1, 3)]

    assert exported([point], {name: values}) == [
        (1.0, 1, {accepted: 7.0}),
        (2.0, 2, {"loss": 2.0}),
        (3.0, 3, {accepted: 7.0}),
    ]


def a_uv(folder: Path) -> Path:
    """Return the file of a uv in a new folder."""
    folder.mkdir(parents=True)
    (folder / "uv").touch(0o755)
    return folder / "uv"


@pytest.mark.parametrize("where", ["pip", "the path", "a clone", "nowhere"])
def test_a_missing_package_is_named_with_a_command_that_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    pip = ModuleType("pip")
    pip.__spec__ = ModuleSpec("pip", None)
    monkeypatch.setitem(sys.modules, "pip", pip if where == "pip" else None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "clone" / ".venv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    uv: str | Path = "uv"
    if where == "the path":
        uv = a_uv(tmp_path / "bin")
    elif where == "a clone":
        uv = a_uv(tmp_path / "clone" / ".uv" / "bin")

    command = ["runs", "export", "a:train:0", "--api-key", "tml-key", "--to", "wandb"]
    result = CliRunner().invoke(app, command)

    python = sys.executable
    install = f"{python} -m pip install" if where == "pip" else f"{uv} pip install -p {python}"
    assert result.exit_code == 1
    assert f"run `{install} wandb`" in result.stderr


@pytest.mark.parametrize("others", [["--to", "wandb"], ["--to", "mlflow", "--folder", "curves"]])
def test_a_tracking_uri_is_refused_where_it_has_no_use(others: list[str]) -> None:
    where = ["--tracking-uri", "http://127.0.0.1:5000", *others]
    result = CliRunner().invoke(app, ["runs", "export", "a:train:0", "--api-key", "k", *where])

    assert result.exit_code == 1
    assert "--tracking-uri: " in result.stderr


class OfflineRun:
    """What W&B returns for an offline run: the folder that it has written."""

    def __init__(self, folder: Path, name: str, *, is_full: bool) -> None:
        self.dir = str(folder / "wandb" / f"offline-run-20261129_130000-{name}" / "files")
        self._is_full = is_full
        Path(self.dir).mkdir(parents=True)

    def define_metric(self, *_: object, **_named: object) -> None: ...

    def log(self, _values: object) -> None:
        if self._is_full:
            raise OSError("no space left on device")

    def finish(self) -> None: ...


@pytest.mark.parametrize("is_full", [False, True])
def test_only_earlier_exports_of_the_run_are_removed_and_after_the_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_full: bool
) -> None:
    def answer(_method: str, _url: object, _key: str, path: str) -> Any:
        if path.endswith("/curve"):
            logged = {"reward": [{"step": 1, "time": at(1), "value": 7.0}]}
            return {"points": [], "logged": logged}
        return {"run_id": "*", "name": "", "owner": "ann", "base_model": "m", "lora_rank": 4}

    wandb = ModuleType("wandb")
    wandb.__dict__["Settings"] = dict
    wandb.__dict__["init"] = lambda **given: OfflineRun(given["dir"], given["id"], is_full=is_full)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(export_command, "request", answer)
    earlier, other = (
        tmp_path / "wandb" / f"offline-run-20261128_120000-{name}"
        for name in ("a-train-0", "b-a-train-0")
    )
    for each in (earlier, other):
        each.mkdir(parents=True)

    command = ["runs", "export", "a:train:0", "--api-key", "k", "--to", "wandb"]
    result = CliRunner().invoke(app, [*command, "--folder", str(tmp_path)])

    assert result.exit_code == int(is_full)
    assert (earlier.exists(), other.exists()) == (is_full, True)
    assert (tmp_path / "wandb" / "offline-run-20261129_130000-a-train-0").exists()


def test_an_id_that_is_none_of_a_run_is_refused() -> None:
    command = ["runs", "export", "../*", "--api-key", "k", "--to", "wandb"]

    refused = CliRunner().invoke(app, command)

    assert refused.stderr.startswith("error: RUN: model_id '../*' is malformed")
