"""A GGUF file is converted to a folder of files that others may read as the umask says."""

from pathlib import Path

from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

from tinkercloud_testing.small_models.models import byte_tokenizer, tiny_llama
from tinkercloud_worker.convert_gguf import convert


def a_gguf_file(file: Path) -> Path:
    """Write a tiny Llama with its tokenizer as a GGUF file, and return it."""
    model, vocabulary = tiny_llama(), byte_tokenizer().get_vocab()
    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "ab"])
    writer.add_token_merges(["a b"])
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(str(stored), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_all_files_of_the_folder_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    convert(a_gguf_file(tmp_path / "model.gguf"), tmp_path / "converted")

    (tmp_path / "new").touch()
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "converted").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {(tmp_path / "new").stat().st_mode}
