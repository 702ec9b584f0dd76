"""Small models, with their tokenizers, templates, images and data."""
