"""Settings by subject: downloads, login, prices, programs, tenants."""
