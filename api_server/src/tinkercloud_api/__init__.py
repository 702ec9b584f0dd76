"""The API server: stateless replicas that authenticate and route requests, but read no tensors."""
