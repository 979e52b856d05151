"""Checkpoint files: safe containers, tables of formats, and tensors into variables and back."""
