"""Samplers that are servers of their own: SGLang and vLLM, asked over HTTP."""
