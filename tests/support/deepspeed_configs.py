"""DeepSpeed configurations of the kinds that its documentation and Hugging Face's show, in our own words."""

from typing import Any

#: The world that their batch sizes are for.
RANKS = 4

CONFIGS: dict[str, dict[str, Any]] = {
    "first steps: batch, Adam, fp16": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    "many things of zero 2": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 100,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 1000,
                "warmup_min_lr": 0,
                "warmup_max_lr": 3e-4,
                "warmup_num_steps": 50,
                "warmup_type": "linear",
            },
        },
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
    },
    "Hugging Face, zero 3, all auto": {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "initial_scale_power": 16,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    },
    "old spellings": {
        "train_micro_batch_size_per_gpu": 1,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": True},
    },
    "an NVMe disk": {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4, "fast_init": False},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 100000000},
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    },
    "two disks": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            "offload_param": {"device": "nvme", "nvme_path": "/b"},
        },
    },
    "a profiler and a momentum": {
        "train_batch_size": 8,
        "flops_profiler": {"enabled": True, "profile_step": 5, "module_depth": -1, "top_modules": 3, "detailed": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 1, "zero_hpz_partition_size": 1},
    },
    "nothing at all": {},
}
