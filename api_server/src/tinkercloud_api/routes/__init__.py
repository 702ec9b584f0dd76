"""HTTP request handlers, grouped by the SDK's nouns."""
