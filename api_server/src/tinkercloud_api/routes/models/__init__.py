"""Handlers about models: creating and describing them, their tokenizers, and chat with them."""
