"""The parts of a simulated cluster."""
