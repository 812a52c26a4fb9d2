"""What the DeepSpeed bridge is made of: its configuration, its partitions, its folders."""
