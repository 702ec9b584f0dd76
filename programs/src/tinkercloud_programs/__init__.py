"""Programs that train models from the server's side: ordinary clients of the Tinker API."""
