"""One model in memory: its operations, checkpoints and automatic saving."""
