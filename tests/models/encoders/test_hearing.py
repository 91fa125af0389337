"""Models that hear compared with transformers: from samples to generated ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm import LLM
from localllm.chat import ChatTemplate
from localllm.chat.conversation import read_messages
from localllm.convert import Checkpoint, MmprojCheckpoint
from localllm.engine.media import MediaTokens, PreparedMedia, PromptMedia
from localllm.loading.devices import open_devices
from localllm.loading.media_encoder import MediaEncoder
from localllm.models.encoders import gemma3n_sound
from localllm.models.encoders.registry import PROJECTORS, read_encoder
from localllm.models.encoders.sounds import RATE, log_mel, mel_filters
from localllm.quantize import plan, run
from tests.helpers.checkpoints import write_tokenizer
from tests.models.encoders.families import (
    FAMILIES as VISION_FAMILIES,
    GEMMA_3N,
    GEMMA_3N_AUDIO,
    GEMMA_3N_TOKENS,
    GEMMA_3N_VISION,
    GEMMA_4,
    MROPE,
    NEMOTRON,
    TEXT,
    mobilenetv5,
    picture,
    processor_of,
    torch,
    transformers,
)
from tests.models.encoders.released import ImageModelConfig, NemotronVL, as_dots3_note, as_qwen_omni, rewrite
from tests.models.encoders.test_seeing import check_logits, loading, logits, messages as image_messages
from tests.models.encoders.test_transformers import encoded

Samples = NDArray[np.float32]
FAMILY = VISION_FAMILIES["gemma4v"]
#: Number of positions in the tiny Whisper-like encoders; an audio chunk has 20 ms per position.
N_POSITIONS = 40
WHISPER = {"num_mel_bins": 80, "max_source_positions": N_POSITIONS}
GREEDY: Any = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def sound(seconds: float, pitch: float = 300.0) -> Samples:
    """Return rising tones with noise."""
    t = np.arange(round(seconds * RATE)) / RATE
    noise = np.random.default_rng(int(pitch)).standard_normal(len(t))
    return (0.4 * np.sin(2 * np.pi * pitch * t * (1 + t)) * (1 + np.cos(9 * t)) / 2 + 0.02 * noise).astype(np.float32)


def mel_of_whisper(samples: Samples, n_mels: int, **options: Any) -> Any:
    """Return the features of transformers' extractor: [n_mels, frames]."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=n_mels)
    given: dict[str, Any] = {"sampling_rate": RATE, "truncation": False, "return_tensors": "pt", **options}
    return extractor(samples, padding="longest", **given)["input_features"][0]


class Voxtral:
    #: Seconds of audio: less than one chunk, and several chunks with an incomplete last one.
    seconds = (0.31, 1.9)

    def __init__(self) -> None:
        audio = WHISPER | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
        text = TEXT | {"model_type": "llama"}
        config = transformers.VoxtralConfig(
            audio_config=audio | {"num_attention_heads": 4}, text_config=text, audio_token_id=7
        )
        self.model = random_model(transformers.VoxtralForConditionalGeneration(config))

    def features(self, samples: Samples) -> Any:
        mel = mel_of_whisper(samples, 80, pad_to_multiple_of=2 * N_POSITIONS * 160)
        return self.model.get_audio_features(mel.reshape(80, -1, 2 * N_POSITIONS).transpose(0, 1)).pooler_output

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class AudioFlamingo:
    """Also the class of Qwen 2-Audio, which has the same encoder."""

    #: Less than a token, an odd number of rows, several chunks, and a last chunk with less than a token.
    seconds = (0.01, 0.335, 1.9, 1.615)
    model_class = transformers.AudioFlamingo3ForConditionalGeneration
    config_class = transformers.AudioFlamingo3Config
    encoder_type = "audioflamingo3_encoder"

    def __init__(self) -> None:
        audio = WHISPER | {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
        audio |= {"model_type": self.encoder_type}
        text = TEXT | {"model_type": "qwen2"}
        self.model = random_model(self.model_class(self.config_class(audio_config=audio, text_config=text)))

    def features(self, samples: Samples) -> Any:
        size = 2 * N_POSITIONS * 160
        samples = np.pad(samples, (0, max(0, 321 - len(samples))))
        pieces = [samples[i : i + size] for i in range(0, len(samples), size)]
        extractor = transformers.WhisperFeatureExtractor(feature_size=80)
        options = {"padding": "max_length", "max_length": size, "return_attention_mask": True, "return_tensors": "pt"}
        seen = extractor(pieces, sampling_rate=RATE, **options)
        return self.of_spectrograms(seen["input_features"], seen["attention_mask"])

    def of_spectrograms(self, mel: Any, mask: Any) -> Any:
        return self.model.get_audio_features(mel, mask).pooler_output

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class MusicFlamingo(AudioFlamingo):
    #: Without a last chunk of less than a token, which transformers' class rejects.
    seconds = (0.01, 0.335, 1.9, 24.3)
    model_class = transformers.MusicFlamingoForConditionalGeneration
    config_class = transformers.MusicFlamingoConfig

    def of_spectrograms(self, mel: Any, mask: Any) -> Any:
        n_tokens = int((mask.sum(1) + 1).div(2, rounding_mode="floor").div(2, rounding_mode="floor").sum())
        ids = torch.full((1, n_tokens), self.model.config.audio_token_id)
        return self.model.get_audio_features(mel, mask, ids).pooler_output


class GlmASR:
    #: Less than a token, a number of rows that is not a multiple of four, and several pieces.
    seconds = (0.01, 0.335, 30.5)

    def __init__(self) -> None:
        audio = {"num_mel_bins": 80, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
        text = TEXT | {"model_type": "llama"}
        config = transformers.GlmAsrConfig(
            audio_config=audio | {"num_attention_heads": 4}, text_config=text, audio_token_id=7
        )
        self.model = random_model(transformers.GlmAsrForConditionalGeneration(config))

    def features(self, samples: Samples) -> Any:
        size = 30 * RATE
        samples = np.pad(samples, (0, max(0, 1280 - len(samples))))
        pieces = [samples[i : i + size] for i in range(0, len(samples), size)]
        extractor = transformers.WhisperFeatureExtractor(feature_size=80)
        options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        seen = extractor(pieces, sampling_rate=RATE, **options)
        return self.model.get_audio_features(seen["input_features"], seen["attention_mask"]).pooler_output

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class Qwen2Audio(AudioFlamingo):
    model_class = transformers.Qwen2AudioForConditionalGeneration
    config_class = transformers.Qwen2AudioConfig
    encoder_type = "qwen2_audio_encoder"

    def of_spectrograms(self, mel: Any, mask: Any) -> Any:
        model, found = self.model.model, []
        for one, n in zip(mel, mask.sum(1), strict=True):
            n_rows = (int(n) + 1) // 2
            sees = torch.zeros(1, 1, N_POSITIONS, N_POSITIONS).masked_fill(torch.arange(N_POSITIONS) >= n_rows, -1e9)
            rows = model.audio_tower(one[None], sees).last_hidden_state
            found.append(model.multi_modal_projector(rows)[0, : n_rows // 2])
        return torch.cat(found)


class Qwen25Omni:
    """The part of transformers' model that reads and writes, as in a checkpoint that also speaks."""

    #: Less than a token, an odd number of rows, and several chunks with an incomplete last one.
    seconds = (0.01, 0.335, 5.13)
    images = "qwen2.5o"

    def __init__(self) -> None:
        audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
        audio |= {"num_mel_bins": 80, "output_dim": 48}
        tokens = {"audio_token_index": 7, "image_token_index": 8, "video_token_index": 9}
        vision = VISION_FAMILIES["qwen2.5o"].settings["vision_config"]
        config = transformers.Qwen2_5OmniThinkerConfig(
            audio_config=audio, text_config=TEXT | MROPE, vision_config=vision, **tokens
        )
        self.model = random_model(transformers.Qwen2_5OmniThinkerForConditionalGeneration(config))

    def features(self, samples: Samples) -> Any:
        samples = np.pad(samples, (0, max(0, 480 - len(samples))))
        seen = transformers.WhisperFeatureExtractor(feature_size=80)(
            samples,
            sampling_rate=RATE,
            padding="longest",
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return self.of_spectrogram(seen["input_features"][0, :, : seen["attention_mask"].sum()])

    def of_spectrogram(self, mel: Any) -> Any:
        return self.model.get_audio_features(mel[None], torch.ones(1, mel.shape[1]).long()).pooler_output

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        processor_of(self.images).save_pretrained(folder)
        as_qwen_omni(folder)


class Qwen3Omni(Qwen25Omni):
    #: Less than a token, an odd number of rows, and more than the eight seconds that a row attends to.
    seconds = (0.01, 0.335, 9.43)
    images = "qwen3vl_merger omni"

    def __init__(self) -> None:
        family = VISION_FAMILIES[self.images].settings
        audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
        audio |= {"downsample_hidden_size": 8, "output_dim": 48, "num_mel_bins": 80}
        tokens = {"audio_token_id": 7, "image_token_id": 8, "video_token_id": 9}
        config = transformers.Qwen3OmniMoeThinkerConfig(**family | {"audio_config": audio}, **tokens)
        self.model = random_model(transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config))

    def of_spectrogram(self, mel: Any) -> Any:
        """Encode next to one second of silence, because transformers pads chunks to the longest one in a batch."""
        n = mel.shape[1]
        both, mask = torch.zeros(2, 80, max(n, 100)), torch.zeros(2, max(n, 100))
        both[0, :, :n], mask[0, :n], mask[1, :100] = mel, 1, 1
        return self.model.get_audio_features(both, mask.long()).pooler_output[:-13]


class MERaLiON:
    """Whisper's encoder, an adapter, and Gemma 2; transformers lacks this model."""

    seconds = (0.31, 1.9)

    def __init__(self) -> None:
        self.config = transformers.WhisperConfig(
            **WHISPER,
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_attention_heads=4,
        )
        text = TEXT | {"query_pre_attn_scalar": 12, "sliding_window": 64}
        self.model = random_model(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**text)))
        parts = {"mlp_adapter.0": (5 * 64, 80), "gate_proj": (80, 80), "pool_proj": (80, 80), "out_proj": (80, 48)}
        self.parts = {name: random_model(torch.nn.Linear(*sizes)) for name, sizes in parts.items()}
        self.encoder = random_model(transformers.WhisperModel(self.config).encoder)
        self.norm = random_model(torch.nn.LayerNorm(64))

    def features(self, samples: Samples) -> Any:
        mel = mel_of_whisper(samples, 80, pad_to_multiple_of=2 * N_POSITIONS * 160)
        x = self.encoder(mel.reshape(80, -1, 2 * N_POSITIONS).transpose(0, 1)).last_hidden_state
        x = self.parts["mlp_adapter.0"](self.norm(x).reshape(-1, 5 * 64))
        silu = torch.nn.functional.silu
        x = silu(x)
        return self.parts["out_proj"](silu(self.parts["gate_proj"](x)) * self.parts["pool_proj"](x))

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {f"text_decoder.{k}": v for k, v in self.model.state_dict().items() if k != "lm_head.weight"}
        tensors |= {f"speech_encoder.{k}": v for k, v in self.encoder.state_dict().items()}
        tensors |= {f"ln_speech.{k}": v for k, v in self.norm.state_dict().items()}
        for name, part in self.parts.items():
            tensors |= {f"speech_audio_adapter.{name}.{k}": v for k, v in part.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        values = {"model_type": "meralion2", "speech_config": self.config.to_dict(), "speech_mlp_scale_factor": 5}
        values |= {"text_config": self.model.config.to_dict(), "architectures": ["MERaLiON2ForConditionalGeneration"]}
        (folder / "config.json").write_text(json.dumps(values | {"speech_token_index": 7}))


class Ultravox:
    """Whisper's encoder, a projector, and a Llama-like model; transformers lacks this model."""

    seconds = (0.01, 1.95)

    def __init__(self) -> None:
        config = transformers.WhisperConfig(
            **WHISPER,
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_attention_heads=4,
        )
        self.model = random_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)))
        self.encoder = random_model(transformers.WhisperModel(config).encoder)
        self.projector = random_model(
            torch.nn.ModuleDict(
                {
                    "ln_pre": torch.nn.RMSNorm(8 * 64, eps=1e-6),
                    "linear_1": torch.nn.Linear(8 * 64, 96, bias=False),
                    "ln_mid": torch.nn.RMSNorm(48, eps=1e-6),
                    "linear_2": torch.nn.Linear(48, 48, bias=False),
                }
            )
        )

    def features(self, samples: Samples) -> Any:
        samples = np.pad(samples, (0, max(0, 320 - len(samples))))
        mel = mel_of_whisper(samples, 80, pad_to_multiple_of=160)
        found = []
        for part in mel.split(2 * N_POSITIONS, dim=1):
            x = torch.nn.functional.gelu(self.encoder.conv1(part[None]))
            x = torch.nn.functional.gelu(self.encoder.conv2(x)).transpose(1, 2)
            x = x + self.encoder.embed_positions.weight[: x.shape[1]]
            for layer in self.encoder.layers:
                x = layer(x, None)
                x = x[0] if isinstance(x, tuple) else x
            x = self.encoder.layer_norm(x)[0]
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 8)).reshape(-1, 8 * 64)
            x = self.projector["linear_1"](self.projector["ln_pre"](x))
            up, gate = x.chunk(2, dim=-1)
            x = self.projector["ln_mid"](up * torch.nn.functional.silu(gate))
            found.append(self.projector["linear_2"](x))
        return torch.cat(found)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        self.model.save_pretrained(folder)
        tensors = {f"audio_tower.{k}": v for k, v in self.encoder.state_dict().items()}
        tensors |= {f"multi_modal_projector.{k}": v for k, v in self.projector.state_dict().items()}
        (folder / "ultravox").mkdir()
        save_file(tensors, folder / "ultravox" / "model.safetensors")
        values = {"model_type": "ultravox", "audio_config": self.encoder.config.to_dict(), "stack_factor": 8}
        values |= {"text_config": {"hidden_size": 48}, "hidden_size": 96, "projector_act": "swiglu"}
        (folder / "ultravox" / "config.json").write_text(json.dumps(values))


class Qwen3ASR:
    #: Less than half a second, and more than the eight that a row attends to.
    seconds = (0.2, 9.43)

    def __init__(self) -> None:
        audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
        audio |= {"downsample_hidden_size": 8, "output_dim": 48}
        text = TEXT | {"model_type": "qwen3"}
        config = transformers.Qwen3ASRConfig(audio_config=audio, text_config=text, audio_token_id=7)
        self.model = random_model(transformers.Qwen3ASRForConditionalGeneration(config))

    def features(self, samples: Samples) -> Any:
        from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

        seen = Qwen3ASRFeatureExtractor()(
            samples, padding=True, truncation=False, return_attention_mask=True, sampling_rate=RATE
        )
        return self.model.get_audio_features(seen["input_features"], seen["attention_mask"]).pooler_output

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class GraniteSpeech:
    """Also the class of Granite Speech Plus, which uses outputs of further layers."""

    #: Less than a Fourier transform, and several blocks with an incomplete last one.
    seconds = (0.01, 1.93)
    model_class = transformers.GraniteSpeechForConditionalGeneration
    config_class = transformers.GraniteSpeechConfig
    tapped: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        encoder = {"num_layers": 4, "hidden_dim": 64, "num_heads": 2, "feedforward_mult": 2, "output_dim": 42}
        encoder |= {"context_size": 20, "max_pos_emb": 24, "conv_kernel_size": 5}
        former = {"model_type": "blip_2_qformer", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        former |= {"intermediate_size": 80, "cross_attention_frequency": 1}
        former |= {"encoder_hidden_size": 64 * (1 + len(self.tapped.get("cat_hidden_layers", ())))}
        config = self.config_class(
            encoder_config=encoder | self.tapped,
            projector_config=former,
            # transformers 5.24 does not divide logits by logits_scaling here, as it does in other Granite models.
            text_config=TEXT | {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 1.0},
            audio_token_id=7,
            has_lora_adapter=False,
        )
        self.model = random_model(self.model_class(config))
        for name, buffer in self.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand_like(buffer) + 0.5)

    def features(self, samples: Samples) -> Any:
        return self.model.get_audio_features(mel_of_granite(samples)).pooler_output[0]

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class GraniteSpeechPlus(GraniteSpeech):
    model_class = transformers.GraniteSpeechPlusForConditionalGeneration
    config_class = transformers.GraniteSpeechPlusConfig
    tapped: ClassVar[dict[str, Any]] = {"cat_hidden_layers": [0, 2, 3]}


def mel_of_granite(samples: Samples) -> Any:
    """Return the features of transformers' extractor, which needs torchaudio: [1, n, 160]."""
    from transformers.audio_utils import mel_filter_bank

    samples = np.pad(samples, (0, max(0, 512 - len(samples))))
    window = torch.nn.functional.pad(torch.hann_window(400), (56, 56))
    spectra = torch.stft(torch.from_numpy(samples), 512, 160, window=window, return_complex=True).abs() ** 2
    filters = mel_filter_bank(257, 80, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    mel = (spectra.T @ torch.from_numpy(filters).float()).clip(min=1e-10).log10()
    mel = torch.maximum(mel, mel.max() - 8) / 4 + 1
    return mel[: len(mel) // 2 * 2].reshape(1, -1, 160)


class Parakeet:
    """Nemotron's text model and audio encoder in transformers, with the names of released checkpoints."""

    #: Less than a frame, a row of padding only, and convolutions in several pieces.
    seconds = (0.005, 0.64, 1.93, 21.3)

    def __init__(self) -> None:
        self.sound = {"model_type": "parakeet", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.sound |= {"intermediate_size": 96, "conv_kernel_size": 5, "num_mel_bins": 32, "subsampling_factor": 8}
        self.sound |= {"subsampling_conv_channels": 8, "projection_hidden_size": 40, "projection_bias": False}
        self.sound |= {"subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2, "convolution_bias": False}
        text = TEXT | NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.NemotronH_Omni_Reasoning_V3_Config(
            text_config=text | {"model_type": "nemotron_h"},
            vision_config=vision | {"model_type": "radio", "video_temporal_patch_size": 2},
            audio_config=self.sound | {"model_type": "parakeet_encoder"},
            audio_token_id=7,
        )
        self.model = random_model(transformers.NemotronH_Omni_Reasoning_V3(config))
        for name, buffer in self.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand_like(buffer) + 0.5)

    @staticmethod
    def extracted(samples: Samples) -> Any:
        """Return the features and their mask. The extractor's results are not numbers for less than two frames."""
        samples = np.pad(samples, (0, max(0, 320 - len(samples))))
        extractor = transformers.ParakeetFeatureExtractor(feature_size=32)
        return extractor([samples], sampling_rate=RATE, return_tensors="pt")

    def features(self, samples: Samples) -> Any:
        seen = self.extracted(samples)
        return self.model.get_audio_features(seen["input_features"], seen["attention_mask"]).pooler_output

    def save(self, folder: Path) -> None:
        """Save the model with an encoder of images, which llama.cpp requires in the file."""
        settings = VISION_FAMILIES["nemotron_v2_vl"].settings
        images = random_model(NemotronVL(ImageModelConfig(**settings, image_token_id=8)))
        images.llm = self.model.language_model
        images.save_pretrained(folder)
        processor_of("nemotron_v2_vl").save_pretrained(folder)
        names = {"audio_tower.": "sound_encoder.encoder.", "embed_audio.layer_norm": "sound_projection.norm"}
        names |= {f"embed_audio.linear_{i}": f"sound_projection.linear{i}" for i in (1, 2)}

        def change(config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
            config |= {"sound_config": self.sound, "sound_context_token": "<so_embedding>"}
            for name, tensor in self.model.state_dict().items():
                for start in filter(name.startswith, names):
                    tensors[names[start] + name.removeprefix(start)] = tensor
            return tensors

        rewrite(folder, change, {})


class Gemma4Unified:
    """transformers' model, which also sees."""

    seconds = (0.01, 50.01)

    def __init__(self) -> None:
        vision = {"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 128}
        tokens = {"image_token_id": 7, "video_token_id": 8, "audio_token_id": 9}
        config = transformers.Gemma4UnifiedConfig(
            text_config=GEMMA_4, vision_config=vision, audio_config={}, **tokens
        )
        self.model = random_model(transformers.Gemma4UnifiedForConditionalGeneration(config))

    def features(self, samples: Samples) -> Any:
        from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
            Gemma4UnifiedAudioFeatureExtractor,
        )

        seen = Gemma4UnifiedAudioFeatureExtractor()(samples, return_tensors="pt")
        return self.model.model.get_audio_features(seen["input_features"]).pooler_output[0]

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        processor_of("gemma4uv").save_pretrained(folder)


class Gemma4(Gemma4Unified):
    """transformers' model with embeddings for each layer, like E2B and E4B."""

    seconds = (0.09, 3.01)

    def __init__(self) -> None:
        audio = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 40}
        text = GEMMA_4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300}
        tokens = {"image_token_id": 7, "video_token_id": 8, "audio_token_id": 9}
        config = transformers.Gemma4Config(
            text_config=text, vision_config=FAMILY.settings["vision_config"], audio_config=audio, **tokens
        )
        self.model = random_model(transformers.Gemma4ForConditionalGeneration(config))
        for key, bound in self.model.named_buffers():
            if key.endswith(("_min", "_max")):  # bounds that clip some values
                bound.fill_(-2.0 if key.endswith("_min") else 1.5)

    def features(self, samples: Samples) -> Any:
        from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

        seen = Gemma4AudioFeatureExtractor()([samples], return_tensors="pt")
        out = self.model.model.get_audio_features(seen["input_features"], seen["input_features_mask"])
        return out.pooler_output[out.attention_mask]

    def logits(self, ids: list[int], sounds: list[Samples]) -> Any:
        """Return transformers' logits; it needs ids, because each layer has embeddings by id."""
        from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

        seen = Gemma4AudioFeatureExtractor()(sounds, return_tensors="pt")
        given = torch.tensor([9 if id_ < 0 else id_ for id_ in ids])[None]
        return self.model(input_ids=given, mm_token_type_ids=3 * (given == 9).int(), **seen).logits[0].numpy()


class Dots3Note:
    """transformers' model, which also sees."""

    #: Less than a token, a token without a complete frame, and two chunks.
    seconds = (0.005, 0.0801, 61.3)

    def __init__(self) -> None:
        settings = VISION_FAMILIES["dots3note_v"].settings | {"image_token_id": 7, "audio_token_id": 8}
        config = transformers.Dots3NoteConfig(**settings)
        self.model = random_model(transformers.Dots3NoteForConditionalGeneration(config))

    def features(self, samples: Samples) -> Any:
        from transformers.models.dots3_note.feature_extraction_dots3_note import Dots3NoteFeatureExtractor

        seen = Dots3NoteFeatureExtractor()([samples], sampling_rate=RATE)
        lengths = seen["chunk_sample_lengths"]
        return self.model.model.get_audio_features(seen["input_features"], lengths).pooler_output

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        processor_of("dots3note_v").save_pretrained(folder)
        as_dots3_note(folder)


class Gemma3n:
    """transformers' model, which also sees. Each clip has 188 tokens and <end_of_audio>."""

    #: Less than a frame, clips of several tokens, and two clips.
    seconds = (0.01, 0.335, 3.01, 31.0)

    def __init__(self) -> None:
        tokens = GEMMA_3N_TOKENS | {"audio_soft_tokens_per_image": 188}
        config = transformers.Gemma3nConfig(
            text_config=GEMMA_3N, vision_config=GEMMA_3N_VISION, audio_config=GEMMA_3N_AUDIO, **tokens
        )
        self.model = random_model(mobilenetv5.Gemma3nForConditionalGeneration(config))

    def encoded(self, samples: Samples) -> Any:
        """Return the features of a clip [n, width]; transformers encodes the padding of clips in a batch too."""
        seen = transformers.Gemma3nAudioFeatureExtractor()(
            np.pad(samples, (0, max(0, 513 - len(samples)))), return_tensors="pt"
        )
        out = self.model.model.get_audio_features(seen["input_features"], ~seen["input_features_mask"])
        assert not out.audio_mel_mask.any()
        return out.pooler_output[0]

    def features(self, samples: Samples) -> Any:
        embedder = self.model.model.embed_audio
        padding, rows = embedder(input_ids=torch.tensor([[315]]))[0], []
        for i in range(0, len(samples), 30 * RATE):
            clip = self.encoded(samples[i : i + 30 * RATE])
            rows += [clip, padding.expand(188 - len(clip), -1), self.model.end(embedder)]
        return torch.cat(rows)

    def logits(self, ids: list[int], sounds: list[Samples]) -> Any:
        given, clips = torch.tensor(ids), [self.encoded(samples) for samples in sounds]
        is_sound = given < 0
        given[is_sound] = 309
        given[:-1][is_sound[:-1] & ~is_sound[1:]] = 308  # <end_of_audio>
        n = max(map(len, clips))
        padded = torch.stack([torch.nn.functional.pad(clip, (0, 0, 0, n - len(clip))) for clip in clips])
        mask = torch.stack([torch.arange(n) >= len(clip) for clip in clips])
        out = SimpleNamespace(pooler_output=padded, audio_mel_mask=mask)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.model.model, "get_audio_features", lambda *_, **__: out)
            options = {"input_features": padded, "input_features_mask": mask}
            return self.model(input_ids=given[None], **options).logits[0].numpy()

    def save(self, folder: Path) -> None:
        """Save the model with one file for both processors, as in published checkpoints."""
        self.model.save_pretrained(folder)
        processor_of("gemma3nv").save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        settings = json.loads(transformers.Gemma3nAudioFeatureExtractor().to_json_string())
        settings |= json.loads(file.read_text("utf-8")) | {"processor_class": "Gemma3nProcessor"}
        file.write_text(json.dumps(settings), "utf-8")


FAMILIES: dict[str, Any] = {
    "dots3note_a": Dots3Note,
    "gemma3na": Gemma3n,
    "gemma4a": Gemma4,
    "gemma4ua": Gemma4Unified,
    "glma": GlmASR,
    "granite_speech": GraniteSpeech,
    "granite_speech plus": GraniteSpeechPlus,
    "meralion": MERaLiON,
    "musicflamingo": AudioFlamingo,
    "parakeet": Parakeet,
    "musicflamingo_rote": MusicFlamingo,
    "qwen2.5o audio": Qwen25Omni,
    "qwen2a": Qwen2Audio,
    "qwen3a": Qwen3ASR,
    "qwen3a omni": Qwen3Omni,
    "ultravox": Ultravox,
    "voxtral": Voxtral,
}


def random_model(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval().float().requires_grad_(False)


@cache
def made(name: str, folder: Path) -> Any:
    """Return a family's model, with its files in a folder: model.gguf and mmproj.gguf."""
    torch.manual_seed(len(name))
    family = FAMILIES[name]()
    family.save(folder)
    write_tokenizer(folder, 300)
    own = folder / name if (folder / name).exists() else folder
    for checkpoint, file in ((Checkpoint(folder), "model.gguf"), (MmprojCheckpoint(own), "mmproj.gguf")):
        list(run(plan(checkpoint, folder / file, "F32" if file == "model.gguf" else None)))
    return family


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, LLM]]]:
    @cache
    def of_family(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        return made(name, folder), folder

    with loading(of_family, "audio") as get:
        yield get


messages = partial(image_messages, kind="audio")


# -- Against transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_mels", [80, 128])
def test_spectrograms_are_those_of_transformers(n_mels: int) -> None:
    samples = sound(31.7)
    samples[200_000:300_000] = 0
    theirs = mel_of_whisper(samples, n_mels).numpy().T
    np.testing.assert_allclose(log_mel(samples, n_mels), theirs, rtol=0, atol=1e-4)
    expected = transformers.WhisperFeatureExtractor(feature_size=n_mels).mel_filters
    np.testing.assert_allclose(mel_filters(n_mels), expected.T, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [1, 513, 16_007, 480_000])
def test_spectrograms_of_gemma_3n_are_those_of_transformers(n: int) -> None:
    samples = sound(30)[:n]
    samples[2000:4000] = 0
    given = np.pad(samples, (0, max(0, 513 - n)))
    theirs = transformers.Gemma3nAudioFeatureExtractor()(given, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(gemma3n_sound.log_mel(samples, 128), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 321, 16_007, 480_000])
def test_spectrograms_of_parakeet_are_those_of_transformers(hearing: Any, n: int) -> None:
    """Transformers computes in float32, and logarithms of weak bands amplify its errors."""
    samples = sound(30)[:n]
    samples[2000:4000] = 0
    (frame,) = hearing("parakeet")[1]._encoder.prepare(samples, kind="audio").frames
    expected = Parakeet.extracted(samples)["input_features"][0]
    np.testing.assert_allclose(frame, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("device", "bound"), [("reference", 1e-3), ("cpu", 5e-3)])
def test_features_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, hearing: Any, name: str, device: str, bound: float
) -> None:
    family, llm = hearing(name)
    encoder, (host, *_) = MediaEncoder.open(llm.info.path.parent / "mmproj.gguf"), open_devices(device)
    encoder.backend = host.backend
    prepared = [encoder.prepare(sound(seconds), kind="audio") for seconds in family.seconds]
    for seconds, each, rows in zip(family.seconds, prepared, encoded(encoder, prepared), strict=True):
        theirs = family.features(sound(seconds)).numpy()
        assert rows[:, 0].shape == theirs.shape == (each.n_tokens, encoder.width)
        error = np.abs(rows[:, 0] - theirs).max() / np.abs(theirs).max()
        assert error < bound, (seconds, error)
    encoder.close()
    host.close()


def forward(family: Any, ids: list[int], sounds: list[Samples]) -> NDArray[np.float32]:
    """Return transformers' logits [n, n_vocab]."""
    if isinstance(family, Gemma3n | Gemma4):
        return family.logits(ids, sounds)  # type: ignore[no-any-return]
    given = torch.tensor(ids)
    embeddings = family.model.get_input_embeddings()(given.clamp(min=0))
    embeddings[given < 0] = torch.cat([family.features(samples) for samples in sounds])
    found: NDArray[np.float32] = family.model(inputs_embeds=embeddings[None]).logits[0].numpy()
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("device", "bound"), [("reference", 1.5e-3), ("cpu", 5e-3)])  # caches in float16
def test_logits_are_those_of_transformers(hearing: Any, name: str, device: str, bound: float) -> None:
    (family, llm), chunked = hearing(name, device), hearing(name, device, 16)[1]
    sounds = [sound(1.9), sound(0.7, 500.0)]
    chats = [
        ("one", sounds[0], "and two", sounds[1], "what is it"),
        ("An", sounds[0], "and two", sounds[1], "what is it"),
        ("one", sounds[0], "and two", sounds[1], "who was there then"),
    ]
    check_logits(llm, chunked, chats, "audio", lambda ids: forward(family, ids, sounds), bound)
    assert llm.counts.encoded == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_with_audio_continues_as_in_transformers(hearing: Any, name: str) -> None:
    family, llm = hearing(name, "cpu")
    sounds = [sound(1.3, 700.0)]
    chat = messages("hm", *sounds, "what is it")
    ids = llm.tokenize_chat(chat)
    written = list(ids)
    for _ in range(4):
        last = forward(family, written, sounds)[-1]
        last[list(llm.tokenizer.eog_ids)] = -np.inf  # `ignore_eos`
        written.append(int(last.argmax()))
    assert list(llm.chat(chat, **GREEDY).ids) == written[len(ids) :]


def test_rows_of_long_audio_see_128_rows_on_each_side(hearing: Any) -> None:
    encoder = read_encoder(hearing("parakeet")[1]._encoder._file, "audio")

    def returned(pieces: Any) -> Any:
        yield (yield from pieces)

    for n, side in ((8192, 8192), (8193, 128)):
        spans = [*returned(encoder.rows_in_pieces(np.zeros((8 * n, 32), np.float32)))][-1].spans
        assert spans.T.tolist() == [[max(i - side, 0), min(i + side + 1, n)] for i in range(n)]


def test_llama_cpp_writes_other_mel_bins_for_gemma_4_12b(hearing: Any) -> None:
    """Its converter writes 128 for any number of samples per token."""
    _, llm = hearing("gemma4ua", "reference")
    file = llm._encoder._file
    changed: Any = SimpleNamespace(
        metadata=dict(file.metadata) | {"clip.audio.num_mel_bins": 128}, tensors=file.tensors
    )
    encoder: Any = read_encoder(changed, "audio")
    assert encoder.n_samples == 640


def test_images_and_audio_in_one_prompt(hearing: Any) -> None:
    """Image tokens attend to each other; audio tokens do not."""
    family, llm = hearing("gemma4ua", "reference")
    samples, image = sound(0.3), picture(75, 130)
    template = "{% for part in messages[0].content %}{{ '<|' + part.type + '|>' }}.{% endfor %}"
    content = [{"type": "audio", "audio": samples}, {"type": "image", "image": image}] * 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llm, "_template", ChatTemplate(template))
        encode = llm._chat_encoder(None, None, "")
    ids, placed = encode(read_messages([{"role": "user", "content": content}], may_open_files=True))
    assert [each.media.is_causal for each in placed.placed] == [True, False] * 2
    seen = processor_of("gemma4uv")(images=[image], return_tensors="pt")
    pixels = {key: seen[key] for key in ("pixel_values", "image_position_ids")}
    made = [family.features(samples), torch.cat([*family.model.model.get_image_features(**pixels).pooler_output])]
    embeddings, kinds = family.model.get_input_embeddings()(torch.tensor(ids).clamp(min=0)), torch.zeros(len(ids))
    for i, each in enumerate(placed.placed):
        embeddings[each.start : each.stop] = made[i % 2].reshape(-1, embeddings.shape[1])
        kinds[each.start : each.stop] = (3, 1)[i % 2]
    expected = family.model(inputs_embeds=embeddings[None], mm_token_type_ids=kinds.int()[None]).logits[0].numpy()
    found, _ = logits(llm, ids, placed, placed.stop)
    assert np.abs(found - expected[placed.stop :]).max() / np.abs(expected).max() < 1e-3


def test_audio_tokens_have_consecutive_positions() -> None:
    """In models with several position axes audio tokens rotate like text, also next to an image."""
    placed = PromptMedia(
        [MediaTokens(1, PreparedMedia(b"a", 3, is_causal=True)), MediaTokens(5, PreparedMedia(b"b", 4, (2, 2)))]
    )
    places = placed.axes(0, 11)
    assert places[0].tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, 7, 8]
    assert (places[:, :5] == np.arange(5)).all()
    assert placed.ends(0, 11).tolist() == [1, 2, 3, 4, 5, 9, 9, 9, 9, 10, 11]


def test_all_families_are_compared() -> None:
    known = {name for name, projector in PROJECTORS.items() if projector.kind == "audio"}
    assert {*FAMILIES} - {"granite_speech plus", "qwen3a omni"} == known
