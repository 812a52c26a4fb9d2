"""Batches of images: mixed, at growing sizes, and validated at each image's own shape."""
