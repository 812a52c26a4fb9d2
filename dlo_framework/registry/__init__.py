"""Plug-in registry: installed plug-ins, their import on demand, and the class paths that a config may name."""

from dlo_framework.registry.registry import BASES, GROUP_PREFIX, KINDS, Plugin, Registry, kind_of

__all__ = ["BASES", "GROUP_PREFIX", "KINDS", "Plugin", "Registry", "kind_of"]
