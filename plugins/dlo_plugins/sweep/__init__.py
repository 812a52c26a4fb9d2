"""Hyperparameter search: spaces over config keys, the queue of trials in a storage, workers, plots, and Ray Tune."""
