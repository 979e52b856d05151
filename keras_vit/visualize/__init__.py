"""What a model sees: arrays first, in NumPy, and a report of pictures made from them. The arrays need no matplotlib."""

from keras_vit.visualize.attention import attention_distance, attention_maps, attention_rollout, class_attention
from keras_vit.visualize.html_report import report
from keras_vit.visualize.tokens import effective_rank, logit_lens, token_norms
from keras_vit.visualize.weights import embedding_filters, position_similarity

__all__ = [
    "attention_distance",
    "attention_maps",
    "attention_rollout",
    "class_attention",
    "effective_rank",
    "embedding_filters",
    "logit_lens",
    "position_similarity",
    "report",
    "token_norms",
]
