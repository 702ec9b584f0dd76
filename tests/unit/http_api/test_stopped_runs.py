"""The client of a run that somebody stopped reads who did, when, and how to continue."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tinkercloud_api.access.auth import hash_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest, encode_manifest
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.heads.reports.thinned_curves import CurvePoint, CurveReport
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEYS = {name: f"tml-key-of-{name}-in-these-tests" for name in ("ann", "bob", "root")}
RUN = "s:train:0"
MOMENT = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
AUTOSAVE = CheckpointPath.of_autosave(RUN, 3)
CONTINUING = (
    f"; to continue from its last checkpoint, {AUTOSAVE}, use `tinkercloud runs attach {RUN}`, or"
    " create_training_client_from_state_with_optimizer"
)


async def make_run(app: Application, settings: Settings, *, is_saved: bool) -> None:
    """Add a run of ann in a project of bob too, and keys of both and of an administrator."""
    assert app.context is not None
    catalog = app.context.catalog
    for name, key in KEYS.items():
        role = Role.ADMIN if name == "root" else Role.USER
        await catalog.add_key(key_hash=hash_key(key), name=name, owner=name, role=role)
    await catalog.add_project("p", "p", "ann")
    await catalog.set_member("p", "bob", "member")
    of_ann = {"owner": "ann", "user_metadata": {}}
    await catalog.add_session(Session(id="s", tags=[], sdk_version="1", project_id="p", **of_ann))
    spec = {"owner": "ann", "lora": {"rank": 4}}
    await catalog.add_run(
        TrainingRun(id=RUN, session_id="s", base_model="tiny", spec=spec, **of_ann)
    )
    if is_saved:
        manifest = CheckpointManifest(
            tinker_path=str(AUTOSAVE),
            owner="ann",
            base_model="tiny",
            lora=None,
            step=3,
            created_at=datetime.now(UTC),
            files={},
        )
        store = open_store(settings.checkpoint_url)
        await store.put_async(AUTOSAVE.manifest_key, encode_manifest(manifest))


@pytest.mark.parametrize(
    ("stopper", "by", "is_saved"),
    [
        ("root", "an administrator", True),
        ("ann", "its owner", True),
        ("bob", "a member of its project", False),
    ],
)
async def test_its_next_request_says_who_stopped_the_run_and_when(
    stopper: str, by: str, is_saved: bool, tmp_path: Path
) -> None:
    settings = Settings(state_dir=tmp_path)
    app = Application(settings, OneHead())
    headers = {name: {"x-api-key": key} for name, key in KEYS.items()}
    async with served(app) as url, httpx.AsyncClient(base_url=f"{url}/api/v1/") as client:
        await client.get(f"{url}/livez")
        await make_run(app, settings, is_saved=is_saved)
        stopped = await client.post(f"runs/{RUN}/stop", headers=headers[stopper])
        answer = await client.post(f"runs/{RUN}/save", headers=headers["ann"])
        listed = await client.get(f"runs/{RUN}", headers=headers["ann"])

    assert stopped.status_code == 200, stopped.text
    assert answer.status_code == 410
    continuing = CONTINUING if is_saved else "; it has no checkpoint to continue from"
    expected = f"training run {RUN} was stopped by {by} at {MOMENT}{re.escape(continuing)}"
    assert re.fullmatch(expected, answer.json()["detail"])
    assert listed.json()["reason"] == f"{by} stopped it"


@pytest.mark.parametrize(
    ("last", "seconds", "shown"),
    [(5, 60, (5, 2)), (2, 60, (2, None)), (5, -60, (5, 2)), (2, -60, (3, 0))],
    ids=["later steps", "loaded an earlier one", "steps while it was written", "saved at the end"],
)
async def test_steps_that_an_ended_run_has_in_no_checkpoint_are_unsaved(
    last: int, seconds: int, shown: tuple[int, int | None], tmp_path: Path
) -> None:
    settings = Settings(state_dir=tmp_path)
    app = Application(settings, OneHead())
    headers = {"x-api-key": KEYS["ann"]}
    async with served(app) as url, httpx.AsyncClient(base_url=f"{url}/api/v1/") as client:
        await client.get(f"{url}/livez")
        await make_run(app, settings, is_saved=True)
        assert app.context is not None
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        point = CurvePoint(index=0, step=last, steps=5, at=at, metrics={})
        await app.context.points.record(CurveReport(curve_of=RUN, stride=8, points=[point]))
        await client.post(f"runs/{RUN}/stop", headers=headers)
        found = (await client.get(f"runs/{RUN}", headers=headers)).json()

    assert (found["state"], found["step"], found["unsaved_steps"]) == ("ended", *shown)
