"""Parts of DeepSpeedBridge: configuration, engine and partitions."""
