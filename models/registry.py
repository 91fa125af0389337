"""Architectures by ``general.architecture``, and `read_model`, which builds a model from a file's header."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from localllm.errors import KernelError, ModelError, UnsupportedArchitectureError, quoted
from localllm.kernels.graph import CacheType, Graph
from localllm.kernels.operations import RopeAppend
from localllm.models.config import Header, ModelConfig, ModelMetadata, read_architecture, read_general
from localllm.models.diffusion import DREAM, LLADA, RND1, Diffusion
from localllm.models.hf_convert import MEANT, Array, rope_factors
from localllm.models.pooling import Pooling, read_kind
from localllm.models.weights import ModelFile, Weights

#: Largest default context of a model that writes by diffusion, in tokens.
MAX_DIFFUSION_CONTEXT = 4096


@dataclass(frozen=True)
class Conversion:
    """Conversion of a checkpoint to a GGUF file, from ``HF_NAMES``, ``hf_keys``, … of an architecture's module."""

    # GGUF's names of tensors by Hugging Face's names, where `tensor_names` differs
    names: Mapping[str, str] = field(default_factory=dict)
    # Return the additional keys for a configuration, without the architecture's name. A key that starts with a dot is
    # written without the dot and without the architecture's name. Keys with the value None are omitted.
    keys: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    # Return the name of a tensor with the number of its layer in the file, from its name in the checkpoint and the
    # configuration.
    name: Callable[[str, Any], str] = lambda name, config: name
    # Convert a tensor, from its name in the checkpoint, its array and the configuration, to an array or to several
    # arrays by GGUF's names. It may be called with arrays that have only a shape.
    tensor: Callable[[str, Array, Any], Array | Mapping[str, Array]] = lambda name, array, config: array
    # Return additional tensors for a configuration, which are not in the checkpoint.
    extra: Callable[[Any], Mapping[str, Array]] = rope_factors
    # Settings without a key in GGUF files, and their implied values: see `localllm.models.hf_convert.MEANT`.
    meant: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MEANT)

    @classmethod
    def of(cls, module: Any, meant: Mapping[str, tuple[Any, ...]]) -> Conversion:
        """Return the conversion in a module, whose ``HF_MEANT`` replaces settings in ``meant``."""
        hooks = {name: getattr(module, f"hf_{name}", None) for name in ("keys", "name", "tensor", "extra")}
        functions = {name: function for name, function in hooks.items() if function}
        return cls(getattr(module, "HF_NAMES", {}), **functions, meant={**meant, **getattr(module, "HF_MEANT", {})})


@dataclass(frozen=True)
class Architecture:
    """A module of this folder, and the models that it supports.

    The module contains ``record(m: Header) -> Graph`` and, if needed, the parts of a `Conversion`.
    """

    module: str
    models: str
    # Hugging Face's names of the architecture, separated by spaces: ``model_type`` in config.json, or the class if
    # two architectures use the same type. Empty if checkpoints cannot be converted.
    hf_types: str = ""
    # whether an encoder reads prompts: the module's ``PromptEncoder``
    has_encoder: bool = False
    has_block: bool = False  # whether it can also record the block after the last layer (`localllm.models.mtp`)
    # whether this block is in a separate file, because its tensors do not fit next to the model's
    block_is_separate: bool = False
    is_encoder: bool = False  # whether it is always an embedding model, independently of the file's keys
    diffusion: Diffusion | None = None  # how it writes by default, if it writes by diffusion
    # whether a conversion needs the target model, because a drafter's checkpoint lacks parts such as the vocabulary
    takes_target: bool = False

    @property
    def record(self) -> Callable[[Header], Graph]:
        record: Callable[[Header], Graph] = import_module(f"localllm.models.{self.module}").record
        return record

    @property
    def prompt_encoder(self) -> Any:
        """Class of the encoder that reads prompts."""
        return import_module(f"localllm.models.{self.module}").PromptEncoder

    @property
    def conversion(self) -> Conversion:
        return Conversion.of(import_module(f"localllm.models.{self.module}"), MEANT)


ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture("afmoe", "Trinity", "afmoe"),
    "apertus": Architecture("apertus", "Apertus", "apertus"),
    "arcee": Architecture("arcee", "AFM 4.5B", "arcee"),
    "arctic": Architecture("arctic", "Snowflake Arctic", "arctic"),
    "arwkv7": Architecture("rwkv7", "ARWKV", "rwkv_hybrid"),
    "axk2": Architecture("axk2", "A.X-K2", "axk2"),
    "baichuan": Architecture("baichuan", "Baichuan 1 and 2", "baichuan"),
    "bailingmoe": Architecture("bailingmoe", "Ling 1 and 1.5", "BailingMoeForCausalLM"),
    "bailingmoe2": Architecture("bailingmoe2", "Ling and Ring 2, Sarvam 30B", "bailing_moe sarvam_moe"),
    "bailingmoe3": Architecture("bailingmoe3", "Ling 3", "bailing_hybrid"),
    "bert": Architecture(
        "bert",
        "BERT, DistilBERT, RoBERTa and XLM-R, as embedding models and rerankers",
        "bert roberta xlm-roberta",
        is_encoder=True,
    ),
    "bitnet": Architecture("bitnet", "BitNet b1.58", "bitnet BitnetForCausalLM"),
    "bloom": Architecture("bloom", "BLOOM, BLOOMZ", "bloom"),
    "chameleon": Architecture("chameleon", "Chameleon, text", "chameleon"),
    "chatglm": Architecture("chatglm", "ChatGLM 3, GLM-4 9B", "glm"),
    "codeshell": Architecture("codeshell", "CodeShell", "codeshell kclgpt"),
    "cogvlm": Architecture("cogvlm", "CogVLM 1 and 2, text", "CogVLMForCausalLM cogvlm"),
    "cohere2": Architecture("cohere", "Command R7B, Command A", "cohere2"),
    "cohere2moe": Architecture("cohere", "North", "cohere2_moe"),
    "command-r": Architecture("cohere", "Command R, Aya", "cohere"),
    "dbrx": Architecture("dbrx", "DBRX", "dbrx"),
    "deci": Architecture("deci", "Llama Nemotron 51B, Super and Ultra, DeciLM", "nemotron-nas deci"),
    "deepseek": Architecture("deepseek", "DeepSeek MoE 16B", "deepseek"),
    "deepseek2": Architecture(
        "deepseek2",
        "DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Sarvam 105B, Youtu-LLM, Youtu-VL",
        "deepseek_v2 deepseek_v3 kimi_k2 glm4_moe_lite sarvam_mla youtu youtu_vl",
        has_block=True,
    ),
    "deepseek2-ocr": Architecture(
        "deepseek",
        "DeepSeek-OCR and OCR-2, Unlimited-OCR",
        "DeepseekOCRForCausalLM DeepseekOCR2ForCausalLM UnlimitedOCRForCausalLM deepseek_ocr2 deepseek_ocr2_text "
        "unlimited_ocr unlimited_ocr_text",
    ),
    "deepseek32": Architecture("deepseek32", "DeepSeek V3.2", "deepseek_v32", has_block=True),
    "deepseek4": Architecture(
        "deepseek4", "DeepSeek V4, text", "deepseek_v4", has_block=True, block_is_separate=True
    ),
    "dots1": Architecture("dots1", "dots.llm1", "dots1"),
    "dots3note": Architecture("dots3note", "Dots 3 Note", "dots3_note dots3_note_text"),
    "dream": Architecture("dream", "Dream", "Dream", diffusion=DREAM),
    "embedding-gemma2": Architecture(
        "embedding_gemma2",
        "EmbeddingGemma 2, text, as embedding model",
        "embedding_gemma2 embedding_gemma2_text",
        is_encoder=True,
    ),
    "ernie4_5": Architecture("ernie4_5", "ERNIE 4.5, dense", "ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5", "ERNIE 4.5 with experts", "ernie4_5_moe"),
    "eurobert": Architecture("eurobert", "EuroBERT, as embedding models", "eurobert", is_encoder=True),
    "exaone": Architecture("exaone", "EXAONE 3 and 3.5", "exaone"),
    "exaone-moe": Architecture("exaone_moe", "K-EXAONE", "exaone_moe"),
    "exaone4": Architecture("exaone4", "EXAONE 4", "exaone4"),
    "falcon": Architecture("falcon", "Falcon 7B to 180B", "falcon"),
    "falcon-h1": Architecture("falcon_h1", "Falcon-H1", "falcon_h1"),
    "gemma": Architecture("gemma", "Gemma", "gemma"),
    "gemma-embedding": Architecture("gemma3", "EmbeddingGemma", "gemma3_text", is_encoder=True),
    "gemma2": Architecture("gemma2", "Gemma 2", "gemma2 meralion2"),
    "gemma3": Architecture("gemma3", "Gemma 3", "gemma3 gemma3_text"),
    "gemma3n": Architecture("gemma3n", "Gemma 3n", "gemma3n gemma3n_text"),
    "gemma4": Architecture("gemma4", "Gemma 4", "gemma4 gemma4_text gemma4_unified"),
    "glm-dsa": Architecture("deepseek32", "GLM-5, 5.1 and 5.2", "glm_moe_dsa", has_block=True),
    "glm4": Architecture("glm4", "GLM-4 (0414), GLM-Z1, GLM-OCR", "glm4 glm4v glm4v_text glm_ocr_text"),
    "glm4moe": Architecture("glm4moe", "GLM-4.5, 4.6 and 4.7, Solar Open", "glm4_moe glm4v_moe_text", has_block=True),
    "glm5-next": Architecture("glm5_next", "GLM-5.3 Flash, text", "glm5_next glm5_next_text"),
    "gpt-oss": Architecture("gpt_oss", "gpt-oss", "gpt_oss"),
    "gpt2": Architecture("gpt2", "GPT-2", "gpt2"),
    "gptneox": Architecture("gptneox", "GPT-NeoX, Pythia", "gpt_neox"),
    "granite": Architecture(
        "granite",
        "Granite 3 and 4, dense",
        "granite granite4_vision granite4_vision_text granite_speech granite_speech_plus",
    ),
    "granite_swa": Architecture(
        "granite", "Granite with windows, dense and with experts", "granite_swa granitemoe_swa"
    ),
    "granitehybrid": Architecture("granite", "Granite 4 with Mamba layers", "granitemoehybrid"),
    "granitemoe": Architecture("granite", "Granite 3 and 4 with experts", "granitemoe granitemoeshared"),
    "grok": Architecture("grok", "Grok 1 and 2", "Grok1ForCausalLM GrokForCausalLM Grok1ModelForCausalLM"),
    "grovemoe": Architecture("grovemoe", "GroveMoE", "grove_moe GroveMoeForCausalLM"),
    "hrm_text": Architecture("hrm_text", "HRM-Text", "hrm_text"),
    "hunyuan-dense": Architecture("hunyuan", "Hunyuan, dense", "hunyuan_v1_dense"),
    "hunyuan-moe": Architecture("hunyuan", "Hunyuan A13B", "hunyuan_v1_moe"),
    "hunyuan_vl": Architecture("hunyuan", "HunyuanOCR, text", "hunyuan_vl hunyuan_vl_text"),
    "hy_v3": Architecture("hy_v3", "Hunyuan 3", "hy_v3", has_block=True),
    "hy_v4": Architecture("hy_v4", "Hunyuan 4, text", "hy_v4 hy_v4_vl hy_v4_vl_text"),
    "internlm2": Architecture("internlm2", "InternLM 2 and 2.5", "internlm2"),
    "jais": Architecture("jais", "Jais 1", "jais"),
    "jais2": Architecture("nemotron", "Jais 2", "jais2"),
    "jamba": Architecture("jamba", "Jamba", "jamba"),
    "jina-bert-v2": Architecture(
        "jina_bert_v2", "Jina Embeddings v2", "JinaBertForMaskedLM JinaBertModel", is_encoder=True
    ),
    "jina-bert-v3": Architecture("jina_bert_v3", "Jina Embeddings v3", "jina_embeddings_v3", is_encoder=True),
    "kimi-linear": Architecture("kimi_linear", "Kimi Linear", "kimi_linear"),
    "kolibri1": Architecture("kolibri1", "Kolibri 1", "kolibri1"),
    "laguna": Architecture("laguna", "Laguna", "laguna"),
    "lara_mini": Architecture("lara_mini", "Lara 4 Mini", "lara_mini"),
    "lfm2": Architecture("lfm2", "LFM2", "lfm2"),
    "lfm2moe": Architecture("lfm2", "LFM2 with experts", "lfm2_moe"),
    "lfm3": Architecture("lfm3", "LFM3", "lfm3"),
    "llada": Architecture("llada", "LLaDA and LLaDA 1.5", "llada", diffusion=LLADA),
    "llada-moe": Architecture(
        "llada", "LLaDA-MoE", "LLaDAMoEModel LLaDAMoEModelLM lladamoe llada_moe", diffusion=LLADA
    ),
    "llama": Architecture(
        "llama",
        "Llama 1 to 3.x, Mistral, Mixtral, TinyLlama, SmolLM, IQuest-Coder",
        "llama iquestcoder mistral mixtral internlm3 minicpmv/None minicpmv/2.5 minicpmv/4.0 glmasr",
    ),
    "llama-embed": Architecture(
        "llama", "Llama-Embed-Nemotron, as embedding model", "llama_bidirec", is_encoder=True
    ),
    "llama4": Architecture("llama4", "Llama 4, text", "llama4 llama4_text"),
    "maincoder": Architecture("maincoder", "Maincoder", "maincoder"),
    "mamba": Architecture("mamba", "Mamba, Falcon Mamba", "mamba falcon_mamba"),
    "mamba2": Architecture("mamba2", "Mamba 2", "mamba2"),
    "maple": Architecture("maple", "Maple", "maple MapleForCausalLM"),
    "mellum": Architecture("mellum", "Mellum 2", "mellum"),
    "mimo2": Architecture("mimo2", "MiMo V2 and V2.5", "mimo_v2_flash mimo_v2"),
    "minicpm": Architecture("granite", "MiniCPM 1 and 2", "minicpm"),
    "minicpm3": Architecture("minicpm3", "MiniCPM 3", "minicpm3"),
    "minimax-01": Architecture(
        "minimax_01", "MiniMax-01 and M1", "minimax minimax_text_01 MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM"
    ),
    "minimax-m2": Architecture("minimax_m2", "MiniMax-M2", "minimax_m2"),
    "minimax-m3": Architecture("minimax_m3", "MiniMax-M3", "minimax_m3_vl minimax_m3_vl_text"),
    "mistral3": Architecture("mistral3", "Ministral 3, Devstral 2", "ministral3 mistral3"),
    "mistral4": Architecture("mistral4", "Mistral Small 4", "mistral4"),
    "modern-bert": Architecture(
        "modern_bert", "ModernBERT, as embedding models and rerankers", "modernbert", is_encoder=True
    ),
    "mpt": Architecture("mpt", "MPT, SEA-LION 7B", "mpt"),
    "muse-glimmer": Architecture("muse_glimmer", "Muse Glimmer", "muse_glimmer muse_glimmer_text"),
    "nanbeige": Architecture("nanbeige", "Nanbeige 4.2", "nanbeige"),
    "nemotron": Architecture("nemotron", "Nemotron 3 and 4, Minitron", "nemotron"),
    "nemotron_h": Architecture("nemotron_h", "Nemotron-H, Nemotron Nano 2", "nemotron_h"),
    "nemotron_h_moe": Architecture("nemotron_h", "Nemotron 3, with experts", "nemotron_h"),
    "neo-bert": Architecture("neo_bert", "NeoBERT, as embedding models", "neobert", is_encoder=True),
    "nomic-bert": Architecture("nomic_bert", "Nomic Embed", "nomic_bert", is_encoder=True),
    "nomic-bert-moe": Architecture("nomic_bert_moe", "Nomic Embed v2", "NomicBertMoe", is_encoder=True),
    "olmo": Architecture("olmo", "OLMo 1", "olmo"),
    "olmo2": Architecture("olmo2", "OLMo 2 and 3", "olmo2 olmo3"),
    "olmoe": Architecture("olmoe", "OLMoE", "olmoe"),
    "openelm": Architecture("openelm", "OpenELM", "openelm"),
    "orion": Architecture("stablelm", "Orion", "orion"),
    "paddleocr": Architecture("ernie4_5", "PaddleOCR-VL, text", "paddleocr_vl paddleocr_vl_text"),
    "pangu-embedded": Architecture("qwen2", "openPangu Embedded", "PanguEmbedded"),
    "phi2": Architecture("phi2", "Phi 1, 1.5 and 2", "phi"),
    "phi3": Architecture("phi3", "Phi-3, 3.5 and 4", "phi3 phi4-siglip"),
    "phimoe": Architecture("phimoe", "Phi-3.5-MoE, Phi-mini-MoE", "phimoe"),
    "plamo": Architecture("plamo", "PLaMo 13B", "plamo"),
    "plamo2": Architecture("plamo2", "PLaMo 2", "plamo2 Plamo2ForCausalLM"),
    "plamo3": Architecture("plamo3", "PLaMo 3", "plamo3 Plamo3ForCausalLM"),
    "plm": Architecture("plm", "PLM 1.8B", "plm PLMForCausalLM"),
    "qwen": Architecture("qwen", "Qwen 1", "qwen"),
    "qwen2": Architecture("qwen2", "Qwen 2 and 2.5", "qwen2 dots_ocr minicpmv/2.6 minicpmo/2.6"),
    "qwen2moe": Architecture("qwen2", "Qwen 1.5 and 2 with experts", "qwen2_moe"),
    "qwen2vl": Architecture(
        "qwen2",
        "Qwen 2 and 2.5 VL, text",
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni qwen2_5_omni_text",
    ),
    "qwen3": Architecture("qwen3", "Qwen 3", "qwen3 minicpmv/4.5 minicpmo/4.5"),
    "qwen35": Architecture("qwen35", "Qwen 3.5 and 3.6", "qwen3_5 qwen3_5_text minicpmv4_6", has_block=True),
    "qwen35moe": Architecture(
        "qwen35", "Qwen 3.5 and 3.6 with experts", "qwen3_5_moe qwen3_5_moe_text", has_block=True
    ),
    "qwen3moe": Architecture("qwen3", "Qwen 3 with experts", "qwen3_moe"),
    "qwen3next": Architecture("qwen3next", "Qwen 3 Next", "qwen3_next", has_block=True),
    "qwen3vl": Architecture("qwen3", "Qwen 3 VL, text", "qwen3_vl qwen3_vl_text"),
    "qwen3vlmoe": Architecture(
        "qwen3",
        "Qwen 3 VL with experts, Qwen 3 Omni, text",
        "qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe qwen3_omni_moe_text",
    ),
    "qwen4exp": Architecture("qwen4exp", "Qwen 3.8 Flash Next, text", "qwen4_exp qwen4_exp_text"),
    "refact": Architecture("refact", "Refact 1.6B", "gpt_refact"),
    "rnd1": Architecture("rnd1", "RND1", "rnd1", diffusion=RND1),
    "rwkv6": Architecture("rwkv6", "RWKV 6", "rwkv6"),
    "rwkv6qwen2": Architecture("rwkv6", "QRWKV 6", "rwkv6qwen2 RWKV6Qwen2ForCausalLM"),
    "rwkv7": Architecture("rwkv7", "RWKV 7", "rwkv7"),
    "seed_oss": Architecture("seed_oss", "Seed-OSS", "seed_oss"),
    "smallthinker": Architecture("smallthinker", "SmallThinker", "smallthinker"),
    "smollm3": Architecture("smollm3", "SmolLM3", "smollm3"),
    "spark2_5": Architecture("spark2_5", "Spark-X2.5", "spark2_5"),
    "stablelm": Architecture("stablelm", "StableLM 1 and 2", "stablelm"),
    "starcoder": Architecture("gpt2", "StarCoder, SantaCoder", "gpt_bigcode"),
    "starcoder2": Architecture("starcoder2", "StarCoder 2", "starcoder2"),
    "step35": Architecture("step35", "Step 3.5 and 3.7 Flash, text", "step3p5 step3p7"),
    "t5": Architecture(
        "t5",
        "T5, Flan-T5, mT5, UMT5",
        "T5ForConditionalGeneration T5WithLMHeadModel MT5ForConditionalGeneration UMT5ForConditionalGeneration",
        has_encoder=True,
    ),
    "t5encoder": Architecture("t5", "T5's encoders, as embedding models", "T5EncoderModel", is_encoder=True),
    "talkie": Architecture("talkie", "Talkie 1930 13B", "talkie"),
    "xverse": Architecture("llama", "XVERSE", "xverse"),
}


#: Drafters that read the cache or hidden states of a target model. They cannot run alone.
DRAFTERS = {
    "dflash": Architecture(
        "dflash",
        "DFlash, DFlash 2 and DSpark drafters",
        "muse_glimmer_assistant DFlashDraftModel DFlash2DraftModel Qwen3DSparkModel DSparkDraftModel "
        "DSparkSpeculator LingDSparkModel Lfm2DSparkDraftModel",
        takes_target=True,
    ),
    "eagle3": Architecture(
        "eagle3",
        "EAGLE-3 drafters",
        "LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3Speculator Eagle3DraftModel",
        takes_target=True,
    ),
    "gemma4-assistant": Architecture(
        "gemma4_assistant", "Gemma 4's assistants", "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM"
    ),
}


@dataclass(frozen=True)
class Model:
    """A model's configuration and forward pass. The graph refers to the tensors of the model's file."""

    config: ModelConfig
    graph: Graph
    # whether sequences can be longer than the original context; LongRoPE then uses different frequencies
    is_long: bool = False
    # pooling of the graph's output; None if the output is logits
    pooling: Pooling | None = None
    # how the model writes, if it writes by diffusion
    diffusion: Diffusion | None = None

    @property
    def default_context(self) -> int:
        """Context if the memory suffices. A step of a diffusion model evaluates a whole text."""
        n = self.config.context_length
        return n if self.diffusion is None else min(n, MAX_DIFFUSION_CONTEXT)


def find_architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture named in ``general.architecture``. Raises UnsupportedArchitectureError."""
    architecture = read_architecture(metadata)
    if architecture in DRAFTERS:
        raise UnsupportedArchitectureError(
            f"the file contains a drafter ({architecture}), which cannot run alone: load its target model, with this "
            "file as the draft model"
        )
    if architecture not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"the architecture {quoted(architecture)} is not supported; docs/models.md lists the "
            f"{len(ARCHITECTURES)} that localllm runs"
        )
    return ARCHITECTURES[architecture]


def has_block(file: ModelFile) -> bool:
    """Return whether a file has a block for multi-token prediction after the last layer that localllm can use."""
    architecture = ARCHITECTURES.get(read_architecture(file.metadata))
    n_layers = read_general(ModelMetadata(file.metadata, read_architecture(file.metadata)), file.tensors).n_layers
    return (
        architecture is not None and architecture.has_block and f"blk.{n_layers}.nextn.eh_proj.weight" in file.tensors
    )


def has_only_block(file: ModelFile) -> bool:
    """Return whether a file has such a block, but none of the layers before it."""
    return not any(name.startswith("blk.0.") for name in file.tensors) and has_block(file)


def read_model(
    file: ModelFile,
    context: int | None = None,
    cache_type: CacheType = "f16",
    *,
    is_block: bool = False,
    sees: bool = False,
    target: Graph | None = None,
) -> Model:
    """Return the model in a file, from the file's header. No weight is read.

    Args:
        context: maximum number of tokens of a sequence; by default the context length of the training. Models with
            LongRoPE use different frequencies if it is larger than their original context.
        cache_type: storage type of keys and values.
        is_block: whether to read the block after the last layer (see `has_block`), as a model of one layer.
        sees: whether batches contain embeddings of images.
        target: graph of the target model, for one of `DRAFTERS`.

    Raises:
        UnsupportedArchitectureError: the file's architecture is not one of `ARCHITECTURES`.
        ModelError: a hyper-parameter is missing, has the wrong type, is out of range, contradicts another one or is
            not supported; or the tensors do not fit the hyper-parameters.
    """
    drafter = DRAFTERS.get(read_architecture(file.metadata))
    architecture = drafter or find_architecture(file.metadata)
    meta, weights = ModelMetadata(file.metadata, read_architecture(file.metadata)), Weights(file)
    config = read_general(meta, file.tensors)
    weights.skip_layers(config.n_layers)
    context = config.context_length if context is None else context
    try:
        diffusion = architecture.diffusion and architecture.diffusion.read(file.metadata, config.n_vocab)
        is_causal = meta.read("attention.causal", bool, not architecture.is_encoder) and diffusion is None
        has_logits = diffusion is not None or (is_causal and not architecture.is_encoder)
        kind = read_kind(meta, weights) or (None if has_logits else "mean")
        header = Header(meta, config, weights, context, cache_type, kind, is_block, target, sees, is_causal)
        graph = architecture.record(header)
        pooling = None if kind is None else Pooling.read(meta, weights, kind, graph)
    except KernelError as error:
        raise ModelError(f"{error}: the hyper-parameters contradict each other") from error
    if not is_causal and graph.states:
        raise ModelError(
            f"{meta.architecture}.attention.causal is false, but the model has recurrent layers, which localllm "
            "computes from earlier tokens only: it does not support this variant"
        )
    if is_block:
        return Model(replace(config, n_layers=1), graph, context > config.original_context)
    operations = [node.operation for node in graph.nodes]
    rotates = any(isinstance(operation, RopeAppend) and operation.rope is not None for operation in operations)
    meta.check_all_read(file.tensors, rotates=rotates)
    weights.check_all_used()
    # Layers may run several times, and a decoder may have fewer layers than its encoder.
    n_layers = max(config.n_layers, graph.n_layers) if graph.prompt is None else graph.n_layers
    config = replace(config, n_layers=n_layers)
    return Model(config, graph, context > config.original_context, pooling, diffusion)
