"""`python -IS warm_start.py SOCKET SCRIPT ARGUMENT...`: run a script in a fork of a warm Python.

It imports almost nothing, so that the script starts immediately: see `warm_python`.
"""

import json
import os
import socket
import sys
from pathlib import Path

FILES = [0, 1, 2]

request = {
    "script": sys.argv[2],
    "arguments": sys.argv[3:],
    "environment": dict(os.environ),
    "folder": str(Path.cwd()),
    "files": FILES,
    "is_leader": True,  # Ray kills the process groups of its workers.
}
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(sys.argv[1])
    content = json.dumps(request).encode()
    socket.send_fds(asking, [b"%016d" % len(content)], FILES)
    asking.sendall(content)
