"""Checkpoints that sessions, runs, programs and copies of any owner refer to are found."""

from datetime import timedelta

from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import (
    Program,
    SamplingSession,
    Session,
    Table,
    TrainingRun,
    Upload,
    now,
)
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.programs.program_messages import ProgramPhase
from tinkercloud_testing.storage.catalogs import writing

RUN = "a_b:train:0"
OF = {"owner": "somebody", "user_metadata": {}}


def path(name: str, run: str = RUN) -> str:
    return f"tinker://{run}/weights/{name}"


def a_session(name: str) -> Session:
    return Session(id=name, tags=[], sdk_version="1", **OF)


def a_run(name: str, source: str) -> TrainingRun:
    spec = {"owner": "somebody", "lora": None, "restore_from": source}
    return TrainingRun(id=name, session_id="open", base_model="tiny", spec=spec, **OF)


def a_sampler(name: str, session: str, source: str) -> SamplingSession:
    return SamplingSession(
        id=name, session_id=session, owner="somebody", base_model="tiny", model_path=source
    )


def an_upload(name: str, source: str) -> Upload:
    return Upload(
        id=name,
        owner="somebody",
        manifest={"copied_from": source},
        adapter_config={},
        size_bytes=0,
        expires_at=now() + timedelta(hours=1),
    )


def a_program(name: str, phase: ProgramPhase) -> Program:
    progress = {"checkpoint": path(f"{name}-resumed"), "sampler": path(f"{name}-named")}
    return Program(
        id=name, owner="somebody", name=name, args=[], phase=str(phase), progress=progress
    )


async def add(catalog: Catalog, *rows: Table) -> None:
    async with writing(catalog) as db:
        for row in rows:
            db.add(row)
            await db.flush()


async def test_what_is_in_use_is_named_and_what_has_ended_uses_nothing(database_url: str) -> None:
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await add(
        catalog,
        a_session("open"),
        a_session("over"),
        a_sampler("s1", "open", path("sampled")),
        a_sampler("s2", "over", path("sampled-once")),
        a_sampler("s3", "open", path("of-another", "axb:train:0")),
        a_run("open:train:0", path("started")),
        a_run("over:train:0", path("started-once")),
        a_program("runs", ProgramPhase.RUNNING),
        a_program("ran", ProgramPhase.SUCCEEDED),
        an_upload("copying", path("copied")),
        an_upload("abandoned", "tinker://other:train:0/weights/x"),
    )
    await catalog.finish_session("over", "ended", None)
    await catalog.delete_run("over:train:0")

    found = await catalog.uses_of_checkpoints(RUN, Visibility("somebody"))
    to_others = await catalog.uses_of_checkpoints(RUN, Visibility("another"))

    await engine.dispose()
    assert {name.rpartition("/")[2]: why for name, why in found.items()} == {
        "sampled": "a session that has not ended samples from it: open;"
        " `tinkercloud sessions delete ID` ends it",
        "started": "a run that has not ended started from it",
        "runs-resumed": "a program that has not ended resumes from it",
        "runs-named": "a program that has not ended has named it",
        "copied": "a copy of it is being made",
    }
    assert to_others[path("sampled")] == "a session that has not ended samples from it"
