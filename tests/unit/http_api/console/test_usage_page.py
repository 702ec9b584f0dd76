"""The page of usage, and its JSON twin, for a server with more owners than a page has rows."""

from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert

from tinkercloud_api.catalog.schema.connection import open_database
from tinkercloud_api.catalog.schema.tables import UsageHour, now
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.reports.usage_reports import hour_of
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

ADMIN = "tml-of-an-admin-of-many"
OWNERS = 100_001


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_no_row_of_a_month_is_missing_however_many_owners_there_are(tmp_path: Path) -> None:
    moment = now()
    amounts = dict.fromkeys(("forward_tokens", "prefill_tokens", "cached_tokens"), 0)
    amounts |= {"trained_tokens": 10**6, "sampled_tokens": 0, "engine_seconds": 0}
    of_all = {"hour": hour_of(moment), "base_model": "tiny", "model_id": "", "session_id": "s"}
    of_all |= {"generation": "g", **amounts}
    rows = [{"owner": f"owner-{number:06}", **of_all} for number in range(OWNERS)]
    prices = {"models": {"tiny": {"train": 1}}}
    settings = Settings(state_dir=tmp_path, bootstrap_key=ADMIN, prices=prices)
    async with (
        served(Application(settings, OneHead())) as url,
        httpx.AsyncClient(base_url=url, timeout=300) as http,
    ):
        await http.post("/console/login", data={"key": ADMIN})
        engine = open_database(settings.catalog_url)
        async with engine.begin() as db:
            await db.execute(insert(UsageHour), rows)
        await engine.dispose()

        month = {"month": f"{moment:%Y-%m}", "by": "day", "access_scope": "accessible"}
        headers = {"x-api-key": ADMIN}
        answer = await http.get("/api/v1/usage/month", params=month, headers=headers)
        page = await http.get("/console/usage", params={"month": month["month"]})

    assert answer.status_code == 200, answer.text
    assert len(answer.json()["usage"]) == OWNERS
    assert answer.json()["total"] == OWNERS
    assert page.text.count(f"the first 200 of {OWNERS}") == 2
