"""Container images of the test cluster, built without a registry, and the programs in them."""
