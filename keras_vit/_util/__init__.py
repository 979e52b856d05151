"""Helpers without knowledge of models: files, downloads, tables, HTML."""
