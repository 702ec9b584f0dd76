"""Make the images of the test cluster and load them, before any test and its time limit.

    python -m tinkercloud_testing.cluster.image_build.prepare

Tests make and load what is missing by themselves, but on a new machine that takes many minutes.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from tinkercloud_testing.cluster.image_build.engine_image import engine_image
from tinkercloud_testing.cluster.image_build.images import Image
from tinkercloud_testing.cluster.image_build.program_images import TARGETS, program_image
from tinkercloud_testing.cluster.image_build.programs import state_folder
from tinkercloud_testing.cluster.kube_api.existing import LOADER, existing_cluster
from tinkercloud_testing.cluster.nodes.node import (
    an_image_store,
    install_requirements,
    system_images,
)

_REPORT_SECONDS = 15


def main() -> None:
    """Make the images; load them unless the cluster is an existing one."""
    if existing_cluster() is None:
        with step("installing what a node needs from the operating system"):
            install_requirements()
        images = [*make_images(), *system_images()]
        with (
            step(f"loading {len(images)} images"),
            state_folder() as folder,
            an_image_store(folder / "node") as store,
        ):
            store.load(*images)
    elif LOADER in os.environ:
        make_images()
    else:
        say(f"no images are made: {LOADER} is not set")


def make_images() -> list[Image]:
    """Make the images of our programs and of the fake engine."""
    images = []
    for name in TARGETS:
        with step(f"making the image of {name}"):
            images.append(program_image(name))
    with step("making the image of the fake engine"):
        images.append(engine_image())
    return images


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Report the start and the end of a step, and every few seconds that it still runs."""
    start, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(_REPORT_SECONDS):
            say(f"still {name} ({time.monotonic() - start:.0f} s)")

    say(f"{name} ...")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    say(f"done in {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
