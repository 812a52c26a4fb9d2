"""Trains the quick start on a Ray cluster from Python: `python examples/ray_train.py --workers 4`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER = Path.cwd()  # It must be on a file system that all nodes share.


def train() -> None:
    """Trains as one rank: each worker calls this function."""
    from dlo_framework import load_config
    from dlo_plugins.engines.ray_train import join_ray

    os.chdir(FOLDER)
    join_ray()
    options = {
        "trainer.strategy": "zero2",
        "trainer.callbacks": [{"class_path": "RayReport"}],
        "trainer.max_steps": 8,
        "trainer.val_check_interval": 4,
    }
    load_config("quickstart", options=options).fit(ckpt_path="auto")


def main() -> None:
    """Starts the workers, and starts them again up to three times when one is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(FOLDER / "ray"), failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"trained {result.metrics['step']} steps on {workers} ranks; {result.checkpoint}")


if __name__ == "__main__":
    main()
