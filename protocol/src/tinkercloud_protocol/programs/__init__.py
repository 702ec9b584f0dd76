"""Programs that the server runs for owners."""
