"""A catalog in a file gives the version of access rights without waiting."""

from pathlib import Path

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.store import Catalog


async def test_a_change_of_rights_by_another_process_is_seen_at_once(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/an odd?name.db"
    ours, of_another = (Catalog(open_database(url.replace("?", "%3F"))) for _ in range(2))
    assert ours.access_version_at_once() is None

    await migrate(open_database(url.replace("?", "%3F")))
    before = ours.access_version_at_once()
    await of_another.add_user("bob", None)
    after = ours.access_version_at_once()

    assert before is not None
    assert after == before + 1 == await ours.access_version()
    await ours.close()
    await of_another.close()


async def test_a_catalog_that_is_no_file_has_to_be_asked() -> None:
    catalog = Catalog(open_database("sqlite+aiosqlite://"))

    assert catalog.access_version_at_once() is None
    await catalog.close()
