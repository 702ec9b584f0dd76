"""`tinkercloud demo`: three examples that train a small model, with the SDK."""
