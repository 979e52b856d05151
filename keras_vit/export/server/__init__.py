"""The functions and signatures of a SavedModel."""
