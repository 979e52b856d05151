"""What programs write around a model is taken off and told; several models in a file are chosen from."""

from __future__ import annotations

import collections
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lost_facts
import torch_peers
from keras_vit import converters, dense, text, zoo
from keras_vit.converters.containers import find_weights
from keras_vit.errors import CheckpointError
from model_weights import assert_same_bits, values
from places import DATA
from tiny_models import built

FACTS = {"num_heads": 4, "position_prefix": True}
# Parts of names in memory of transformers 5.24 -> those on disk (of a ViTModel as of a Pixio: PIXIO).
MEMORY = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}
PIXIO = {
    **MEMORY,
    "layers.": "encoder.layer.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Return the tensors of two models in timm's names; all weights of the second are different."""
    path = converters.save(built(activation="gelu_erf"), tmp_path_factory.mktemp("timm") / "x", format="timm")
    tensors = load_file(path)
    return [tensors, {name: value + 1 for name, value in tensors.items()}]


def within(place: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put something before the names of all tensors."""
    return {place + name: value for name, value in tensors.items()}


def loaded(path: Path, tensors: dict[str, np.ndarray], **options: Any) -> tuple[float, str]:
    """Write and load a file; return the first number of its head's bias, and what the warnings say."""
    save_file(tensors, path / "x.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = converters.load(path / "x.safetensors", config=FACTS, **options)
    return float(values(model)["head/bias"][0]), "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize(
    "place",
    ["module.", "_orig_mod.", "student.backbone.", "model.vit.", "module.visual.", "any/thing.", "state_dict/net."],
)
def test_any_prefix_is_taken_off_and_told(place: str, two: Any, tmp_path: Path) -> None:
    one = np.ones(3, np.float32)
    head, said = loaded(tmp_path, {"criterion.weight": one, "queue": one, **within(place, two[0])})
    assert head == two[0]["head.bias"][0]
    assert f"without {place!r}" in said and "which are not read: criterion (1), queue (1)" in said


def test_modules_that_compilers_insert_are_taken_off(two: Any, tmp_path: Path) -> None:
    inserted = {name.replace("blocks.1.", "blocks.1._orig_mod."): value for name, value in two[0].items()}
    assert "'_orig_mod.'" in loaded(tmp_path, inserted)[1]
    sharded = {
        f"module._fsdp_wrapped_module.{name.replace('blocks.0.', 'blocks.0._fsdp_wrapped_module.')}": value
        for name, value in two[0].items()
    }
    head, said = loaded(tmp_path, {**sharded, "criterion.weight": np.ones(3, np.float32)})
    assert head == two[0]["head.bias"][0]
    assert "'module.', '_fsdp_wrapped_module.'" in said and "criterion (1)" in said


@pytest.mark.parametrize(
    "extra", ["model.norm_extra.weight", "model.blocks.1.norm3.weight", "model.blocks.2.norm1.weight", "model.x"]
)
def test_a_tensor_within_the_model_that_is_not_known_is_refused(extra: str, two: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        loaded(tmp_path, {**within("model.", two[0]), extra: np.ones(32, np.float32)})


def test_a_tensor_in_the_layer_of_a_head_is_refused_and_other_parts_are_told(tmp_path: Path) -> None:
    tensors = load_file(DATA / "reference" / "hf_cls_v5" / "model.safetensors")
    one = np.ones(3, np.float32)
    save_file(within("model.", {**tensors, "classifier.gate": one}), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"classifier\.gate is left over"):
        converters.load(tmp_path / "model.safetensors", config=FACTS)
    save_file(within("model.", {**tensors, "decoder.weight": one}), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"which are not read: decoder \(1\)"):
        model = converters.load(tmp_path / "model.safetensors", config=FACTS)
    np.testing.assert_array_equal(values(model)["head/bias"], tensors["classifier.bias"])


def test_an_mae_with_its_decoder_is_read_without_it(two: Any, tmp_path: Path) -> None:
    one = np.ones((1, 1, 16), np.float32)
    decoder = {"mask_token": one, "decoder_pos_embed": one, "decoder_blocks.0.norm1.weight": one}
    assert "decoder_blocks (1), decoder_pos_embed (1)" in loaded(tmp_path, {**two[0], **decoder})[1]


CHOICES: list[tuple[str, str, str | None, int | str]] = [
    # place of the first, place of the second, which; the one that is read, or what the error says
    ("student.backbone.", "teacher.backbone.", None, "2 models under 'student.backbone' and 'teacher.backbone'"),
    ("student.backbone.", "teacher.backbone.", "teacher", 1),
    ("student.backbone.", "teacher.backbone.", "student.backbone", 0),
    ("student.backbone.", "teacher.backbone.", "ema", "no model for which='ema'"),
    ("state_dict/module.", "state_dict_ema/", None, 1),  # as timm's load_state_dict
    ("state_dict/module.", "state_dict_ema/", "raw", 0),
    ("state_dict/module.", "state_dict_ema/", "state_dict", 0),
    ("model/", "model_ema/", "ema", 1),
    ("current_model_state/model.", "state_dict/model.", None, 1),  # as Lightning's WeightAveraging writes it
    ("current_model_state/model.", "state_dict/model.", "ema", 1),
    ("current_model_state/model.", "state_dict/model.", "raw", 0),
    ("model/", "ema/module.", None, "2 models under 'ema/module' and 'model'"),
    ("model/", "ema/module.", "ema", 1),
    ("state_dict/", "ema_state_dict/", "ema", "no model for which='ema'"),  # mmengine has the averages in the first
    ("", "model.", None, "2 models under the top of the file and 'model'"),
]


@pytest.mark.parametrize(("first", "second", "which", "want"), CHOICES)
def test_one_of_several_models_is_chosen(
    first: str, second: str, which: str | None, want: int | str, two: Any, tmp_path: Path
) -> None:
    both = {**within(first, two[0]), **within(second, two[1])}
    if isinstance(want, str):
        with pytest.raises(CheckpointError, match=re.escape(want)):
            loaded(tmp_path, both, which=which)
        return
    head, said = loaded(tmp_path, both, which=which)
    assert head == two[want]["head.bias"][0]
    assert which is not None or "is read, as " in said


def test_every_function_that_loads_takes_which(two: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({**within("student.", two[0]), **within("teacher.", two[1])}, path)
    assert converters.detect(path) == "timm"
    assert converters.read_config(path, config=FACTS, which="teacher").num_layers == 2
    for load in (zoo.load, zoo.text_encoder, text.load, dense.load):
        with pytest.raises(CheckpointError):
            load(path, which="teacher")
    with pytest.raises(ValueError, match=r"which.*'teacher'"):
        zoo.load("ViT-B/16", weights=None, which="teacher")
    built().save(tmp_path / "x.keras")
    with pytest.raises(ValueError, match="which='ema'"):
        zoo.load(tmp_path / "x.keras", which="ema")


def test_a_file_without_a_model_lists_its_keys(tmp_path: Path) -> None:
    save_file({"state_dict/a.b": np.ones(2), "optimizer/x": np.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"by their first key: optimizer/ \(1\), state_dict/ \(1\)"):
        converters.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["last.ckpt", "model_best.pth.tar", "model.pt", "model.pth", "weights.bin"])
def test_a_folder_has_a_file_of_pytorch_by_any_ending(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    (tmp_path / "args.yaml").touch()
    assert find_weights(tmp_path) == tmp_path / name


@pytest.mark.parametrize(
    ("case", "spelled"), [("hf_dinov2", MEMORY), ("hf_dinov2_reg_cls", MEMORY), ("hf_pixio", PIXIO)]
)
def test_names_in_memory_of_transformers_are_read(case: str, spelled: dict[str, str], tmp_path: Path) -> None:
    folder = DATA / "families" / case
    renamed = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for memory, disk in spelled.items():
            name = name.replace(f"{disk}.", f"{memory.removesuffix('.')}.") if disk[-1] != "." else name
            name = name.replace(disk, memory) if disk[-1] == "." else name
        renamed[name] = value
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(renamed, tmp_path / "model.safetensors")
    with warnings.catch_warnings(action="ignore"):
        found, want = converters.load(tmp_path), converters.load(folder)
    assert found.config.replace(preprocessing=want.config.preprocessing) == want.config
    assert_same_bits(values(found), values(want))


def test_a_config_json_of_a_model_around_the_model_states_the_facts_of_its_part() -> None:
    folder = DATA / "dense" / "hf_depth_anything"  # 3 heads and an epsilon of 1e-6, in backbone_config
    with warnings.catch_warnings(action="ignore"):
        found, want = converters.read_config(folder), dense.load(folder).backbone.config
    names = ("num_heads", "norm_epsilon", "activation", "image_size", "patch_size")
    assert [getattr(found, name) for name in names] == [getattr(want, name) for name in names]


@pytest.mark.parametrize(("stated", "factor"), [({}, 6 / 4), ({"use_rslora": True}, 6 / 2)])
def test_lora_inside_of_a_file_is_merged_when_its_scale_is_known(
    stated: dict[str, Any], factor: float, two: Any, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    layer = "blocks.1.mlp.fc1"
    inside = {re.sub(f"^{layer}", f"{layer}.base_layer", name): value for name, value in two[0].items()}
    down, up = random.normal(size=(4, 32)).astype("f4"), random.normal(size=(64, 4)).astype("f4")
    inside |= {f"{layer}.lora_A.default.weight": down, f"{layer}.lora_B.default.weight": up}
    inside = within("base_model.model.", inside)
    with pytest.raises(CheckpointError, match=r"\(LoRA\) inside.*config=\{'lora_alpha': \.\.\.\}"):
        loaded(tmp_path, inside)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = converters.load(tmp_path / "x.safetensors", config={**FACTS, "lora_alpha": 6, **stated})
    want = two[0][f"{layer}.weight"].astype("f8") + factor * up.astype("f8") @ down
    np.testing.assert_allclose(values(model)["block_1/mlp/dense1/kernel"], want.T, rtol=1e-5, atol=1e-5)
    assert any("use_rslora=False is assumed" in str(each.message) for each in caught) == (not stated)
    other = {**inside, f"base_model.model.{layer}.lora_A.second.weight": down}
    save_file(other, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="several adapters of peft"):
        converters.load(tmp_path / "x.safetensors", config={**FACTS, "lora_alpha": 6})


# ---- every reference checkpoint in every wrapper


def outcomes(paths: list[Path], tmp_path: Path) -> tuple[collections.Counter[str], list[str]]:
    """Count what loading wrapped checkpoints gives, and list what is silently wrong, or not what it should be."""
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for number, path in enumerate(paths):
        folder = tmp_path / str(number)
        folder.mkdir()
        for case in lost_facts.wrapped(path):
            found = lost_facts.wrapped_outcome(path, case, folder)
            counts[found.partition(":")[0]] += 1
            wrong += [] if found == case.right else [f"{path.parent.name} {case.name}: {found}, not {case.right}"]
    return counts, wrong


def test_a_wrapped_reference_is_told_asked_for_or_refused(tmp_path: Path) -> None:
    few = [DATA / "families" / "hf_clip_vision" / "model.safetensors"]
    counts, wrong = outcomes(few, tmp_path)
    assert not wrong
    assert min(counts[kind] for kind in ("told", "asked", "refused")) >= 5


@pytest.mark.full
def test_no_wrapped_reference_is_silently_wrong(tmp_path: Path) -> None:
    counts, wrong = outcomes(lost_facts.references(), tmp_path)
    assert not wrong
    assert sum(counts.values()) > 7000
    print(dict(counts))


# ---- files of PyTorch


@pytest.mark.torch
def test_keys_of_nested_dicts_are_found_at_any_depth(two: Any, tmp_path: Path) -> None:
    torch = torch_peers.import_torch()
    first, second = ({name: torch.from_numpy(value) for name, value in tensors.items()} for tensors in two)
    path = tmp_path / "last.ckpt"
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    cyclic: dict[str, Any] = {"net": first}
    cyclic["self"] = cyclic
    for content, which, want in (
        ({"epoch": 3, "run": {"target_encoder": {f"module.{name}": value for name, value in first.items()}}}, None, 0),
        ({"state_dict": first, "state_dict_ema": second, "optimizer": optimizer}, None, 1),
        ({"state_dict": first, "state_dict_ema": second, "optimizer": optimizer}, "raw", 0),
        ({"model": first, "ema": {"module": second}}, "ema", 1),
        (cyclic, None, 0),
    ):
        torch.save(content, path)
        with pytest.warns(UserWarning, match="read without"):
            model = converters.load(tmp_path, config=FACTS, which=which)
        assert values(model)["head/bias"][0] == two[want]["head.bias"][0]
    torch.save({"epoch": 3, "cfg": {"lr": 0.1}}, path)
    with pytest.raises(CheckpointError, match=r"It holds: epoch \(int\), cfg \(dict\)"):
        converters.load(tmp_path)


@pytest.mark.torch
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_memory_of_transformers_and_lora_inside_have_the_outputs_of_pytorch(tmp_path: Path) -> None:
    torch, hf, peft = torch_peers.import_torch(), pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("f4")
    lora: list[Any] = [None, {}, {"use_dora": True}, {"modules_to_save": ["classifier"]}]
    for (kind, fields), options in itertools.product(
        (
            ("ViT", {"intermediate_size": 64}),
            ("Dinov2", {}),
            ("Dinov2", {"use_swiglu_ffn": True}),
            ("Dinov2WithRegisters", {}),
        ),
        lora,
    ):
        config = getattr(hf, f"{kind}Config")(**sizes, **fields, num_labels=3)
        model = torch_peers.randomised(getattr(hf, f"{kind}ForImageClassification")(config))
        config.save_pretrained(tmp_path)
        if options is not None:
            rank = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **options)
            model = peft.get_peft_model(model, rank)
            with torch.no_grad():
                for value in model.parameters():
                    value.add_(torch.randn(value.shape) * 0.3 * value.requires_grad)
        state = {f"net.{name}": value for name, value in model.state_dict().items()}
        torch.save({"state_dict": state}, tmp_path / "x.pt")
        with torch.no_grad():
            want = model.eval()(torch.tensor(images.transpose(0, 3, 1, 2))).logits.numpy()
        got = np.asarray(converters.load(tmp_path, config=None if options is None else {"lora_alpha": 6})(images))
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), (kind, fields, options)
