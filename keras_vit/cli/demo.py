"""The command `keras-vit demo`: a tour of the package on the embedded model and real images, offline."""

import os
import shutil
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Option

from keras_vit.cli import options

NAME = "ViT-digits"
OUTPUTS = ("1", "digits.tflite", "finetuned", "report.html")  # files and folders that an earlier demo has left


def demo(
    out: Annotated[Path, Option(help="Folder for the exported files and the report.")] = Path("demo"),
    look: Annotated[bool, Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Show the package on the embedded model, offline: load, classify, resize, fine-tune, export, verify, inspect."""
    _empty_folder(out)
    with options.quiet():
        report = _tour(out)
    # Without a desktop, Python opens a text browser in the terminal.
    has_desktop = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if look and has_desktop:
        webbrowser.open(report.resolve().as_uri())


def _empty_folder(out: Path) -> None:
    """Create the folder of the demo, or empty it; raise a ValueError if it contains files that no demo has written."""
    out.mkdir(parents=True, exist_ok=True)
    found = [path for path in out.iterdir() if not path.name.startswith(".")]
    if others := sorted({path.name for path in found}.difference(OUTPUTS)):
        raise ValueError(f"The demo needs a folder of its own, and {out} contains {others[0]}: choose another by --out")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tour(out: Path) -> Path:
    """Load, classify, change the resolution, fine-tune, export to both formats, and write a report; return its path."""
    from keras_vit import digits, export, train, visualize, zoo

    data, model = digits.load(), zoo.load(NAME)
    images, labels = data.test_images, data.test_labels
    print(f"{NAME}: {model.count_params():,} parameters, {len(images)} held-out digits")
    [[first]] = model.classify(images[0], top=1)
    print(f"The first is a {labels[0]}; the model says {first.label} ({first.probability:.1%})")

    recipe = train.recipe("finetune-digits", image_size=48)
    print(f"Fine-tuning at 48 px, the official way (fresh zero head, SGD), {recipe.steps} steps:")
    models = {
        "Keras, 32 px": model,
        "48 px, position embeddings interpolated": zoo.load(NAME, image_size=48),
        "48 px, fine-tuned": train.run(recipe, model=NAME, data="digits", out=out / "finetuned").model,
    }
    for name, each in models.items():
        print(f"{name}: {train.evaluate(each, 'digits', progress=False)}")

    paths = [
        export.saved_model(model, out / "1").path,
        export.tflite(model, out / "digits.tflite", progress=True).path,
    ]
    exports = [export.verify(model, path, images) for path in paths]
    print(*exports, sep="\n")

    classes = model.predict_on_batch(model.preprocess(images)).argmax(axis=1)
    shown = [(labels == number).argmax() for number in range(10)]  # the first image of each class
    shown.append((classes != labels).argmax())  # and the first that the model gets wrong
    page = visualize.report(
        model,
        images[shown],
        out / "report.html",
        title=NAME,
        top=3,
        card=zoo.card(NAME),
        exports=exports,
        progress=True,
    )
    print(f"The exported files are in {out}/, the fine-tuned model and its log in {out}/finetuned/")
    print(f"Report: {page}")
    return page
