"""Image classification with timm models: ImageNet-style folders, tar shards, and real handwritten digits."""
