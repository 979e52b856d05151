"""Find the packages; setup.cfg declares everything else.

The data folders `zoo/` and `converters/` lie beside the package in a checkout. The wheel carries them inside it, as
`keras_vit/_installed/zoo` and `keras_vit/_installed/converters`, which setup.cfg alone cannot say beside `find:`.
"""

import sys

from setuptools import find_packages, setup

DATA_FOLDERS = ("zoo", "converters")

if sys.version_info < (3, 11):  # an old pip would first look through all versions of TensorFlow for one that fits
    sys.exit("keras_vit needs Python 3.11 or newer. Received: Python {}.{}".format(*sys.version_info))

setup(
    packages=[
        *find_packages(include=["keras_vit", "keras_vit.*"]),
        *(f"keras_vit._installed.{folder}" for folder in DATA_FOLDERS),
    ],
    package_dir={f"keras_vit._installed.{folder}": folder for folder in DATA_FOLDERS},
)
