"""A program takes the open files that its user may have, not those it was started with."""

import subprocess
import sys

TELL = (
    "import resource; from tinkercloud_protocol.heads.descriptors import raise_limit;"
    "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
)


def limits_of(limits: str) -> list[int]:
    command = ["bash", "-c", f"{limits} && exec {sys.executable} -c '{TELL}'"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [int(number) for number in printed.split()]


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    assert limits_of("ulimit -Sn 256 && ulimit -Hn 2048") == [2048, 2048]


def test_a_limit_that_is_as_high_as_it_may_be_stays() -> None:
    assert limits_of("ulimit -n 512") == [512, 512]
