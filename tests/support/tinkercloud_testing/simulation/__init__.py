"""A simulation of the whole operator in virtual time.

The real `Controller`, with its pools, spares and save requests, runs on a simulated API server,
KubeRay, nodes, heads and clients. `histories` generates sequences of events from a seed and runs
them, `checks` says what must hold once everything has settled.
"""
