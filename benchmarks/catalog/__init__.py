"""Large catalogs, and the pages that show them."""
