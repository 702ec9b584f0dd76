"""Delete the CUDA libraries of an environment that its torch does not load on a CPU.

For networks whose package index has only the CUDA build of torch: a gigabyte of its libraries is
needed to import it, the others are not. `/opt/tinkercloud/bin/python drop_idle_cuda.py`
"""

import site
from pathlib import Path

import torch  # noqa: F401 - loads the libraries

loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
for packages in site.getsitepackages():
    for path in Path(packages, "nvidia").rglob("*"):
        if path.is_file() and str(path) not in loaded:
            path.unlink()
