"""The exact number of parameters of every official model, as in the published files; test_plan.py compares them."""

from keras_vit.model.config import SIZES, ViTConfig
from keras_vit.model.cost import count

# name: with 1000 classes at 224 pixels, without the head, with 1000 classes at 384 pixels
OFFICIAL = {
    "ViT-Ti_16": (5_717_416, 5_524_416, 5_790_376),
    "ViT-S_32": (22_878_952, 22_493_952, 22_915_432),
    "ViT-S_16": (22_050_664, 21_665_664, 22_196_584),
    "ViT-B_32": (88_224_232, 87_455_232, 88_297_192),
    "ViT-B_16": (86_567_656, 85_798_656, 86_859_496),
    "ViT-B_8": (86_576_872, 85_807_872, 87_744_232),
    "ViT-L_32": (306_535_400, 305_510_400, 306_632_680),
    "ViT-L_16": (304_326_632, 303_301_632, 304_715_752),
    "ViT-H_14": (632_045_800, 630_764_800, 632_651_240),
    "R+ViT-Ti_16": (6_337_704, 6_144_704, 6_355_944),
    "R26+ViT-S_32": (36_431_912, 36_046_912, 36_468_392),
    "R26+ViT-B_32": (101_383_976, 100_614_976, 101_456_936),
    "R50+ViT-B_16": (98_659_112, 97_890_112, 98_950_952),
    "R50+ViT-L_32": (328_994_856, 327_969_856, 329_092_136),
}
GSAM = {"ViT-S_16": 22_049_896, "ViT-B_16": 86_566_120, "ViT-S_32": 22_878_184, "ViT-B_32": 88_222_696}


def test_a_big_vision_size_has_the_sum_of_its_matrices() -> None:
    for size, (hidden, mlp, _, _) in SIZES.items():
        attention, norms = 4 * hidden * (hidden + 1), 3 * 2 * hidden
        perceptron = (hidden + 1) * mlp + (mlp + 1) * hidden
        patches, class_token, positions = (16 * 16 * 3 + 1) * hidden, hidden, 5 * hidden
        config = ViTConfig.from_name(f"{size}/16", image_size=32, num_classes=0, num_layers=1)
        assert count(config).parameters == attention + norms + perceptron + patches + class_token + positions, size
