"""Helpers that know nothing about models: files, downloads, checks, text, HTML."""
