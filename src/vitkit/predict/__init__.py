"""A trained model and images go in, labelled probabilities or features come out, a few images or millions."""
