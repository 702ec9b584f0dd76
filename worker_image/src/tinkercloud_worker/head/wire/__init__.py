"""HTTP of a head without knowledge of models: headers, tokens, bodies, limits, errors."""
