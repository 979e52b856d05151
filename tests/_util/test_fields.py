"""Docstrings under fields: read from the source, shown by `help` and by the command line."""

import dataclasses
import subprocess
import sys

import pytest

import keras_vit
from keras_vit._util import fields
from keras_vit._util.fields import documented, documented_by, field_docs, option, option_help, option_names
from keras_vit.export.modes import Options
from keras_vit.train import Recipe


@dataclasses.dataclass
class Base:
    """Base of the example."""

    width: int = 1
    """Width of a token,
    in numbers.
    """
    silent: int = 2


@documented
@dataclasses.dataclass
class Example(Base):
    """Example of a class.

    Raises:
        ValueError: never.
    """

    width: int = 3
    mode: str = option("a", flag="--kind")
    """Kind, such as a.toml or "b". The second sentence is not in the help."""


def test_docstrings_of_fields_are_read_from_the_class_and_its_bases():
    assert field_docs(Example) == {
        "width": "Width of a token, in numbers.",
        "mode": 'Kind, such as a.toml or "b". The second sentence is not in the help.',
    }


def test_help_lists_the_fields_in_front_of_the_errors():
    assert Example.__doc__ == (
        "Example of a class.\n\nArgs:\n    width: Width of a token, in numbers.\n"
        '    mode: Kind, such as a.toml or "b". The second sentence is not in the help.\n\n'
        "Raises:\n    ValueError: never.\n"
    )


def test_a_function_with_these_arguments_lists_them_after_its_own():
    @documented_by(Example)
    def function(path, width, mode):
        """Use them.

        Args:
            path: its own.

        Returns:
            None.
        """

    lines = function.__doc__.splitlines()
    assert lines[2:5] == ["Args:", "    path: its own.", "    width: Width of a token, in numbers."]
    assert lines[-2:] == ["Returns:", "    None."]


def test_an_option_has_the_first_sentence_as_its_help():
    assert option_names(Example) == ("mode",)
    assert option_help(Example, "mode") == 'Kind, such as a.toml or "b".'


@pytest.mark.parametrize("cls", [keras_vit.ViTConfig, keras_vit.Preprocessing, keras_vit.ResNetConfig, Recipe, Options])
def test_every_field_has_a_docstring_that_help_shows(cls):
    names = [field.name for field in dataclasses.fields(cls) if field.name != "changed"]  # Recipe's own note
    assert list(field_docs(cls)) == names
    assert all(f"    {name}: " in cls.__doc__ for name in names)


def test_without_the_source_there_are_no_docstrings(monkeypatch):
    def raise_error(_module):
        raise OSError("could not get source code")

    monkeypatch.setattr(fields.inspect, "getsource", raise_error)
    fields._docs_of_module.cache_clear()
    try:
        assert field_docs(Example) == {}
    finally:
        fields._docs_of_module.cache_clear()


def test_python_without_docstrings_can_import_the_package():
    code = "import keras_vit.model.config as c; assert c.ViTConfig.__doc__ is None; c.ViTConfig()"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True)
