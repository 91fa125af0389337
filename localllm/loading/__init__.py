"""From a file to a model that runs: placement on devices, adapters, the encoder of pictures."""
