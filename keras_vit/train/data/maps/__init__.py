"""Read images with a map for each."""
