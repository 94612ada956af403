"""A static-graph compiler for Transformer language models.

kvgraph turns a checkpoint into two explicit ONNX graphs, prefill and decode, that carry the KV cache as inputs
and outputs; quantizes them; compiles them for ONNX Runtime and TensorRT; runs them; and compares every stage.
"""

__version__ = "0.1.0"
