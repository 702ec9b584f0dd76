"""`python -IS warm_start.py SOCKET SCRIPT ARGUMENT...`: run a script in a fork of a warm Python.

It imports almost nothing, so that the script starts immediately: see `warm_python`.
"""

import json
import os
import socket
import sys
from pathlib import Path

request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": str(Path.cwd())}
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(sys.argv[1])
    content = json.dumps(request).encode()
    sent = socket.send_fds(asking, [content], [0, 1, 2])
    asking.sendall(content[sent:])
