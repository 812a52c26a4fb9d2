"""The plug-in registry: which plug-ins are installed, importing those a run names, and what a config may name."""

from dlo_framework.registry.entries import GROUP_PREFIX, KINDS, Plugin
from dlo_framework.registry.registry import BASES, Registry

__all__ = ["BASES", "GROUP_PREFIX", "KINDS", "Plugin", "Registry"]
