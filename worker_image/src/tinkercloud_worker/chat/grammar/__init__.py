"""Grammars that enforce the rules of answers, compiled for the tokens of one model."""
