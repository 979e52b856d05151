"""Micro-batches are chosen by the plan and the memory; a step that does not fit is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from keras_vit import ViTConfig
from keras_vit.train._recipe import Recipe, recipe
from keras_vit.train.measure import memory
from keras_vit.train.measure.memory import check_memory, device_memory, fewest_micro_batches, free_memory, plan_step

GIB = 2**30
CONFIG = ViTConfig.from_name("B/16", image_size=384)


def finetune(**changes: Any) -> Recipe:
    return recipe("finetune", **changes)


def test_the_fewest_micro_batches_that_fit() -> None:
    cases = [(20, 1, {}), (20, 8, {}), (5, 1, {"remat": True}), (9, 1, {"batch_size": 30})]
    for gib, replicas, changes in cases:
        chosen = recipe("finetune", **changes)
        number = fewest_micro_batches(chosen, CONFIG, replicas=replicas, memory=gib * GIB)
        numbers = [n for n in range(1, number + 1) if chosen.batch_size // replicas % n == 0]
        plans = {n: plan_step(chosen.replace(accumulation=n), CONFIG, replicas=replicas) for n in numbers}
        limit = memory.CHOSEN_SHARE * gib * GIB
        assert plans.pop(number).total <= limit
        assert all(planned.total + memory.WAITING_BATCHES * planned.images > limit for planned in plans.values())
    # The first command of the readme
    numbers = [fewest_micro_batches(finetune(), CONFIG, replicas=1, memory=gib * GIB) for gib in (8, 16, 40, 140)]
    assert numbers == [128, 64, 16, 4]
    assert fewest_micro_batches(finetune(), CONFIG, replicas=1, memory=None) == 1


def test_one_image_that_does_not_fit_is_refused_with_figures_and_remedies() -> None:
    with pytest.raises(ValueError, match=r"one image at once of 384x384 pixels needs about 2.74 GiB .* 1.00 GiB"):
        fewest_micro_batches(finetune(), CONFIG, replicas=1, memory=GIB)
    # The plan of a recipe that freezes variables is an upper bound.
    assert fewest_micro_batches(finetune(freeze=["block_*"]), CONFIG, replicas=1, memory=GIB) == 512
    assert memory.evaluation_batch(finetune(accumulation=8), CONFIG, replicas=1) == 64
    assert memory.evaluation_batch(finetune(accumulation=512), CONFIG, replicas=1) < 32


def test_a_stated_number_is_refused_beyond_the_error_of_plans_and_warned_of_within() -> None:
    chosen = finetune(accumulation=8)
    planned = plan_step(chosen, CONFIG, replicas=1)
    with pytest.raises(ValueError, match=r"batch of 512 with accumulation=8 .*50\.\d GiB .*accumulation='auto'"):
        check_memory(chosen, planned, memory=int(planned.total / 1.4))
    with pytest.warns(UserWarning, match="^keras_vit: A batch of 512 with accumulation=8"):
        check_memory(chosen, planned, memory=int(planned.total / 1.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(chosen, planned, memory=planned.total)
        check_memory(chosen, planned, memory=None)


# Text of files of a machine -> the bytes that are free
MACHINES: list[tuple[dict[str, str], int | None]] = [
    ({}, None),
    ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n", "proc/self/cgroup": ""}, 2048 * 1024),
    (  # cgroup 2: the smallest room of the group and those above; the page cache can be taken back
        {
            "proc/meminfo": "MemAvailable: 9000 kB\n",
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "5000\n",
            "sys/fs/cgroup/pod/box/memory.stat": "anon 1\ninactive_file 7\n",
            "sys/fs/cgroup/pod/memory.max": "9000\n",
            "sys/fs/cgroup/pod/memory.current": "5000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 7\n",
        },
        4007,
    ),
    (  # cgroup 1; the path is that of the host, and the container sees its own group at the top
        {
            "proc/meminfo": "MemAvailable: 9000 kB\n",
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
        },
        1001,
    ),
]


def test_free_memory_respects_the_container(tmp_path: Path) -> None:
    for number, (files, expected) in enumerate(MACHINES):
        for name, text in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert free_memory(tmp_path / str(number)) == expected


def test_the_variable_states_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_MEMORY", "1.5")
    assert device_memory(2) == 1.5 * GIB
    for wrong in ("0", "12GB", "-1", "nan"):
        monkeypatch.setenv("KERAS_VIT_MEMORY", wrong)
        with pytest.raises(ValueError, match="KERAS_VIT_MEMORY is a number of GiB above 0, such as 12. Received: "):
            device_memory(1)
    monkeypatch.delenv("KERAS_VIT_MEMORY")
    assert 0 < (device_memory(2) or 0) <= 0.6 * (device_memory(1) or 0)
