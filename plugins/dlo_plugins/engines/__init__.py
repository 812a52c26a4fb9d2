"""Systems that run a training over machines: Ray Train, and Kubeflow Trainer."""
