"""Measure a cold start in new processes: imports, `zoo.load("digits")`, and the first classified image.

python benchmarks/start_up.py > benchmarks/results/start_up.txt
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout

STEPS = {
    "import tensorflow, keras": "import tensorflow, keras",
    "import keras_vit": "import keras_vit; import numpy",
    'model = zoo.load("digits")': 'model = keras_vit.zoo.load("digits")',
    "model.classify(image)": "model.classify(numpy.zeros((8, 8, 3), numpy.uint8))",
    "model.classify(image), again": "model.classify(numpy.zeros((8, 8, 3), numpy.uint8))",
}
OTHERS = next(iter(STEPS))  # the step that is not ours
COLD = list(STEPS)[:-1]
PROFILE = f"""
import cProfile, pstats
{STEPS[OTHERS]}
profile = cProfile.Profile()
profile.run({"; ".join(STEPS[step] for step in COLD[1:])!r})
pstats.Stats(profile).sort_stats("tottime").print_stats(0.02)
"""
MODULE = re.compile(r"import time:\s*(\d+) \|\s*\d+ \|\s*(\S+)")
FUNCTION = re.compile(r"\s*[\d/]+\s+([\d.]+)\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+(.*)")


def child() -> None:
    """Run the steps in this process; print the seconds and processor seconds of each."""
    import time

    scope: dict[str, object] = {}
    times = {}
    for name, code in STEPS.items():
        start, worked = time.perf_counter(), time.process_time()
        exec(code, scope)
        times[name] = time.perf_counter() - start, time.process_time() - worked
    print(json.dumps(times))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process with this checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)


def imports() -> dict[str, float]:
    """Return the milliseconds that Python spends in each package's own modules, for the cold steps."""
    code = "; ".join(STEPS[step] for step in COLD)
    spent: dict[str, float] = {}
    for microseconds, module in MODULE.findall(python("-X", "importtime", "-c", code).stderr):
        package = module.partition(".")[0]
        spent[package] = spent.get(package, 0) + int(microseconds) / 1000
    return spent


def packages() -> dict[str, float]:
    """Return the milliseconds in each package's own functions after the imports of TensorFlow and Keras."""
    spent: dict[str, float] = {}
    for seconds, place in FUNCTION.findall(python("-c", PROFILE.replace("0.02", "1.0")).stdout):
        known = re.search(r"site-packages/(\w+)|/(keras_vit)/", place)
        package = (known[1] or known[2]) if known else "Python"
        spent[package] = spent.get(package, 0) + 1000 * float(seconds)
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child()
    from serving import machine

    rows = [json.loads(python(__file__, "--child").stdout.splitlines()[-1]) for _ in range(options.rounds + 1)][1:]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("tensorflow", "keras"))
    print(f"Cold start in new processes: medians of {options.rounds}, files in the page cache")
    print(f"{machine()}\nPython {platform.python_version()}, {versions}\n\n{'':32}{'s':>8}{'CPU s':>8}")
    middle = {step: [statistics.median(row[step][i] for row in rows) for i in (0, 1)] for step in STEPS}
    for step, (seconds, worked) in middle.items():
        print(f"{step:32}{seconds:8.2f}{worked:8.2f}")
    total, ours = (sum(middle[step][0] for step in steps) for steps in (COLD, COLD[1:]))
    print(
        f"\nup to the first answer {total:.2f} s, of which {ours:.2f} s ({ours / total:.0%}) after TensorFlow and Keras"
    )
    print(f"(target: less than half, {'met' if ours < total / 2 else 'missed'})\n")
    for title, spent in (
        ("ms in the modules of a package when they are imported (python -X importtime):", imports()),
        ("ms in the functions of a package after these imports (cProfile, which doubles them):", packages()),
    ):
        print(title)
        for package, milliseconds in sorted(spent.items(), key=lambda row: -row[1])[:10]:
            print(f"  {package:30}{milliseconds:8.0f}")
    return None


if __name__ == "__main__":
    main()
