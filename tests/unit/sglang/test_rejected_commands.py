"""Commands of a head, not caused by a user, that an engine rejects."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tinkercloud_worker.inference.client import InferenceClient, ServerError
from tinkercloud_worker.inference.sglang.control import TRAINING, SglangControl
from tinkercloud_worker.inference.sglang.sglang_dialect import SglangDialect
from tinkercloud_worker.inference.weights_folder import WeightsFolder


@pytest.fixture(
    params=["/update_weight_version", "/pause_generation", "/release_memory_occupation"]
)
def refused(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path


@pytest.fixture
async def url(refused: str) -> AsyncIterator[str]:
    """A new engine that responds to one command with HTTP 400."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == refused:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        return web.json_response({"weight_version": "default", "model_path": "/model"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_rejected_command_is_a_server_error(url: str, refused: str, tmp_path: Path) -> None:
    client = InferenceClient(url, key=None, max_concurrent=1)
    folder = WeightsFolder(
        tmp_path, server_dir=None, owner="head", base_path=tmp_path, base_model="tiny/llama"
    )
    control = SglangControl(
        SglangDialect(client), folder, owner="head", base_path="/model", group=None
    )

    with pytest.raises(ServerError, match=rf"{refused}: .* unknown field"):
        async with control.modes.use(TRAINING):
            pass
    await client.close()
