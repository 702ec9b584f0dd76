"""The examples of the page about the endpoints run as they are written."""

import re
import subprocess
import sys
from pathlib import Path

from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "openai.md").read_text()


def test_the_examples_print_answers_an_object_and_what_an_agent_says(
    chat_server: Server, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    program = "print('-- next --')\n".join(blocks)
    for shown, here in {
        "http://SERVER": chat_server.url,
        "tml-...": API_KEY,
        "Qwen/Qwen3-8B": CHAT_MODEL,
    }.items():
        program = program.replace(shown, here)

    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-4000:]
    endpoints, form, agent = ran.stdout.split("-- next --\n")
    # A random model may end its answer at once: then the list of blocks is empty.
    assert endpoints.endswith("]\n")
    assert re.fullmatch(r"city='(Lima|Oslo)' is_direct=(True|False)\n", form)
    assert agent
