"""An exported graph, judged against a recording: what it means, in float64, and what an engine makes of it.

Imports onnx and NumPy, for the engine onnxruntime, for preprocessing Pillow; no framework.
"""
