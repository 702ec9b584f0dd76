"""Session heads and programs as child processes."""
