"""Images: what the processor of a vision-language model makes of them."""
