"""Run `keras-vit` commands inside a test."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from keras_vit.cli import app, main


def run(*arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """Run a command that must fail, and return its one line of error."""
    monkeypatch.setattr(sys, "argv", ["keras-vit", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    message = str(caught.value.code)
    assert message.startswith("keras-vit: ")
    return message
