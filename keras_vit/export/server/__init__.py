"""Build the functions and signatures of a SavedModel."""
