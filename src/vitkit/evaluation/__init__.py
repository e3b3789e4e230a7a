"""Evaluation of models: metrics, protocols, few-shot, features, comparison and leaderboard."""
