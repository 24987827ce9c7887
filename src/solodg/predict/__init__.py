"""From an image to its prediction: a run by PyTorch, an exported file by ONNX Runtime."""
