"""The interface of samplers: requests, stop rules, and the text of a sequence."""
