"""Commands about runs that need more than a request: a live view, exports, questions to models."""
