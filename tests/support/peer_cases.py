"""Cases for timm and transformers: arguments of their models and of ours, by what is special about them."""

from __future__ import annotations

from typing import Any

from tiny_models import VARIANTS

# float32 leaves 1e-6 of the largest output on two blocks; the smallest difference between two GELUs is 1e-4.
TOLERANCE = 1e-5

# ---- of timm.create_model
ARGS: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "num_classes": 5,
}
HYBRID = {"img_size": 64, "patch_size": 1, "depth": 1}
BASE, DEIT = "vit_base_patch16_224", "deit_tiny_distilled_patch16_224"
BEIT3, EVA_CLIP, AIMV2 = "beit3_base_patch16_224", "eva02_base_patch16_clip_224", "aimv2_large_patch14_224"
BEIT, RELPOS, CLS = "beit_base_patch16_224", "vit_relpos_base_patch16_224", "vit_relpos_base_patch16_cls_224"
SHARED_BIAS = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "token": (BASE, {}),
    "distilled": (DEIT, {}),
    "distilled headless": (DEIT, {"num_classes": 0}),
    "attention pooling": (BASE, {"class_token": False, "global_pool": "map"}),
    "attention pooling beside tokens": (BASE, {"global_pool": "map", "reg_tokens": 2}),
    "attention pooling, another activation": (BASE, {"class_token": False, "global_pool": "map", "act_layer": "relu"}),
    "mean beside a class token": (BASE, {"global_pool": "avg"}),
    "mean, norm before": (BASE, {"global_pool": "avg", "fc_norm": False}),
    "mean, no class token": (BASE, {"global_pool": "avg", "class_token": False}),
    "token, norm behind": (BASE, {"fc_norm": True}),
    "registers": (BASE, {"reg_tokens": 3}),
    "registers without positions": (BASE, {"reg_tokens": 3, "no_embed_class": True}),
    "registers alone": (BASE, {"reg_tokens": 3, "class_token": False, "global_pool": "avg"}),
    "class token without position": (BASE, {"no_embed_class": True}),
    "quick GELU": (BASE, {"act_layer": "quick_gelu"}),
    "tanh GELU": (BASE, {"act_layer": "gelu_tanh"}),
    "relu": (BASE, {"act_layer": "relu"}),
    "silu": (BASE, {"act_layer": "silu"}),
    "pre-norm": (BASE, {"pre_norm": True}),
    "LayerScale": (BASE, {"init_values": 1e-3}),
    "LayerScale from zero": (BASE, {"init_values": 0.0}),
    "no qkv bias": (BASE, {"qkv_bias": False}),
    "wide image": (BASE, {"img_size": (16, 48)}),
    "wide patch": (BASE, {"patch_size": (8, 16)}),
    "grey": (BASE, {"in_chans": 1}),
    "headless": (BASE, {"num_classes": 0}),
    "headless mean": (BASE, {"num_classes": 0, "global_pool": "avg"}),
    "every token": (BASE, {"global_pool": ""}),
    "no positions": (BASE, {"pos_embed": "none"}),
    "dropout": (BASE, {"drop_path_rate": 0.1, "pos_drop_rate": 0.1, "weight_init": "jax", "dynamic_img_size": True}),
    "CLIP": ("vit_base_patch16_clip_224", {}),
    "CLIP with quick GELU": ("vit_base_patch16_clip_quickgelu_224", {}),
    "R+Ti/16": ("vit_tiny_r_s16_p8_224", {**HYBRID, "patch_size": 2}),
    "R26": ("vit_small_r26_s32_224", HYBRID),
    "R50": ("vit_base_r50_s16_224", HYBRID),
    "BEiT": (BEIT, {"img_size": (16, 48)}),
    "BEiT of one table": (BEIT, {**SHARED_BIAS, "global_pool": "token", "use_fc_norm": False, "init_values": None}),
    "BEiT with positions": (BEIT, {"use_abs_pos_emb": True, "qkv_bias": False, "num_classes": 0}),
    "relative biases of MLPs": (RELPOS, {"img_size": (16, 48)}),
    "relative biases of one MLP": (RELPOS, {"shared_rel_pos": True, "rel_pos_dim": 16, "fc_norm": False}),
    "relative biases of MLPs, class token": (CLS, {"rel_pos_dim": 16, "qkv_bias": True}),
    "relative biases of tables": (CLS, {"rel_pos_type": "bias", "global_pool": "avg"}),
    "relative biases of one table": (RELPOS, {"rel_pos_type": "bias", "shared_rel_pos": True}),
    "learned rotary positions": ("vit_small_patch16_rope_mixed_224", {"img_size": (16, 48)}),
    "learned rotary positions and others": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "BEiT-3": (BEIT3, {"img_size": (16, 48)}),
    "headless BEiT-3": (BEIT3, {"num_classes": 0, "scale_mlp_norm": False}),
    "EVA-02 CLIP": (EVA_CLIP, {"img_size": (16, 48), "mlp_ratio": 1.5}),
    "AIMv2": (AIMV2, {"img_size": (16, 48), "in_chans": 3}),
    "AIMv2, class token and registers": (AIMV2, {"class_token": True, "reg_tokens": 2, "qkv_bias": True}),
    "grey hybrid": ("vit_tiny_r_s16_p8_224", {**HYBRID, "patch_size": 2, "in_chans": 1}),
}

# Entry points that are refused by name: their tensors look like ours.
NOT_READ = ("vit_base_patch16_rpn_224",)
NOT_READ_KINDS = ("eva02_enormous_",)

# ---- of transformers.ViTConfig
HF: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
HIDDEN_ACTS = (
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "gelu_python",
    "quick_gelu",
    "relu",
    "silu",
    "relu6",
    "hardswish",
    "leaky_relu",
    "sigmoid",
)
POOLER_ACTS = ("tanh", "linear", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu")
CLASSIFIER, MODEL = "ViTForImageClassification", "ViTModel"
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (CLASSIFIER, {}),
    "seven classes": (CLASSIFIER, {"num_labels": 7}),
    "labels": (CLASSIFIER, {"id2label": {0: "cat", 1: "dog", 2: "eel"}, "label2id": {"cat": 0, "dog": 1, "eel": 2}}),
    "wide image": (CLASSIFIER, {"image_size": [16, 48]}),
    "wide patch": (CLASSIFIER, {"patch_size": [8, 16]}),
    "grey": (CLASSIFIER, {"num_channels": 1}),
    "no qkv bias": (CLASSIFIER, {"qkv_bias": False}),
    "large epsilon": (CLASSIFIER, {"layer_norm_eps": 1e-2}),
    **{act: (CLASSIFIER, {"hidden_act": act}) for act in HIDDEN_ACTS},
    "pooler": (MODEL, {}),
    "small pooler": (MODEL, {"pooler_output_size": 24}),
    **{f"pooler with {act}": (MODEL, {"pooler_act": act}) for act in POOLER_ACTS},
}

# ---- of our ViTConfig: refused by the words below, or read by theirs with our numbers
ERF: dict[str, Any] = {"activation": "gelu_erf"}
RESNET: dict[str, Any] = {"norm_epsilon": 1e-5, "conv_epsilon": 1e-8, "conv_epsilon_place": "variance"}
OURS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "headless representation": {"num_classes": 0, "representation_size": 24},
    "headless mean": {"num_classes": 0, "classifier": "gap", "class_token": True},
    "mean beside a class token": {"classifier": "gap", "class_token": True},
    "token without position": {"position_prefix": False},
    "no patch bias": {"patch_bias": False},
    "patch bias beside pre-norm": {"pre_norm": True},
    "distilled with registers": {"distilled": True, "num_registers": 2},
    "distilled without positions": {"distilled": True, "position_prefix": False},
    "registers beside a probe": {"classifier": "map", "class_token": True, "num_registers": 2},
    "wide": {"image_size": (16, 48), "patch_size": (8, 16)},
    "token unpooled headless": {"classifier": "token_unpooled", "num_classes": 0},
    "R26": {"resnet": {"num_layers": (2, 2, 2, 2), **RESNET}, "patch_size": 1, "image_size": 64},
    "stem": {"resnet": {"num_layers": (), **RESNET}, "patch_size": 2},
    "CLIP's epsilon": {"norm_epsilon": 1e-5},
    "tanh": {"activation": "tanh"},
}
# Depths and widths that timm's Python code accepts, but that none of its entry points has.
WITHOUT_ENTRY_POINT = ("hybrid", "stem only")
REFUSED_BY_BOTH = {
    **{name: "no place for" for name in VARIANTS if "positions" in name},
    "shared positions": "position_place='shared'",
    "normalized": "normalize_features=True",
}
REFUSED_BY_TIMM = {
    **REFUSED_BY_BOTH,
    "representation": "no place for",
    "headless representation": "no place for",
    "sincos": "position='sincos2d'",
    "patch bias beside pre-norm": "pre_norm=True with patch_bias=True",
    "no patch bias": "pre_norm=False with patch_bias=False",
    "distilled with registers": "no place for",
    "distilled without positions": "distilled=True with position_prefix=False",
}
REFUSED_BY_TRANSFORMERS = {
    **REFUSED_BY_BOTH,
    "hybrid": "no place for",
    "stem only": "no place for",
    "registers": "no place for",
    "distilled": "no place for",
    "layer scale": "no place for",
    "pre-norm": "no place for",
    "map": "no place for",
    "gap": "class_token=False",
    "sincos": "class_token=False",
    "norm after the mean": "final_norm='pooled'",
    "unpooled": "class_token=False",
    "representation": "no place for",
    "no patch bias": "patch_bias=False",
    "patch bias beside pre-norm": "no place for",
    "distilled with registers": "no place for",
    "distilled without positions": "no place for",
    "mean beside a class token": "classifier='gap'",
    "headless mean": "classifier='gap'",
    "token unpooled": "classifier='token_unpooled'",
    "token unpooled headless": "classifier='token_unpooled'",
    "registers beside a probe": "no place for",
    "R26": "no place for",
    "stem": "no place for",
}
