"""The head's own process: HTTP, order, results, live models. Receives a trainer and a sampler."""
