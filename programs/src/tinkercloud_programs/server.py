"""What a program asks of its server in addition to the Tinker API."""

import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

from tinkercloud_protocol.programs import program_messages as names
from tinkercloud_protocol.programs.program_messages import ProgramInfo, ProgramProgress

_CALL_SECONDS = 60.0
_PATIENCE_SECONDS = 600.0
"""How long a server may be restarting or a head may be starting."""
_PAUSE_SECONDS = 1.0
_RETRIED = {408, 429, 500, 502, 503, 504}


class ModelGone(Exception):
    """A model was deleted, or lost with its session head; the message says which."""


class ProgramServer:
    """The server of this program, found through its environment."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.program_id = environment[names.PROGRAM_ID]
        self._client = httpx.Client(
            base_url=environment[names.BASE_URL],
            headers={"X-API-Key": environment[names.API_KEY]},
            timeout=_CALL_SECONDS,
        )

    def record(self) -> ProgramInfo:
        """Return what the server knows about this program."""
        path = f"/api/v1/programs/{self.program_id}"
        return ProgramInfo.model_validate_json(self._call("GET", path).content)

    def report(self, progress: ProgramProgress) -> None:
        """Report progress."""
        path = f"/api/v1/programs/{self.program_id}/progress"
        self._call("POST", path, progress.model_dump(mode="json", exclude_none=True))

    def attach(self, model_id: str) -> int:
        """Continue a model's order; return the number of its next request.

        Raises:
            ModelGone: the model was deleted or lost.
        """
        response = self._call("POST", "/api/v1/attach_model", {"model_id": model_id})
        return int(response.json()["next_seq_id"])

    def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:  # noqa: ANN401 - JSON
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            response = self._try(method, path, body)
            if response is not None and response.status_code not in _RETRIED:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{method} {path}: the server did not respond in time")
            time.sleep(_PAUSE_SECONDS)
        if response.status_code in {404, 410}:
            raise ModelGone(str(response.json().get("detail")))
        if response.is_error:
            raise RuntimeError(f"{method} {path}: {response.status_code} {response.text[:500]}")
        return response

    def _try(self, method: str, path: str, body: Any) -> httpx.Response | None:  # noqa: ANN401 - JSON
        try:
            return self._client.request(method, path, json=body)
        except httpx.TransportError:
            return None
