"""ONNX Runtime: dynamic-length decoders with a shared or a growing KV cache.

Import order, from the bottom: devices, signature, folders, session and growing, probe, model. onnxruntime is imported
by `runtime()` on first use.
"""
