"""The tables of the catalog, the connection to its database, and its transactions."""
