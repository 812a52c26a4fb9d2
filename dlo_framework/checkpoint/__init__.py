"""Checkpoints that are saved atomically, execute nothing when they are read, and load under any strategy."""

from dlo_framework.checkpoint.background import AsyncSaver
from dlo_framework.checkpoint.best import best_kept
from dlo_framework.checkpoint.canonical import save
from dlo_framework.checkpoint.folder import locate, recover, remove
from dlo_framework.checkpoint.history import note_resumption, resumptions, step_of
from dlo_framework.checkpoint.lazy_state import LazyStateDict
from dlo_framework.checkpoint.manifest import Manifest, read_manifest
from dlo_framework.checkpoint.reading import check, load
from dlo_framework.checkpoint.shards import Box, FlatShard, Shard, SlicedShard, flat_slice_boxes, held_boxes
from dlo_framework.checkpoint.torch_file import SafeCheckpointIO, refuse_unsafe, tensor_bytes
from dlo_framework.checkpoint.verify import newest_valid, verify

__all__ = [
    "AsyncSaver",
    "Box",
    "FlatShard",
    "LazyStateDict",
    "Manifest",
    "SafeCheckpointIO",
    "Shard",
    "SlicedShard",
    "best_kept",
    "check",
    "flat_slice_boxes",
    "held_boxes",
    "load",
    "locate",
    "newest_valid",
    "note_resumption",
    "read_manifest",
    "recover",
    "refuse_unsafe",
    "remove",
    "resumptions",
    "save",
    "step_of",
    "tensor_bytes",
    "verify",
]
