"""SDK clients that end with their server.

Otherwise a client keeps sending heartbeats to a stopped server until the test run ends. Killing its
thread at that point may crash the process.
"""

from dataclasses import dataclass, field

import tinker


@dataclass
class SdkClients:
    """The clients of one server."""

    made: list[tinker.ServiceClient] = field(default_factory=list)

    def make(self, url: str, key: str) -> tinker.ServiceClient:
        """Return a new client."""
        client = tinker.ServiceClient(base_url=url, api_key=key)
        self.made.append(client)
        return client

    def close(self) -> None:
        """Close all clients."""
        for client in self.made:
            # The public property would create a session for a closed client.
            if (holder := client._session_holder) is not None:
                holder.close()


def sampling_session_of(client: tinker.SamplingClient) -> str:
    """Return the id of a sampling session, which the SDK does not publish."""
    return str(client._sampling_session_id)
