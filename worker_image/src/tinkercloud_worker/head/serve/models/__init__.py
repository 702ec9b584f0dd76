"""How models come into a head and leave it: creation, restoration and deletion."""
