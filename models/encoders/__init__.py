"""Encoders of images and audio in mmproj files. Each family is a module, based on `encoder.EncoderModel`."""
