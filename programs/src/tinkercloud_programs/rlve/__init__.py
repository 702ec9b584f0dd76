"""RLVE: reinforcement learning on environments that generate and verify problems."""
