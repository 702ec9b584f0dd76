"""Exercise every public method of the installed SDK against a server, and print the results.

Run by `tools/compatibility/run.py` in the environment of each SDK version. The last line of the
output is a JSON object: the version, and the result of each method: "works" or why not.
"""

import importlib
import inspect
import json
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version

if "COMPATIBILITY_TORCH" in os.environ:
    # One installation of torch, which the SDK needs for losses of the client, serves all versions.
    sys.path.append(os.environ["COMPATIBILITY_TORCH"])

import calls
import flows
from world import World

METHOD_SECONDS = 40.0
WORKS = "works"
_CLASSES = {
    calls.SERVICE: "service_client",
    calls.TRAINING: "training_client",
    calls.SAMPLING: "sampling_client",
    calls.REST: "rest_client",
}
_CALLBACKS = {"SamplingClient.on_queue_state_change", "TrainingClient.on_queue_state_change"}
"""Methods that the SDK itself calls."""
_VOLATILE = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}(:train:\d+)?(:\d+)?|127\.0\.0\.1:\d+|0x[0-9a-f]+"
)
_MAX_CHARACTERS = 300


def public_methods() -> Iterator[tuple[str, str]]:
    """Yield the class and the name of each public method of the installed SDK."""
    for class_name, module in _CLASSES.items():
        found = importlib.import_module(f"tinker.lib.public_interfaces.{module}")
        for name, member in inspect.getmembers(getattr(found, class_name)):
            is_method = callable(member) and not name.startswith("_")
            if is_method and f"{class_name}.{name}" not in _CALLBACKS:
                yield class_name, name


def outcome(work: Callable[[], None]) -> str:
    """Return "works", or why a piece of work failed or did not end in time."""
    result: list[str] = []

    def attempt() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - any exception of the SDK is a result
            traceback.print_exc()
            result.append(_reason(error))
        else:
            result.append(WORKS)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(METHOD_SECONDS)
    return result[0] if result else f"no result within {METHOD_SECONDS:g} seconds"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return _VOLATILE.sub("...", f"{type(error).__name__}: {text}")[:_MAX_CHARACTERS]


def main() -> None:
    """Exercise everything and print the results."""
    warnings.simplefilter("ignore")
    world = World()
    results: dict[str, str] = {}

    def record(name: str, work: Callable[[], None]) -> None:
        started = time.monotonic()
        results[name] = outcome(work)
        seconds = time.monotonic() - started
        print(f"{seconds:6.2f} s  {name}: {results[name]}", file=sys.stderr, flush=True)

    for class_name, name in public_methods():
        full = f"{class_name}.{name}"
        if calls.is_known(class_name, name):
            record(full, lambda c=class_name, n=name: calls.run(world, c, n))
        else:
            results[full] = "not exercised: tools/compatibility/calls.py has no call of this method"
    for title, flow in flows.applicable(world):
        record(title, lambda run=flow: run(world))
    print(json.dumps({"version": version("tinker"), "results": results}), flush=True)
    # Threads of the SDK would delay the end of the process.
    os._exit(0)


main()
