"""Encoder families by ``clip.projector_type``, and `read_encoder`, which builds an encoder from a file's header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from localllm.errors import KernelError, ModelError, UnsupportedArchitectureError, quoted
from localllm.models.config import ModelMetadata
from localllm.models.encoders.encoder import MEANT, EncoderModel
from localllm.models.registry import Conversion
from localllm.models.weights import ModelFile, Weights


@dataclass(frozen=True)
class Projector:
    """A class of a module of this folder, and the checkpoints that can be converted to its files."""

    module: str
    name: str
    models: str
    texts: str  # architectures of the text models for its rows, separated by spaces
    # ``model_type`` in config.json and, after "/", of the encoder's section, or classes, separated by spaces.
    hf_types: str
    kind: str = "image"  # or "audio"
    #: A token whose embedding llama.cpp reads from the encoder's file, and the name of its tensor in the file.
    row: tuple[str, str] | None = None

    @property
    def _module(self) -> Any:
        return import_module(f"localllm.models.encoders.{self.module}")

    @property
    def model(self) -> type[EncoderModel]:
        model_class: type[EncoderModel] = getattr(self._module, self.name)
        return model_class

    @property
    def conversion(self) -> Conversion:
        """Conversion to an mmproj file. Its functions take an `EncoderCheckpoint`. Its names are ends of names."""
        return Conversion.of(self._module, MEANT)


#: By the name in files. A name for images and audio has a second entry with " audio".
PROJECTORS: dict[str, Projector] = {
    "adapter": Projector("siglip", "GlmEdge", "GLM-Edge-V", "chatglm", "glm"),
    "deepseekocr": Projector(
        "deepseek_ocr",
        "DeepSeekOCR",
        "DeepSeek-OCR, Unlimited-OCR",
        "deepseek2-ocr",
        "unlimited_ocr DeepseekOCRForCausalLM UnlimitedOCRForCausalLM",
    ),
    "deepseekocr2": Projector(
        "deepseek_ocr", "DeepSeekOCR2", "DeepSeek-OCR 2", "deepseek2-ocr", "deepseek_ocr2 DeepseekOCR2ForCausalLM"
    ),
    "dots3note_v": Projector("dots_ocr", "Dots3Note", "Dots 3 Note", "dots3note", "dots3_note"),
    "dots_ocr": Projector("dots_ocr", "DotsOCR", "dots.ocr", "qwen2", "dots_ocr"),
    "exaone4_5": Projector("qwen", "Exaone45", "EXAONE 4.5", "exaone4", "exaone4_5"),
    "gemma3": Projector("siglip", "Gemma3", "Gemma 3", "gemma3", "gemma3"),
    "gemma3nv": Projector("gemma3n", "Gemma3n", "Gemma 3n", "gemma3n", "gemma3n"),
    "gemma4v": Projector("gemma4", "Gemma4", "Gemma 4", "gemma4", "gemma4"),
    "gemma4uv": Projector("gemma4", "Gemma4Unified", "Gemma 4 12B", "gemma4", "gemma4_unified"),
    "glm4v": Projector(
        "qwen", "Glm4V", "GLM-4.1V to 4.6V, GLM-OCR", "glm4 glm4moe", "glm4v glm4v_moe glm46v glm_ocr"
    ),
    "glm5v": Projector("glm5", "Glm5V", "GLM-5.3 Flash", "glm5-next", "glm5_next"),
    "granite4_vision": Projector("granite", "Granite4Vision", "Granite 4 Vision", "granite", "granite4_vision"),
    "hunyuanvl": Projector("hunyuan", "HunyuanVL", "HunyuanOCR, HunyuanVL", "hunyuan_vl", "hunyuan_vl"),
    "hunyuanvl4": Projector("hunyuan", "HunyuanVL4", "Hunyuan 4 VL", "hy_v4", "hy_v4_vl"),
    "idefics3": Projector("siglip", "Idefics3", "Idefics 3, SmolVLM", "llama", "idefics3 smolvlm"),
    "internvl": Projector(
        "internvl",
        "InternVL",
        "InternVL 2.5 to 3.5",
        "internlm2 llama qwen2 qwen3 qwen3moe gpt-oss",
        "internvl internvl_chat",
    ),
    "janus_pro": Projector("siglip", "Janus", "Janus-Pro", "llama", "janus"),
    "kimik25": Projector("kimi", "Kimi", "Kimi K2.5 and K2.6", "deepseek2", "kimi_k25"),
    "kimivl": Projector("kimi", "KimiVL", "Kimi-VL", "deepseek2", "kimi_vl"),
    "ldp": Projector("mobilevlm", "MobileVLM", "MobileVLM", "llama", ""),
    "ldpv2": Projector("mobilevlm", "MobileVLMV2", "MobileVLM V2", "llama", ""),
    "lfm2": Projector("siglip", "Lfm2", "LFM2-VL, LFM2.5-VL", "lfm2 lfm2moe", "lfm2_vl"),
    "lightonocr": Projector("pixtral", "LightOnOCR", "LightOnOCR", "qwen3", "lighton_ocr"),
    "llama4": Projector("llama4", "Llama4", "Llama 4", "llama4", "llama4"),
    "mimovl": Projector("mimo", "MiMoVL", "MiMo V2.5", "mimo2", "mimo_v2"),
    "minicpmv4_6": Projector("minicpm", "MiniCPMV", "MiniCPM-V 4.6", "qwen35", "minicpmv4_6"),
    "minimax_m3": Projector("minimax", "MiniMaxM3", "MiniMax-M3", "minimax-m3", "minimax_m3_vl"),
    "mlp": Projector("clip", "Llava", "LLaVA 1.5 and 1.6, Yi-VL", "llama qwen2", "llava llava_next"),
    "muse-glimmer": Projector("muse_glimmer", "MuseGlimmer", "Muse Glimmer", "muse-glimmer", "muse_glimmer"),
    "nemotron_v2_vl": Projector("nemotron", "NemotronVL", "Nemotron Nano 2 VL", "nemotron_h", "NemotronH_Nano_VL_V2"),
    "paddleocr": Projector("paddleocr", "PaddleOCR", "PaddleOCR-VL", "paddleocr", "paddleocr_vl"),
    "phi4": Projector("siglip", "Phi4", "Phi-4 reasoning vision", "phi3", "phi4-siglip"),
    "pixtral": Projector(
        "pixtral",
        "Pixtral",
        "Pixtral, Mistral Small 3.1, Ministral 3",
        "llama mistral3 mistral4",
        "llava/pixtral mistral3",
        row=("[IMG_BREAK]", "v.token_embd.img_break"),
    ),
    "qwen2.5vl_merger": Projector("qwen", "Qwen25VL", "Qwen 2.5-VL", "qwen2vl", "qwen2_5_vl"),
    "qwen2.5o": Projector("qwen", "Qwen25Omni", "Qwen 2.5-Omni", "qwen2vl", "qwen2_5_omni"),
    "qwen2vl_merger": Projector("qwen", "Qwen2VL", "Qwen 2-VL", "qwen2vl", "qwen2_vl"),
    "qwen3vl_merger": Projector(
        "qwen",
        "Qwen3VL",
        "Qwen 3-VL, Qwen 3 Omni, Qwen 3.5 and 3.6",
        "qwen3vl qwen3vlmoe qwen35 qwen35moe",
        "qwen3_vl qwen3_vl_moe qwen3_omni_moe qwen3_5 qwen3_5_moe",
    ),
    "resampler": Projector(
        "resampler", "Resampler", "MiniCPM-V 2.5 to 4.5, MiniCPM-o", "llama qwen2 qwen3", "minicpmv minicpmo"
    ),
    "step3vl": Projector("step3vl", "Step3VL", "Step 3.7 Flash", "step35", "step3p7"),
    "youtuvl": Projector("youtu", "YoutuVL", "Youtu-VL", "deepseek2", "youtu_vl"),
    "dots3note_a": Projector("dots_sound", "Dots3NoteSound", "Dots 3 Note", "dots3note", "dots3_note", kind="audio"),
    "gemma3na": Projector("gemma3n_sound", "Gemma3nSound", "Gemma 3n", "gemma3n", "gemma3n", kind="audio"),
    "gemma4a": Projector("gemma4_sound", "Gemma4Sound", "Gemma 4", "gemma4", "gemma4", kind="audio"),
    "gemma4ua": Projector(
        "gemma4_sound", "Gemma4UnifiedSound", "Gemma 4 12B", "gemma4", "gemma4_unified", kind="audio"
    ),
    "glma": Projector("whisper", "GlmASR", "GLM-ASR", "llama", "glmasr", kind="audio"),
    "granite_speech": Projector(
        "granite_speech",
        "GraniteSpeech",
        "Granite Speech",
        "granite",
        "granite_speech granite_speech_plus",
        kind="audio",
    ),
    "meralion": Projector("whisper", "MERaLiON", "MERaLiON 2", "gemma2", "meralion2", kind="audio"),
    "musicflamingo": Projector(
        "whisper", "AudioFlamingo", "Audio Flamingo 3", "qwen2", "audioflamingo3", kind="audio"
    ),
    "musicflamingo_rote": Projector(
        "whisper", "MusicFlamingo", "Music Flamingo", "qwen2", "musicflamingo", kind="audio"
    ),
    "parakeet": Projector(
        "parakeet",
        "Parakeet",
        "Nemotron Nano VL with audio",
        "nemotron_h nemotron_h_moe",
        "NemotronH_Nano_VL_V2",
        kind="audio",
    ),
    "qwen2.5o audio": Projector(
        "whisper", "Qwen25OmniSound", "Qwen 2.5-Omni", "qwen2vl", "qwen2_5_omni", kind="audio"
    ),
    "qwen2a": Projector("whisper", "Qwen2Audio", "Qwen 2-Audio", "qwen2", "qwen2_audio", kind="audio"),
    "qwen3a": Projector(
        "qwen3a",
        "Qwen3Sound",
        "Qwen 3 ASR, Qwen 3 Omni",
        "qwen3 qwen3vl qwen3vlmoe",
        "qwen3_asr qwen3_omni_moe",
        kind="audio",
    ),
    "ultravox": Projector("whisper", "Ultravox", "Ultravox 0.5", "llama qwen3 gemma3", "ultravox", kind="audio"),
    "voxtral": Projector("whisper", "Voxtral", "Voxtral", "llama", "voxtral", kind="audio"),
}

#: Keys that do not change the output.
_HARMLESS = (
    "has_vision_encoder", "has_audio_encoder", "projector_type", "vision.projector_type", "audio.projector_type",
    "vision.feed_forward_length",
)  # fmt: skip


def projectors_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the supported projectors in a file's keys, by the encoded kind: "image" or "audio".

    Raises ModelError if the file is not an mmproj file, or UnsupportedArchitectureError if no projector is supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "clip":
        raise ModelError(
            f"the file has the architecture {quoted(architecture)}, not an image encoder: use an mmproj file"
        )
    keys = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")
    names = [str(metadata[key]) for key in keys if metadata.get(key) is not None]
    if not names:
        raise ModelError("the mmproj file has no encoder of images or audio")
    names += [f"{name} audio" for name in names if metadata.get("clip.has_audio_encoder") is True]
    projectors = {PROJECTORS[name].kind: name for name in names if name in PROJECTORS}
    if not projectors:
        raise UnsupportedArchitectureError(
            f"the projector {quoted(names[0])} of the mmproj file is not supported; localllm supports "
            f"{', '.join(PROJECTORS)}"
        )
    return projectors


def read_encoder(file: ModelFile, kind: str | None = None) -> EncoderModel:
    """Return the encoder of images or of audio in an ``mmproj`` file, by default the first one.

    Only the header and small tables are read. Raises the same errors as `projectors_of`.
    """
    projectors = projectors_of(file.metadata)
    kind = next(iter(projectors)) if kind is None else kind
    meta, weights = ModelMetadata(file.metadata, "clip"), Weights(file)
    hears = kind == "audio"
    weights.skip(*(name for name in file.tensors if name.startswith(("a.", "mm.a.")) != hears))
    ignored_prefix = "clip.vision." if hears else "clip.audio."
    meta.skip(*_HARMLESS, *(["use_gelu", "use_silu"] if hears else []))
    meta.skip(*(key.removeprefix("clip.") for key in file.metadata if key.startswith(ignored_prefix)))
    try:
        model = PROJECTORS[projectors[kind]].model(meta, weights)
    except KernelError as error:
        raise ModelError(f"{error}: the hyper-parameters contradict each other") from error
    meta.check_all_read(file.tensors)
    weights.check_all_used()
    return model
