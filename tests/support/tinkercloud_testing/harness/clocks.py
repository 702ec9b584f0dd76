"""A clock that tests can set, for programs that they start."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import ROOT


@dataclass(frozen=True)
class Clock:
    """The wall clock of programs that are started with `environment`; not their monotonic clock."""

    library: Path
    file: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for programs that are to have this clock."""
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_NO_CACHE": "1",
        }

    def jump(self, hours: int) -> None:
        """Set the clock to so many hours from the real time."""
        self.file.write_text(f"{hours:+d}h\n")


def a_clock(folder: Path) -> Clock:
    """Return a clock that shows the real time; libfaketime is installed if it is missing."""
    library = subprocess.run(
        [ROOT / "tools" / "install_faketime.sh"], check=True, text=True, stdout=subprocess.PIPE
    )
    clock = Clock(Path(library.stdout.strip()), folder / "clock")
    clock.jump(0)
    return clock
