"""Searches in every supported database."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.runs.indexed_checkpoints import CheckpointSearch
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


@pytest.fixture
async def catalog(database_url: str) -> AsyncIterator[Catalog]:
    """Return a catalog with three checkpoints that were saved at the same time."""
    engine = open_database(database_url)
    await migrate(engine)
    catalog = Catalog(engine)
    for name in ("a", "b", "c"):
        await catalog.index_checkpoint(
            CheckpointManifest(
                tinker_path=str(CheckpointPath("s:train:0", CheckpointKind.TRAINING, name)),
                owner="me",
                base_model=f"base {name}",
                lora=None,
                step=1,
                created_at=MOMENT,
                user_metadata={"name": name, "of": "x"},
                files={},
            )
        )
    yield catalog
    await engine.dispose()


async def test_searches_compare_metadata_and_base_models(catalog: Catalog) -> None:
    async def names(**fields: object) -> list[str]:
        search = CheckpointSearch(Visibility("me"), **fields)  # type: ignore[arg-type]
        return [row.name for row in await catalog.search_checkpoints(search)]

    assert await names() == ["a", "b", "c"]
    assert await names(user_metadata={"name": "b", "of": "x"}) == ["b"]
    assert await names(user_metadata={"name": "b", "of": "y"}) == []
    assert await names(base_models=["base c", "base a"]) == ["a", "c"]
    assert await names(project_ids=["p"]) == []


async def test_a_page_begins_after_a_checkpoint_of_the_same_time(catalog: Catalog) -> None:
    after = (MOMENT, CheckpointPath("s:train:0", CheckpointKind.TRAINING, "a"))

    rows = await catalog.search_checkpoints(CheckpointSearch(EVERYTHING, after=after, limit=1))

    assert [row.name for row in rows] == ["b"]
