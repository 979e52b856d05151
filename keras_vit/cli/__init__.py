"""The command line, `keras-vit`."""

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperOption

from keras_vit import __version__
from keras_vit._util.text import PACKAGE, in_our_words, printable, suggestion, warn
from keras_vit.cli import batch, demo, export, options, predict, show, train

__all__ = ["app", "main"]

USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, or of typer's copy of it
MANY_OPTIONS = 15  # a command with more shows them in groups
# Environment variables of the package, as docs/environment.md lists them.
VARIABLES = ("KERAS_VIT_CACHE", "KERAS_VIT_MEMORY", "KERAS_VIT_MIRROR", "KERAS_VIT_OFFLINE")
INTERRUPTED, TERMINATED = 130, 143  # exit codes after Ctrl-C and SIGTERM


app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False)
COMMANDS: dict[str, Callable[..., None]] = {
    "list": show.list_models,
    "show": show.show,
    "fetch": show.fetch,
    "predict": predict.predict,
    "embed": batch.embed,
    "search": batch.search,
    "convert": export.convert,
    "resize": export.resize,
    "train": train.train,
    "evaluate": train.evaluate,
    "plan": train.plan,
    "export": export.export,
    "verify": export.verify,
    "visualize": predict.visualize,
    "bench": demo.bench,
    "demo": demo.demo,
}
# Groups of options in --help, by the names of their parameters; the others come first, under "Options".
PANELS = {
    "Model": ("model", *options.MODEL_NAMES, "num_classes", "teacher", "continue_from"),
    "Data": ("data", "data_dir", "train_split", "eval_split", "split", "on_bad_image", "images", "verify_on"),
    "SavedModel": export.SAVED_MODEL_OPTIONS,
    "LiteRT file": export.TFLITE_OPTIONS,
}


class Command(TyperCommand):
    """A command with groups of options, whose error for an option of another library says what it is here."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for panel, names in PANELS.items() if len(self.params) > MANY_OPTIONS else ():
            for option in self.params:
                if option.name in names and isinstance(option, TyperOption):
                    option.rich_help_panel = panel

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of a command line."""
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            if words := in_our_words([name]):
                error.message += f" {words}. Fields of a model are given as --config FIELD=VALUE."
            raise


for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Vision Transformers for TensorFlow and Keras 3: load the official models exactly, train, export."""


def _warn_unknown_variables() -> None:
    """Warn about variables with the prefix of the package that it does not read."""
    unknown = [name for name in sorted(os.environ) if name.startswith(f"{PACKAGE.upper()}_") and name not in VARIABLES]
    if unknown and "_KERAS_VIT_COMPLETE" not in os.environ:  # a shell asks for completions
        warn("; ".join(f"{name} is read by nothing; {suggestion(name, VARIABLES)}" for name in unknown))


def main() -> None:
    """Run the command. A user error prints one line on standard error and gives exit code 1.

    SIGTERM ends it as Ctrl-C does, so that no temporary files stay; training has a handler of its own.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with warnings.catch_warnings():
        warnings.showwarning = options.show_warning
        _warn_unknown_variables()
        try:
            app()
        except SystemExit as end:
            if end.code in (INTERRUPTED, TERMINATED):  # TensorFlow would finish what it computes
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                os._exit(end.code)
            raise
        except Exception as error:
            if not options.is_user_error(error):
                raise
            sys.exit("keras-vit: " + printable(options.error_text(error), keep="\n"))
