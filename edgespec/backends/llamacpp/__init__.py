"""llama.cpp as a runtime: GGUF files run as they are, through the low-level names of llama-cpp-python.

Import order, from the bottom: library, settings, vocabulary, context, model. llama_cpp is imported by `library()` on
first use.
"""
