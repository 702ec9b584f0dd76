"""The fake SGLang as a program that takes SGLang's command line, key and probes, for an image."""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from aiohttp import web
from transformers import AutoModelForCausalLM

from tinkercloud_testing.engines import an_engine
from tinkercloud_testing.sglang import FakeSglang

REFUSES = "FAKE_SGLANG_REFUSES"
"""Variable with the paths that are refused."""


async def serve(options: argparse.Namespace, fake: FakeSglang) -> None:
    """Serve until the process ends; print the path of each request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        print(request.path, flush=True)
        if request.path == "/health":
            return web.Response()
        key = f"Bearer {options.api_key}"
        if not request.path.startswith("/health") and request.headers.get("Authorization") != key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await fake.handle(request)

    await fake.engine.sampler.publish("base", None)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Run as `python -m sglang.launch_server` does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    wanted = ("--model-path", "--host", "--api-key", "--admin-api-key", "--dtype")
    others = ("--port", "--tp-size", "--context-length", "--max-lora-rank")
    for name in wanted:
        parser.add_argument(name, required=True)
    for name in others:
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--lora-target-modules", required=True, nargs="*")
    parser.add_argument("--moe-runner-backend", choices=("triton",))
    parser.add_argument("--attention-backend", choices=("triton",))
    parser.add_argument("--max-loras-per-batch", type=int, default=8)
    parser.add_argument("--lora-drain-wait-threshold", type=float, default=0.0)
    for name in ("--enable-lora", "--enable-deterministic-inference"):
        parser.add_argument(name, action="store_true", required=True)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=options.dtype)
    tempered = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") != "1"
    with an_engine(model, Path(tempfile.mkdtemp())) as engine:
        fake = FakeSglang(
            engine,
            Path(options.model_path),
            gives_tempered_logprobs=tempered,
            lora_target_modules=options.lora_target_modules,
            refuses=frozenset(os.environ.get(REFUSES, "").split()),
        )
        asyncio.run(serve(options, fake))
