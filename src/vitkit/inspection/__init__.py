"""Inspection of models: attention maps, attention distance, learned features and layer analysis."""

from vitkit.inspection.attention import attention_distance, deletion_curve, head_maps, relevance, rollout
from vitkit.inspection.features import (
    feature_colors,
    filter_components,
    layer_predictions,
    layer_similarity,
    patch_similarity,
    position_similarity,
    reconstruction,
    token_norms,
)

__all__ = [
    "attention_distance",
    "deletion_curve",
    "feature_colors",
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
