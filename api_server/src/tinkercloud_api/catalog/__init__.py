"""The truth about history: keys, sessions, runs, sampling sessions and checkpoints."""
