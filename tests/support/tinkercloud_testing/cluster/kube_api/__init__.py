"""The control plane: its programs, certificates, clients, and stand-ins for its faults."""
