"""The ledger of usage, and billing calls that read it."""
