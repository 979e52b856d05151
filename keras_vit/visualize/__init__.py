"""Compute NumPy arrays that show what a model has learned and attends to, and write an HTML report of them.

The public names are imported on first use. Only the report needs matplotlib.
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.visualize.attention import attention_distance, attention_maps, attention_rollout, class_attention
    from keras_vit.visualize.report_page import report
    from keras_vit.visualize.tokens import effective_rank, logit_lens, patch_components, token_norms
    from keras_vit.visualize.weights import embedding_filters, position_similarity

_NAMES = {
    "attention": ("attention_distance", "attention_maps", "attention_rollout", "class_attention"),
    "report_page": ("report",),
    "tokens": ("effective_rank", "logit_lens", "patch_components", "token_norms"),
    "weights": ("embedding_filters", "position_similarity"),
}

__all__ = [
    "attention_distance",
    "attention_maps",
    "attention_rollout",
    "class_attention",
    "effective_rank",
    "embedding_filters",
    "logit_lens",
    "patch_components",
    "position_similarity",
    "report",
    "token_norms",
]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
