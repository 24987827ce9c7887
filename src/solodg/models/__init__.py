"""Networks that turn images into features: backbones by name, image norm, extractors."""
