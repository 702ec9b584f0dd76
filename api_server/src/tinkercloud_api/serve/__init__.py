"""The running API server: its application, its route table, and its process."""
