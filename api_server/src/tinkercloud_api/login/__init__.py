"""Login of browsers with an OpenID provider."""
