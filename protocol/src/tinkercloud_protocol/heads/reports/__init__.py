"""What heads report on their leases."""
