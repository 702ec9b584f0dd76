"""What a trainer and a sampler are: types and interfaces, no implementation."""
