"""The operator in a cluster whose pods are simulated: run with `python -m`.

Simulated pods run no heads, and outside of the cluster the names of Services do not resolve. Here
they resolve to a server that answers each request like a head that has saved, dropped or given
away what it was asked to.
"""

import asyncio
import socket
import threading

import aiohttp.connector
from aiohttp import web
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from tinkercloud_operator.__main__ import main
from tinkercloud_protocol.heads.launch import Saved
from tinkercloud_protocol.wire import routes

_SERVICES = ".svc"


async def _done(_: web.Request) -> web.Response:
    return web.json_response({})


async def _checkpoint(_: web.Request) -> web.Response:
    return web.Response(text=Saved(checkpoints=[]).model_dump_json())


def _serve(listener: socket.socket) -> None:
    """Answer requests until the process ends."""
    app = web.Application()
    app.router.add_post(routes.HEAD_SUSPEND, _done)
    app.router.add_post(f"{routes.HEAD_MOVE_MODEL}/{{model}}", _done)
    app.router.add_delete(f"{routes.HEAD_MOVE_MODEL}/{{model}}", _done)
    app.router.add_delete(f"{routes.HEAD_MODELS}/{{model}}", _done)
    for path in (routes.HEAD_CHECKPOINT, f"{routes.HEAD_CHECKPOINT}/{{model}}"):
        app.router.add_post(path, _checkpoint)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    web.run_app(app, sock=listener, handle_signals=False, print=None, loop=loop)


def run() -> None:
    """Run the operator with stand-ins of heads."""
    listener = socket.create_server(("127.0.0.1", 0))
    stand_in = listener.getsockname()[1]

    class Services(ThreadedResolver):
        """Resolves the names of Services to the stand-in."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            if host.endswith(_SERVICES):
                return await super().resolve("127.0.0.1", stand_in, family)
            return await super().resolve(host, port, family)

    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    vars(aiohttp.connector)["DefaultResolver"] = Services
    main()


if __name__ == "__main__":
    run()
