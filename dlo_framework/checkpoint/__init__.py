"""Checkpoints that are saved atomically, execute nothing when they are read, and load under any strategy."""

from dlo_framework.checkpoint.history import newest_valid, note_resumption, resumptions, step_of
from dlo_framework.checkpoint.loading import LazyStateDict, SafeCheckpointIO, best_kept, check, load
from dlo_framework.checkpoint.manifest import Manifest
from dlo_framework.checkpoint.saving import AsyncSaver, save
from dlo_framework.checkpoint.store import CheckpointStore, locate, read_manifest, recover, remove
from dlo_framework.checkpoint.verify import verify

__all__ = [
    "AsyncSaver",
    "CheckpointStore",
    "LazyStateDict",
    "Manifest",
    "SafeCheckpointIO",
    "best_kept",
    "check",
    "load",
    "locate",
    "newest_valid",
    "note_resumption",
    "read_manifest",
    "recover",
    "remove",
    "resumptions",
    "save",
    "step_of",
    "verify",
]
