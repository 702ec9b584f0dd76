"""The running API server: its application, its hot paths, and its process."""
