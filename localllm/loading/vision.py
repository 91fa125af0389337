"""The former name of `localllm.loading.media_encoder`, for programs that import it."""

from localllm.loading.media_encoder import MediaEncoder as VisionEncoder

__all__ = ["VisionEncoder"]
