"""Writers of the layers of heads that return a map."""
