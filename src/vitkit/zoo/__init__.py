"""Model zoo: variants, pretrained weights, FLOPs and memory."""
