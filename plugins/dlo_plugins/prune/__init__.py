"""Pruning: schedules of sparsity, choice of the pruned weights over all ranks, N:M patterns, and smaller models."""
