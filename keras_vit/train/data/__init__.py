"""Training data: sources, splits, order, decoding and augmentation."""
