"""The API server: stateless replicas that know keys, owners and routes, and never a tensor."""
