"""Download files into a cache folder, and verify them; docs/environment.md has the sources, checks and variables."""

from keras_vit._util.download.cached_files import cache_folder, check_licence, fetch

__all__ = ["cache_folder", "check_licence", "fetch"]
