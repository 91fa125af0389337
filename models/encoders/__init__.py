"""Encoders of pictures, as ``mmproj`` files have them: a family a file, over `localllm.models.encoders.encoder`."""
