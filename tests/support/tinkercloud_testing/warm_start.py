"""`python -IS warm_start.py SOCKET SCRIPT ARGUMENT...`: have a warm Python run a script.

It imports next to nothing, as what it stands for is to begin at once: see `warm_python`.
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
