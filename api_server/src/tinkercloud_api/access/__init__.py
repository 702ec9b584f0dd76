"""Who a caller is, and what it may see and change."""
