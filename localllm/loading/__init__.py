"""Load a model from a file: placement on devices, adapters, and the image and audio encoders."""
