"""What a model looks at, what it has learnt and how it gets there: images go in, documented tensors come out."""

from vitkit.inspection.attention import head_maps, relevance, rollout
from vitkit.inspection.deletion import deletion_curve
from vitkit.inspection.distance import attention_distance
from vitkit.inspection.embeddings import filter_components, position_similarity
from vitkit.inspection.features import feature_colours, patch_similarity, token_norms
from vitkit.inspection.layers import layer_predictions, layer_similarity
from vitkit.inspection.reconstruction import reconstruction

__all__ = [
    "attention_distance",
    "deletion_curve",
    "feature_colours",
    "filter_components",
    "head_maps",
    "layer_predictions",
    "layer_similarity",
    "patch_similarity",
    "position_similarity",
    "reconstruction",
    "relevance",
    "rollout",
    "token_norms",
]
