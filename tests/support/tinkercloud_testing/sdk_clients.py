"""SDK clients that end with the server they are clients of.

One that is left alone goes on sending heartbeats to a server that is gone, until the test run ends
and beyond: its thread may be killed in the midst of it then, and take the process along.
"""

from dataclasses import dataclass, field

import tinker


@dataclass
class SdkClients:
    """Those of one server."""

    made: list[tinker.ServiceClient] = field(default_factory=list)

    def make(self, url: str, key: str) -> tinker.ServiceClient:
        """Return another."""
        client = tinker.ServiceClient(base_url=url, api_key=key)
        self.made.append(client)
        return client

    def close(self) -> None:
        """End them all."""
        for client in self.made:
            # The public property makes a session for a client that has none, or is closed.
            if client._session_holder is not None:
                client._session_holder.close()
