"""The console: pages about runs and usage for browsers."""
