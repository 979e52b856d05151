"""Run `keras-vit`, also as `python -m keras_vit`."""

import sys

from keras_vit._util.text import DISTRIBUTION, PACKAGE


def main() -> None:
    """Run the command, or say how to install the packages of the command line."""
    try:
        from keras_vit import cli
    except ModuleNotFoundError as error:
        if (error.name or PACKAGE).partition(".")[0] == PACKAGE:
            raise
        sys.exit(f'keras-vit: The command line needs the package {error.name}: pip install "{DISTRIBUTION}"')
    cli.main()


if __name__ == "__main__":
    main()
