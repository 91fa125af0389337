"""Write the trained network as a GGUF file, and load it."""

from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from torch import Tensor

from tests.demo_model.data import CHAT_TEMPLATE, END
from tests.demo_model.model import DemoConfig, DemoModel


def write_gguf(path: Path, model: DemoModel, vocabulary: sentencepiece.SentencePieceProcessor) -> None:
    """Write the model with F16 matrices and F32 norms.

    Parameters have the same names in torch and GGUF.  Rows of Q and K need no permutation, because the network
    rotates adjacent pairs, which is GGUF's order for `llama` (see model.py).
    """
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("localllm demo")
    writer.add_description("A very small chat model that answers questions about localllm and tells short stories.")
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_vocabulary(writer, vocabulary)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        writer.add_tensor(name, values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: sentencepiece.SentencePieceProcessor) -> None:
    size = vocabulary.get_piece_size()
    end = vocabulary.piece_to_id(END)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([vocabulary.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([vocabulary.get_score(i) for i in range(size)])
    writer.add_token_types([_token_type(vocabulary, i) for i in range(size)])
    writer.add_bos_token_id(vocabulary.bos_id())
    # Stories and turns of a chat end with the same token, so runtimes that know only EOS stop, too.
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_unk_token_id(vocabulary.unk_id())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _token_type(vocabulary: sentencepiece.SentencePieceProcessor, token: int) -> gguf.TokenType:
    if vocabulary.is_unknown(token):
        return gguf.TokenType.UNKNOWN
    if vocabulary.is_control(token):
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if vocabulary.is_byte(token) else gguf.TokenType.NORMAL


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file, dequantised by the `gguf` package."""
    return {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        for tensor in gguf.GGUFReader(path).tensors
    }


def read_gguf(path: Path, config: DemoConfig) -> DemoModel:
    """Return the network with the weights that the file stores."""
    model = DemoModel(config)
    model.load_state_dict(read_state(path))
    return model.eval()
