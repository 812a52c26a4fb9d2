"""Config of a small training, for sweeps."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {
        "max_epochs": 3,
        "limit_train_batches": 4,
        "limit_val_batches": 2,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    },
    "model": {
        "class_path": "ImageClassifier",
        "init_args": {
            "model": "vit_tiny_patch16_224",
            "model_args": {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4},
            "log_images": 0,
        },
    },
    "data": {"class_path": "DigitsData", "init_args": {"image_size": 16, "batch_size": 16}},
}
