"""Rules of answers, and the pieces of grammars in which formats and requests write them."""
