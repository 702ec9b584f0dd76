"""A fake SGLang that computes real results, with SGLang's own server in front."""
