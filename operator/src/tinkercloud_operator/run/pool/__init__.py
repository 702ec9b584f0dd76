"""Running the decisions about pools, warm spares and tenants."""
