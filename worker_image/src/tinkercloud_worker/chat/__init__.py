"""Conversations as tokens, and the wire formats of OpenAI and Anthropic for them."""
