"""Compilation of a model: the callback, and counts of what torch compiles."""

from dlo_plugins.callbacks.compile.compile_callback import Compile

__all__ = ["Compile"]
