"""vitkit: the Vision Transformer of "An Image is Worth 16x16 Words", whole and exact."""
