"""Session heads as the API server uses them: finding, calling and forwarding to them."""
