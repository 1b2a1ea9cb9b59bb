"""GGUF files: what they hold, read without a library and without trusting them."""

from .reader import GgufFile, GgufTensor, is_gguf

__all__ = ["GgufFile", "GgufTensor", "is_gguf"]
